// A Program: what one pass of a linear does, as a list of steps on memory that is numbered.
//
// megatron_fp4/cpp/lowering.py builds it from a recorded pass, and linear.cpp runs it.

#pragma once

#include <torch/extension.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

namespace megatron_fp4 {

// A place in a piece of memory: the number of the piece, and bytes from its start.
struct MemoryOffset {
  int memory = -1;
  int64_t offset = 0;
};

// A tensor that lies in a piece of memory. Memory -1 stands for no tensor.
struct View {
  MemoryOffset place;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kByte;
};

// Numbers that differ between the calls of a linear: the low word of the step, the words of the
// seed, and the microbatch of random signs, as `megatron_fp4.recording.WORDS` numbers them.
using Words = std::array<int32_t, 4>;

// Allocates a tensor of its own for a piece of memory, such as Y.
struct Allocate {
  int memory;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

// Launches a kernel that Triton compiled. A cell holds one parameter: the address of a place, one of
// the Words, or a number.
struct Launch {
  struct Address { int cell; MemoryOffset place; };
  struct Word { int cell, word; };
  uint64_t function;
  std::array<unsigned, 3> grid;
  unsigned threads, shared;
  std::vector<int64_t> cells;
  std::vector<Address> addresses;
  std::vector<Word> words;
};

// A product by cuBLASLt with descriptors of its own; kernels/cublaslt.py makes them.
struct Product {
  uint64_t set_attribute, multiply;  // functions of cuBLASLt
  uint64_t handle, operation, a_layout, b_layout, out_layout, algorithm;
  int a_scale_attribute, b_scale_attribute;
  float alpha, beta;
  int64_t workspace_bytes;
  MemoryOffset a, b, a_scale, b_scale, out, workspace;
};

// Calls an operator of PyTorch, such as a collective. `stack` has its arguments; tensors among them
// are views of memory. results: the memory of each result; -1 drops it.
struct Call {
  enum class Kind { tensor, list, optionals };
  struct Argument { size_t at; std::vector<View> views; Kind kind; };
  c10::OperatorHandle op;
  std::vector<c10::IValue> stack;
  std::vector<Argument> tensors;
  std::vector<int> results;
};

// Waits for a collective, whose Work is the first result of an earlier Call.
struct Wait {
  int memory;
};

// Sets all bytes of a piece of memory to 0.
struct Zero {
  int memory;
  int64_t bytes;
};

// What an input of a Program must be; see `Program::input`.
struct Input {
  int alignment, remainder;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool is_contiguous;
};

struct Step {
  std::variant<Allocate, Launch, Product, Call, Wait, Zero> what;
  std::vector<int> releases;  // memory that no later step reads
};

class Program {
 public:
  // kernels: the address of the driver's cuLaunchKernel, 0 where nothing is launched.
  // fill: that of its cuMemsetD8Async, 0 where no memory of a GPU is set to 0.
  // inputs: how many tensors `run` takes; they are memory 0, 1, ...
  // memories: the number of pieces of memory.
  Program(c10::Device device, uint64_t kernels, uint64_t fill, int inputs, int memories);

  // Memory that the program holds, such as the row numbers of tokens.
  void constant(int memory, at::Tensor tensor);
  // An arena: one allocation, in which `part`s lie. It must come before its parts.
  void arena(int memory, int64_t bytes);
  void part(int memory, MemoryOffset place);

  void allocate(int memory, std::vector<int64_t> sizes, at::ScalarType dtype);
  void launch(uint64_t function, std::array<unsigned, 3> grid, unsigned threads, unsigned shared,
              std::vector<int64_t> cells, const std::vector<std::tuple<int, int, int64_t>>& addresses,
              const std::vector<std::pair<int, int>>& words);
  void product(const py::dict& fields);
  // place_of(tensor): (memory, offset) of a tensor among the arguments.
  void call(const std::string& name, const std::string& overload, const py::tuple& args,
            const py::dict& kwargs, const py::function& place_of, std::vector<int> results);
  void wait(int memory);
  void zero(int memory, int64_t bytes);
  void releases(std::vector<int> memories);  // after the last step that was added

  // A tensor that `run` returns.
  void result(int memory, int64_t offset, std::vector<int64_t> sizes, std::vector<int64_t> strides,
              at::ScalarType dtype);
  // The next input: what its address is modulo an alignment, -1 for an input that is no tensor, and
  // the tensor's form. A call with another input is not this program's.
  void input(int alignment, int remainder, std::vector<int64_t> sizes, std::vector<int64_t> strides,
             at::ScalarType dtype);

  bool takes(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, const Words& words) const;

 private:
  struct Frame;
  void execute(const Allocate&, Frame&) const;
  void execute(const Launch&, Frame&) const;
  void execute(const Product&, Frame&) const;
  void execute(const Call&, Frame&) const;
  void execute(const Wait&, Frame&) const;
  void execute(const Zero&, Frame&) const;

  c10::Device device_;
  uint64_t kernels_, fill_;
  int inputs_, memories_;
  std::vector<std::pair<int, at::Tensor>> constants_;
  std::vector<std::pair<int, int64_t>> arenas_;
  std::vector<std::pair<int, MemoryOffset>> parts_;
  std::vector<Step> steps_;
  std::vector<View> results_;
  std::vector<Input> expected_;
  mutable std::mutex products_;  // the descriptors of products are written before each launch
};

}  // namespace megatron_fp4
