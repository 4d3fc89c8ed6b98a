#include "linear.h"

using namespace megatron_fp4;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init<c10::Device, uint64_t, uint64_t, int, int>())
      .def("constant", &Program::constant)
      .def("arena", &Program::arena)
      .def("part", [](Program& self, int memory, int owner, int64_t offset) {
        self.part(memory, {owner, offset});
      })
      .def("allocate", &Program::allocate)
      .def("launch", &Program::launch)
      .def("product", &Program::product)
      .def("call", &Program::call)
      .def("wait", &Program::wait)
      .def("zero", &Program::zero)
      .def("releases", &Program::releases)
      .def("result", &Program::result)
      .def("input", &Program::input)
      .def("run", &Program::run);
  py::class_<Pass, std::shared_ptr<Pass>>(module, "Pass")
      .def(py::init([](std::shared_ptr<Program> program, int saved, int held,
                       std::vector<int> labels) {
        return Pass{std::move(program), saved, held, std::move(labels)};
      }));
  py::class_<Held, std::shared_ptr<Held>>(module, "Held")
      .def(py::init())
      .def_readwrite("fprop", &Held::fprop)
      .def_readwrite("dgrad", &Held::dgrad);
  py::class_<Tallies, std::shared_ptr<Tallies>>(module, "Tallies")
      .def(py::init())
      .def("take", &Tallies::take);
  py::class_<CallOfLinear, std::shared_ptr<CallOfLinear>>(module, "Call")
      .def(py::init([](std::array<std::shared_ptr<Pass>, 4> passes, Words words,
                       std::vector<at::Tensor> others, std::shared_ptr<Held> held,
                       std::shared_ptr<Tallies> tallies, py::object weight,
                       std::optional<at::Tensor> unread, py::object fallback,
                       std::optional<at::Tensor> before, bool swiglu_follows) {
        return std::make_shared<CallOfLinear>(CallOfLinear{
            {passes[0], passes[1]}, {passes[2], passes[3]}, words, std::move(others),
            std::move(held), std::move(tallies), std::move(weight),
            unread.value_or(at::Tensor()), std::move(fallback), before.value_or(at::Tensor()),
            swiglu_follows});
      }));
  module.def("linear", [](const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias,
                          std::shared_ptr<CallOfLinear> call) {
    return linear(x, weight, bias, std::move(call));
  });
}
