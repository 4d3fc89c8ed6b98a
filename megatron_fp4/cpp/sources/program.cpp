#include "program.h"

#include <ATen/TensorGeometry.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <cstring>

namespace megatron_fp4 {

namespace {

using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, void*, void**, void**);
using Fill = int (*)(void*, unsigned char, size_t, void*);
using SetAttribute = int (*)(void*, int, const void*, size_t);
using Multiply = int (*)(void*, void*, const void*, const void*, void*, const void*, void*,
                         const void*, const void*, void*, void*, void*, const void*, void*, size_t,
                         void*);

template <class T>
T as(uint64_t address) {
  return reinterpret_cast<T>(address);
}

void check(int status, const char* name) {
  TORCH_CHECK(status == 0, name, ": status ", status);
}

// The view of memory whose tensor is `base` and whose first byte is `start`.
at::Tensor view_of(const at::Tensor& base, const char* start, int64_t offset, const View& view) {
  const auto type = c10::scalarTypeToTypeMeta(view.dtype);
  const auto& storage = base.storage();
  const auto bytes = start + offset - static_cast<const char*>(storage.data());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), base.key_set(),
      type);
  auto* made = tensor.unsafeGetTensorImpl();
  made->set_sizes_and_strides(view.sizes, view.strides);
  made->set_storage_offset(bytes / static_cast<int64_t>(type.itemsize()));
  return tensor;
}

// A Python number that an operator takes as a tensor, as the dispatcher passes it on.
py::object wrapped(const py::handle& value, const c10::Argument& argument) {
  const bool is_number = PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr());
  if (!is_number || !argument.type()->isSubtypeOf(*c10::TensorType::get()))
    return py::reinterpret_borrow<py::object>(value);
  const auto scalar = torch::jit::toIValue(value, c10::NumberType::get()).toScalar();
  auto tensor = c10::scalar_to_tensor(scalar);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return py::cast(tensor);
}

bool is_wrapped(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

}  // namespace

// The memory of one run.
struct Program::Frame {
  const Words& words;
  int inputs;
  void* stream;
  std::vector<char*> starts;          // by memory
  std::vector<at::Tensor> tensors;    // what owns it; undefined for parts
  std::vector<int> owners;            // the arena of a part, else the memory itself
  std::vector<c10::IValue> works;     // the Work of collectives

  char* at(MemoryOffset place) const { return starts[place.memory] + place.offset; }

  void own(int memory, at::Tensor tensor) {
    starts[memory] = static_cast<char*>(tensor.data_ptr());
    tensors[memory] = std::move(tensor);
    owners[memory] = memory;
  }

  at::Tensor view(const View& view) const {
    const int memory = view.place.memory;
    if (memory < 0) return at::Tensor();
    const auto& owner = tensors[owners[memory]];
    auto tensor = view_of(owner, starts[memory], view.place.offset, view);
    // So that autograd notices if a saved input is changed in place. What is made in inference mode
    // has no counter.
    if (memory < inputs && !owner.is_inference() && !tensor.is_inference())
      tensor.unsafeGetTensorImpl()->set_version_counter(
          owner.unsafeGetTensorImpl()->version_counter());
    return tensor;
  }
};

Program::Program(c10::Device device, uint64_t kernels, uint64_t fill, int inputs, int memories)
    : device_(device), kernels_(kernels), fill_(fill), inputs_(inputs), memories_(memories) {}

void Program::constant(int memory, at::Tensor tensor) {
  constants_.emplace_back(memory, std::move(tensor));
}

void Program::arena(int memory, int64_t bytes) { arenas_.emplace_back(memory, bytes); }

void Program::part(int memory, MemoryOffset place) { parts_.emplace_back(memory, place); }

void Program::allocate(int memory, std::vector<int64_t> sizes, at::ScalarType dtype) {
  steps_.push_back({Allocate{memory, std::move(sizes), dtype}, {}});
}

void Program::launch(uint64_t function, std::array<unsigned, 3> grid, unsigned threads,
                     unsigned shared, std::vector<int64_t> cells,
                     const std::vector<std::tuple<int, int, int64_t>>& addresses,
                     const std::vector<std::pair<int, int>>& words) {
  Launch made{function, grid, threads, shared, std::move(cells), {}, {}};
  for (const auto& [cell, memory, offset] : addresses)
    made.addresses.push_back({cell, {memory, offset}});
  for (const auto& [cell, word] : words) made.words.push_back({cell, word});
  steps_.push_back({std::move(made), {}});
}

