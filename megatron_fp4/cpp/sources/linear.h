// The autograd function of a linear whose passes are Programs.

#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "program.h"

namespace megatron_fp4 {

// A pass of a linear: its program, and which of its results are what. The results are first Y, or
// the gradients of X, W and the bias; then what is saved; then what is held of W; then tallies.
struct Pass {
  std::shared_ptr<Program> program;
  int saved = 0, held = 0;
  std::vector<int> labels;  // of the tallies, as `Tallies` returns them
};

// The tensors of W's operands that the calls of a step share; see execution/weights.py.
struct Held {
  std::optional<std::vector<at::Tensor>> fprop, dgrad;
};

// The tallies of quantized operands since they were last taken, with a label for each.
class Tallies {
 public:
  void add(int label, at::Tensor tally);
  // (labels, tensors int32 [n, 2]), in the order in which they were added; forgets them.
  std::pair<std::vector<int>, std::vector<at::Tensor>> take();

 private:
  void fold();
  std::vector<int> labels_;
  std::vector<at::Tensor> tallies_, folded_;
};

// The passes of one kind of call of a linear. `making` also makes W's operands where these are
// held, and `reading` reads them; without held operands there is `making` alone.
struct Passes {
  std::shared_ptr<Pass> making, reading;
  const std::shared_ptr<Pass>& of(bool reads) const { return reads ? reading : making; }
};

// One call of a linear.
//
// others: the inputs of both passes beside X, W, the bias, dY, main_grad and what is saved or held.
// weight: the parameter to whose main_grad dW is added, or None. unread: for such a parameter, the
// gradient that autograd expects and nobody reads.
// fallback: fallback(saved, dY) runs the backward pass in Python where no program takes it.
// before: what goes through a SwiGLU whose result is X, or undefined. swiglu_follows: whether Y goes
// through a SwiGLU, the gradient of whose result arrives in place of dY.
struct __attribute__((visibility("hidden"))) CallOfLinear {
  Passes forward, backward;
  Words words;
  std::vector<at::Tensor> others;
  std::shared_ptr<Held> held;
  std::shared_ptr<Tallies> tallies;
  py::object weight;
  at::Tensor unread;
  py::object fallback;
  at::Tensor before;
  bool swiglu_follows = false;
};

// Y [..., out], differentiable in X [..., in], W and the bias. X is contiguous. Where a SwiGLU follows:
// Y, which is not differentiable, and what stands for the result of the SwiGLU in autograd. Returns
// nothing where no program takes these inputs; nothing has been computed then.
std::vector<at::Tensor> linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, std::shared_ptr<CallOfLinear> call);

}  // namespace megatron_fp4
