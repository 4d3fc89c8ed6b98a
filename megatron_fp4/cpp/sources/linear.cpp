#include "linear.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

namespace megatron_fp4 {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

namespace {

constexpr size_t kFold = 128;  // tallies that are kept apart: each may take a block of the allocator

// Carries a CallOfLinear from the forward to the backward pass.
struct Capsule : torch::CustomClassHolder {
  explicit Capsule(std::shared_ptr<CallOfLinear> call) : call(std::move(call)) {}
  ~Capsule() override {
    const py::gil_scoped_acquire gil;  // it holds Python objects
    call.reset();
  }
  std::shared_ptr<CallOfLinear> call;
};

at::Tensor matrix(const at::Tensor& tensor) {
  return tensor.view({-1, tensor.size(-1)});
}

void append(std::vector<at::Tensor>& list, const std::vector<at::Tensor>& more) {
  list.insert(list.end(), more.begin(), more.end());
}

// Hands on the tallies and the held tensors among a pass's results, which it takes from their end.
void hand_on(std::vector<at::Tensor>& results, const Pass& pass, CallOfLinear& call,
             std::optional<std::vector<at::Tensor>> Held::*gemm) {
  const auto first = results.end() - static_cast<int64_t>(pass.labels.size());
  for (size_t i = 0; i < pass.labels.size(); ++i) call.tallies->add(pass.labels[i], first[i]);
  results.erase(first, results.end());
  if (pass.held == 0) return;
  const auto held = results.end() - pass.held;
  (*call.held).*gemm = std::vector<at::Tensor>(held, results.end());
  results.erase(held, results.end());
}

std::vector<at::Tensor> forward_inputs(const at::Tensor& x, const at::Tensor& weight,
                                       const std::optional<at::Tensor>& bias,
                                       const CallOfLinear& call) {
  std::vector<at::Tensor> inputs{call.before.defined() ? call.before : x, weight,
                                 bias.value_or(at::Tensor())};
  append(inputs, call.others);
  if (call.held && call.held->fprop) append(inputs, *call.held->fprop);
  return inputs;
}

// The pass that a backward pass runs, and its inputs; (null, ...) if there is none.
std::pair<std::shared_ptr<Pass>, std::vector<at::Tensor>> backward_pass(
    const at::Tensor& dy, const at::Tensor& main_grad, const variable_list& saved,
    const CallOfLinear& call) {
  const bool reads = call.held && call.held->dgrad;
  auto pass = call.backward.of(reads);
  if (!pass || !dy.is_contiguous() || dy.numel() == 0) return {nullptr, {}};
  std::vector<at::Tensor> inputs{matrix(dy), main_grad};
  append(inputs, saved);
  append(inputs, call.others);
  if (call.held && call.held->fprop) append(inputs, *call.held->fprop);
  if (reads) append(inputs, *call.held->dgrad);
  if (!pass->program->takes(inputs)) return {nullptr, {}};
  return {pass, std::move(inputs)};
}

// main_grad of a parameter; tells Megatron's hooks that dW has been added to it. They are Python,
// and run after this pass. dummy: the gradient that autograd still expects: zeros where a hook reads
// it.
at::Tensor claim_main_grad(const CallOfLinear& call, at::Tensor& dummy) {
  const py::gil_scoped_acquire gil;
  call.weight.attr("grad_added_to_main_grad") = true;
  const bool zeros = py::getattr(call.weight, "zero_out_wgrad", py::bool_(false)).cast<bool>();
  dummy = zeros ? at::zeros_like(call.unread) : call.unread.detach();
  return call.weight.attr("main_grad").cast<at::Tensor>();
}

// The gradients of X, W and the bias by the Python executor.
variable_list in_python(const CallOfLinear& call, const variable_list& saved,
                        const at::Tensor& dy) {
  const py::gil_scoped_acquire gil;
  const auto found = call.fallback(saved, dy).cast<std::vector<std::optional<at::Tensor>>>();
  variable_list gradients;
  for (const auto& each : found) gradients.push_back(each.value_or(at::Tensor()));
  return gradients;
}

// Gradients that refuse a second differentiation, as torch's once_differentiable does.
variable_list once_differentiable(variable_list gradients) {
  if (!at::GradMode::is_enabled()) return gradients;
  const auto error = std::make_shared<torch::autograd::DelayedError>(
      "trying to differentiate twice a function that was marked with @once_differentiable",
      static_cast<int>(gradients.size()));
  for (auto& each : gradients)
    if (each.defined()) each = each.detach().requires_grad_();
  return (*error)(std::move(gradients));
}

// A forward pass that is about to run.
struct Prepared {
  std::shared_ptr<Pass> pass;
  std::vector<at::Tensor> inputs;
  std::shared_ptr<CallOfLinear> call;
};

struct Linear : torch::autograd::Function<Linear> {
  static variable_list forward(AutogradContext* ctx, const Variable& x, const Variable& weight,
                               const std::optional<Variable>& bias,
                               const Prepared& prepared) {
    const auto& [pass, inputs, call] = prepared;
    std::vector<at::Tensor> results;
    {
      // A collective may wait for a thread that needs the GIL. Backward runs without it anyway.
      const py::gil_scoped_release released;
      results = pass->program->run(inputs, call->words);
    }
    hand_on(results, *pass, *call, &Held::fprop);
    auto y = std::move(results.front());
    results.erase(results.begin());
    ctx->save_for_backward(std::move(results));
    ctx->saved_data["x"] = x.sizes().vec();
    ctx->saved_data["call"] =
        c10::IValue::make_capsule(c10::make_intrusive<Capsule>(call));
    auto leading = x.sizes().vec();
    leading.back() = y.size(-1);
    // Sequence parallelism changes the number of tokens.
    if (leading.size() > 1) leading[0] = leading[0] * y.size(0) / (x.numel() / x.size(-1));
    const at::AutoDispatchBelowADInplaceOrView below;  // or autograd would call Y a view
    y = y.view(leading);
    if (!call->swiglu_follows) return {y};
    leading.back() /= 2;
    auto result = at::empty_strided(leading, std::vector<int64_t>(leading.size(), 0), y.options());
    ctx->mark_non_differentiable({y});
    ctx->set_materialize_grads(false);  // or autograd would fill a gradient of Y with zeros
    return {y, result};
  }