void Program::product(const py::dict& fields) {
  const auto number = [&](const char* name) { return fields[name].cast<uint64_t>(); };
  const auto place = [&](const char* name) {
    const auto [memory, offset] = fields[name].cast<std::pair<int, int64_t>>();
    return MemoryOffset{memory, offset};
  };
  Product made;
  made.set_attribute = number("set_attribute");
  made.multiply = number("multiply");
  made.handle = number("handle");
  made.operation = number("operation");
  made.a_layout = number("a_layout");
  made.b_layout = number("b_layout");
  made.out_layout = number("out_layout");
  made.algorithm = number("algorithm");
  made.a_scale_attribute = fields["a_scale_attribute"].cast<int>();
  made.b_scale_attribute = fields["b_scale_attribute"].cast<int>();
  made.alpha = fields["alpha"].cast<float>();
  made.beta = fields["beta"].cast<float>();
  made.workspace_bytes = fields["workspace_bytes"].cast<int64_t>();
  made.a = place("a");
  made.b = place("b");
  made.a_scale = place("a_scale");
  made.b_scale = place("b_scale");
  made.out = place("out");
  made.workspace = place("workspace");
  steps_.push_back({made, {}});
}

void Program::call(const std::string& name, const std::string& overload, const py::tuple& args,
                   const py::dict& kwargs, const py::function& place_of,
                   std::vector<int> results) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  py::list given;
  for (size_t i = 0; i < args.size(); ++i) given.append(wrapped(args[i], op.schema().arguments()[i]));
  const auto view = [&](const at::Tensor& tensor) {
    auto [memory, offset] = place_of(tensor).cast<std::pair<int, int64_t>>();
    return View{{memory, offset}, tensor.sizes().vec(), tensor.strides().vec(),
                tensor.scalar_type()};
  };
  Call made{op, torch::jit::createStackForSchema(op.schema(), py::args(given), py::kwargs(kwargs), std::nullopt),
            {}, std::move(results)};
  for (size_t i = 0; i < made.stack.size(); ++i) {
    auto& value = made.stack[i];
    if (value.isTensor()) {
      if (value.toTensor().defined() && is_wrapped(value.toTensor())) continue;
      if (value.toTensor().defined())
        made.tensors.push_back({i, {view(value.toTensor())}, Call::Kind::tensor});
      value = c10::IValue();
    } else if (value.isTensorList()) {
      Call::Argument list{i, {}, Call::Kind::list};
      for (const at::Tensor& each : value.toTensorVector()) list.views.push_back(view(each));
      made.tensors.push_back(std::move(list));
      value = c10::IValue();
    } else if (value.isOptionalTensorList()) {
      Call::Argument list{i, {}, Call::Kind::optionals};
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
        list.views.push_back(each && each->defined() ? view(*each) : View());
      made.tensors.push_back(std::move(list));
      value = c10::IValue();
    }
  }
  steps_.push_back({std::move(made), {}});
}

void Program::wait(int memory) { steps_.push_back({Wait{memory}, {}}); }

void Program::zero(int memory, int64_t bytes) { steps_.push_back({Zero{memory, bytes}, {}}); }

void Program::releases(std::vector<int> memories) { steps_.back().releases = std::move(memories); }

void Program::result(int memory, int64_t offset, std::vector<int64_t> sizes,
                     std::vector<int64_t> strides, at::ScalarType dtype) {
  results_.push_back({{memory, offset}, std::move(sizes), std::move(strides), dtype});
}

void Program::input(int alignment, int remainder, std::vector<int64_t> sizes,
                    std::vector<int64_t> strides, at::ScalarType dtype) {
  const bool is_contiguous = at::geometry_is_contiguous(sizes, strides);
  expected_.push_back(
      {alignment, remainder, std::move(sizes), std::move(strides), dtype, is_contiguous});
}

namespace {

bool has_form(const at::Tensor& tensor, const Input& wanted) {
  if (tensor.scalar_type() != wanted.dtype) return false;
  if (wanted.is_contiguous) {  // X may come with more axes than it was recorded with
    const auto elements = c10::multiply_integers(wanted.sizes);
    if (!tensor.is_contiguous() || tensor.numel() != elements) return false;
  } else if (tensor.sizes() != wanted.sizes || tensor.strides() != wanted.strides) {
    return false;
  }
  const auto address = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return static_cast<int>(address % wanted.alignment) == wanted.remainder;
}

}  // namespace

bool Program::takes(const std::vector<at::Tensor>& inputs) const {
  if (static_cast<int>(inputs.size()) != inputs_) return false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() != (expected_[i].remainder >= 0)) return false;
    if (inputs[i].defined() && !has_form(inputs[i], expected_[i])) return false;
  }
  return true;
}

std::vector<at::Tensor> Program::run(const std::vector<at::Tensor>& inputs,
                                     const Words& words) const {
  const c10::DeviceGuard guard(device_);
  const at::AutoDispatchBelowADInplaceOrView below;
  Frame frame{words, inputs_, nullptr, std::vector<char*>(memories_), std::vector<at::Tensor>(memories_),
              std::vector<int>(memories_), std::vector<c10::IValue>(memories_)};
  if (device_.is_cuda()) {
    const c10::impl::VirtualGuardImpl streams(device_.type());
    frame.stream = streams.getStreamNativeHandle(streams.getStream(device_));
  }
  for (int i = 0; i < inputs_; ++i)
    if (inputs[i].defined()) frame.own(i, inputs[i]);
  for (const auto& [memory, tensor] : constants_) frame.own(memory, tensor);
  const auto bytes = at::TensorOptions(device_).dtype(at::kByte);
  for (const auto& [memory, size] : arenas_) frame.own(memory, at::empty({size}, bytes));
  for (const auto& [memory, place] : parts_) {
    frame.starts[memory] = frame.at(place);
    frame.owners[memory] = place.memory;
  }
  for (const auto& step : steps_) {
    std::visit([&](const auto& what) { execute(what, frame); }, step.what);
    for (const int memory : step.releases) frame.tensors[memory] = at::Tensor();
  }
  std::vector<at::Tensor> results;
  results.reserve(results_.size());
  for (const auto& view : results_) results.push_back(frame.view(view));
  return results;
}

void Program::execute(const Allocate& step, Frame& frame) const {
  frame.own(step.memory, at::empty(step.sizes, at::TensorOptions(device_).dtype(step.dtype)));
}

void Program::execute(const Launch& step, Frame& frame) const {
  std::vector<int64_t> cells = step.cells;  // the driver reads each parameter from its address
  for (const auto& address : step.addresses)
    cells[address.cell] = reinterpret_cast<int64_t>(frame.at(address.place));
  for (const auto& word : step.words) cells[word.cell] = frame.words[word.word];
  std::vector<void*> parameters(cells.size());
  for (size_t i = 0; i < cells.size(); ++i) parameters[i] = &cells[i];
  const auto status = as<LaunchKernel>(kernels_)(
      as<void*>(step.function), step.grid[0], step.grid[1], step.grid[2], step.threads, 1, 1,
      step.shared, frame.stream, parameters.data(), nullptr);
  check(status, "cuLaunchKernel");
}

void Program::execute(const Product& step, Frame& frame) const {
  const auto set = as<SetAttribute>(step.set_attribute);
  const auto operation = as<void*>(step.operation);
  // cuBLAS's matrices are column-major: its A is b, and its B is a.
  const void* a_scale = frame.at(step.b_scale);
  const void* b_scale = frame.at(step.a_scale);
  char* out = frame.at(step.out);
  const std::lock_guard<std::mutex> lock(products_);
  check(set(operation, step.a_scale_attribute, &a_scale, sizeof a_scale), "cublasLt scale");
  check(set(operation, step.b_scale_attribute, &b_scale, sizeof b_scale), "cublasLt scale");
  const auto status = as<Multiply>(step.multiply)(
      as<void*>(step.handle), operation, &step.alpha, frame.at(step.b), as<void*>(step.a_layout),
      frame.at(step.a), as<void*>(step.b_layout), &step.beta, out, as<void*>(step.out_layout), out,
      as<void*>(step.out_layout), as<void*>(step.algorithm), frame.at(step.workspace),
      step.workspace_bytes, frame.stream);
  check(status, "cublasLtMatmul");
}

void Program::execute(const Call& step, Frame& frame) const {
  torch::jit::Stack stack = step.stack;
  for (const auto& argument : step.tensors) {
    if (argument.kind == Call::Kind::tensor) {
      stack[argument.at] = frame.view(argument.views[0]);
    } else if (argument.kind == Call::Kind::list) {
      c10::List<at::Tensor> list;
      for (const auto& view : argument.views) list.push_back(frame.view(view));
      stack[argument.at] = std::move(list);
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& view : argument.views) {
        auto tensor = frame.view(view);
        list.push_back(tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt);
      }
      stack[argument.at] = std::move(list);
    }
  }
  step.op.callBoxed(stack);
  for (size_t i = 0; i < step.results.size(); ++i) {
    const int memory = step.results[i];
    if (memory < 0) continue;
    if (stack[i].isTensor())
      frame.own(memory, stack[i].toTensor());
    else
      frame.works[memory] = stack[i];
  }
}

void Program::execute(const Wait& step, Frame& frame) const {
  frame.works[step.memory].toCustomClass<c10d::Work>()->wait();
  frame.works[step.memory] = c10::IValue();
}

void Program::execute(const Zero& step, Frame& frame) const {
  char* start = frame.starts[step.memory];
  if (step.bytes == 0) return;
  if (!device_.is_cuda())
    std::memset(start, 0, step.bytes);
  else
    check(as<Fill>(fill_)(start, 0, step.bytes, frame.stream), "cuMemsetD8Async");
}

}  // namespace megatron_fp4