  static variable_list backward(AutogradContext* ctx, variable_list given) {
    const auto capsule = ctx->saved_data["call"].toCapsule();
    auto& call = *static_cast<Capsule*>(capsule.get())->call;
    const auto saved = ctx->get_saved_variables();
    const auto& dy = given.back();  // of Y, or of the result of the SwiGLU that follows
    variable_list gradients;
    {
      const at::AutoGradMode grad(false);
      const c10::impl::ExcludeDispatchKeyGuard autocast(c10::autocast_dispatch_keyset);
      at::Tensor dummy, main_grad;
      const bool adds = !call.weight.is_none();
      if (adds) main_grad = claim_main_grad(call, dummy);
      auto [pass, inputs] = backward_pass(dy, main_grad, saved, call);
      if (pass) {
        gradients = pass->program->run(inputs, call.words);
        hand_on(gradients, *pass, call, &Held::dgrad);
        if (gradients[0].defined()) gradients[0] = gradients[0].view(ctx->saved_data["x"].toIntVector());
        if (adds) gradients[1] = dummy;
      } else {
        gradients = in_python(call, saved, dy);
      }
    }
    gradients = once_differentiable(std::move(gradients));
    gradients.resize(4);  // one for each argument of `forward`
    return gradients;
  }
};

}  // namespace

void Tallies::add(int label, at::Tensor tally) {
  labels_.push_back(label);
  tallies_.push_back(std::move(tally));
  if (tallies_.size() == kFold) fold();
}

void Tallies::fold() {
  if (tallies_.empty()) return;
  const at::AutoDispatchBelowADInplaceOrView below;
  folded_.push_back(at::stack(tallies_));
  tallies_.clear();
}

std::pair<std::vector<int>, std::vector<at::Tensor>> Tallies::take() {
  fold();
  return {std::exchange(labels_, {}), std::exchange(folded_, {})};
}

std::vector<at::Tensor> linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, std::shared_ptr<CallOfLinear> call) {
  const auto pass = call->forward.of(call->held && call->held->fprop);
  if (!pass) return {};
  auto inputs = forward_inputs(x.detach(), weight.detach(), bias, *call);
  if (!pass->program->takes(inputs)) return {};
  call->before.reset();  // backward does not read it, and the call lives as long as the graph
  return Linear::apply(x, weight, bias, Prepared{pass, std::move(inputs), std::move(call)});
}

}  // namespace megatron_fp4
