"""The linear layer as an autograd function.

`linear` is the public function, which checks its arguments. It and the Megatron layers call
`quantized_linear`, which does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fp4.arithmetic.formats import wide
from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.quantizer import QuantizedTensor
from megatron_fp4.errors import ConfigError
from megatron_fp4.execution.backward import Backward
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.forward import Saved, forward
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.inputs import autocasts, check_operands, check_tensor, computes_in
from megatron_fp4.operands import Operand
from megatron_fp4.plan.cache import plan_for, tokens_of_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.sizes import check_sizes
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import get_recipe
from megatron_fp4.replicas import own_replica, replica_placements

# Disables torch function modes inside a linear, to reduce host overhead. A call runs hundreds of
# small torch operations, none of which a mode has to change. Where a mode is active (the CPU
# runtime installs one), calling it for each operation would cost more than most operations.
_plain_tensors = torch._C.DisableTorchFunction
_ANY_SITE, _ANY_CALL = Site(), Call()


class _Linear(torch.autograd.Function):
    """The three GEMMs of one linear, executed as its plan says."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        site: Site,
        call: Call,
        held: HeldWeight | None,
        differentiates: bool,
    ) -> Tensor:
        with _plain_tensors():
            matrix = x.reshape(-1, x.shape[-1])
            needs = ctx.needs_input_grad if differentiates else (False, False)
            plan = _plan(matrix, weight, bias, recipe, site, needs)
            y, saved = forward(plan, matrix, weight, bias, site, call, held)
            ctx.plan, ctx.site, ctx.call, ctx.held, ctx.x_shape = plan, site, call, held, x.shape
            ctx.bias_dtype = None if bias is None else bias.dtype
            ctx.accumulates_in = None if plan.setting.main_grad is None else weight
            if differentiates:
                _save(ctx, saved, held)
        leading = [*x.shape[:-1]]
        if leading and site.parallel is not None and x.numel():
            # Sequence parallelism changes the number of tokens.
            leading[0] = leading[0] * y.shape[0] // (x.numel() // x.shape[-1])
        return y.view(*leading, y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Autocast may be enabled around backward, and must not change the dtypes of the plan.
        device = dy.device.type
        if autocasts(device):
            with torch.autocast(device, enabled=False):
                return _gradients(ctx, dy)
        return _gradients(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of X, W and the bias; None for the other arguments of `_Linear.forward`."""
    plan, weight = ctx.plan, ctx.accumulates_in
    dy = dy.reshape(-1, dy.shape[-1])
    into = None if weight is None else weight.main_grad
    with _plain_tensors():
        passed = Backward(plan, _load(ctx), ctx.site, ctx.call, ctx.held)
        made = passed.gradients(dy, into)
        dx, dw, dy_operand = made.dx, made.dw, made.dy
        db = None
        if ctx.needs_input_grad[2]:
            # Where dX is not needed, dgrad quantizes no dY, and dY itself is summed.
            quantized = plan.recipe.bias_gradient == "quantized"
            summed = dy_operand if quantized and dy_operand is not None else dy
            db = _bias_gradient(summed, dy.dtype).to(ctx.bias_dtype)
    if dw is not None and weight is not None:
        dw = _added_to_main_grad(weight)
    return None if dx is None else dx.view(ctx.x_shape), dw, db, None, None, None, None, None


def _plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    site: Site,
    needs: Sequence[bool],
) -> LinearPlan:
    """The plan for x [tokens, in], the part of X that this rank holds.

    needs: whether X and W need gradients, in this order.
    """
    sharding = site.sharding
    tokens = x.shape[0] // (sharding.ranks if sharding.tokens == "dy" else 1)
    main_grad = getattr(weight, "main_grad", None) if site.fuses and needs[1] else None
    return plan_for(
        recipe,
        tokens_of_plan(recipe, tokens),
        weight.shape,
        x.dtype,
        x.device,
        weight.dtype,
        sharding,
        main_grad.dtype if isinstance(main_grad, Tensor) else None,
        needs[0],
        needs[1],
        bias is not None,
        site.keeps_w,
        site.packs_x,
    )


def _bias_gradient(dy: Operand, dtype: torch.dtype) -> Tensor:
    if isinstance(dy, QuantizedTensor):
        return dy.dequantize(wide(dtype)).sum(0)
    return dy.to(wide(dtype)).sum(0)


def _added_to_main_grad(weight: Tensor) -> Tensor:
    """Tells Megatron's DistributedDataParallel that dW was already added to main_grad.

    Returns the gradient that autograd still expects: zeros where Megatron reads it
    (`zero_out_wgrad`), else uninitialized memory that is never read.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return _unread(weight.shape, weight.dtype, weight.device).detach()  # all share its memory


@cache
def _unread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _save(ctx: Any, saved: Saved, held: HeldWeight | None) -> None:
    """Saves what backward needs through save_for_backward, so that hooks on saved tensors see it.

    W's operand is not saved so where the calls of a step share it (`held`): it is then kept as an
    attribute of ctx.
    """
    ctx.shared_w = None if held is None else saved.w
    parts = (saved.x, saved.w if held is None else None, saved.weight, saved.residual)
    tensors: list[Tensor | None] = []
    end = 0
    # For each part: which of the saved tensors are its own, and what builds it from them.
    ctx.builds = builds = [None, None, None, None]
    for i, part in enumerate(parts):
        if part is not None:
            mine, build = take_apart(part)
            start, end = end, end + len(mine)
            builds[i] = slice(start, end), build  # type: ignore
            tensors += mine
    ctx.save_for_backward(*tensors)


def _load(ctx: Any) -> Saved:
    tensors = ctx.saved_tensors
    parts: list[Any] = [None if each is None else each[1](*tensors[each[0]]) for each in ctx.builds]
    x, w, weight, residual = parts
    return Saved(x, w if ctx.shared_w is None else ctx.shared_w, weight, residual)


def take_apart(
    part: Operand | Residual | None,
) -> tuple[list[Tensor | None], Callable[..., Any]]:
    """Splits an operand or residual into tensors that save_for_backward can take.

    Returns (tensors, build): build(*tensors) gives the part back. build itself references no
    tensor, so it keeps none of them alive.
    """
    if type(part) is QuantizedTensor:
        build = partial(QuantizedTensor, quantizer=part.quantizer, shape=part.shape, axis=part.axis)
        return [part.codes, part.scales, part.tensor_scale], build
    if isinstance(part, Residual):
        return [part.values, part.places], partial(Residual, scope=part.scope, shape=part.shape)
    assert part is None or isinstance(part, Tensor)
    return [part], _itself


def _itself(tensor: Tensor | None) -> Tensor | None:
    return tensor


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    site: Site = _ANY_SITE,
    call: Call = _ANY_CALL,
    held: HeldWeight | None = None,
) -> Tensor:
    """Y = X W^T + bias under `recipe`, differentiable in all three.

    x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype. Under
        tensor parallelism these are the rank's shards.
    site: what all calls of this linear have in common. call: seed, step and microbatch.
    held: W's operands, which all calls of one step with the same W share; None shares nothing.
    Under torch.autocast x and weight are cast as nn.functional.linear casts them. torch.compile
    breaks its graph here and runs the linear eagerly. The arguments are not checked.
    """
    product = _out_of_graphs if torch.compiler.is_compiling() else _product
    return product(x, weight, bias, recipe, site, call, held)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    site: Site,
    call: Call,
    held: HeldWeight | None,
) -> Tensor:
    device = x.device.type
    if autocasts(device):
        x, weight = x.to(computes_in(x)), weight.to(computes_in(weight))
        with torch.autocast(device, enabled=False):
            return _product(x, weight, bias, recipe, site, call, held)
    if recipe.weight_average is not None and site.average is None:
        site = replace(site, average=weight.detach().float())  # as before the first update
    grad = torch.is_grad_enabled()
    return _Linear.apply(x, weight, bias, recipe, site, call, held, grad)


# torch.compile must not trace the Python state behind a call: random streams, held weights and
# replays. torch.compiler.disable is not used, since it imports the compiler at import time.
_out_of_graphs = torch._disable_dynamo(_product)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str,
    seed: int = 0,
    step: int | Tensor = 0,
    name: str = "linear",
    replica: int | None = None,
    average: Tensor | None = None,
) -> Tensor:
    """Y = X W^T + bias with the three GEMMs (fprop, dgrad, wgrad) in the recipe's precision.

    x: [..., in]; weight: [out, in]; bias: [out] or None; plain tensors on one device and, outside
        torch.autocast, in one dtype: float16, bfloat16, float32 or float64. Returns [..., out] in
        that dtype.
    recipe: a Recipe or anything `get_recipe` takes.
    seed, step, name: the key of the random bits. Each linear of a model needs its own name, and
        each training step its own number. A step that is an int64 tensor [] on x's device is read
        again at each replay of a CUDA graph; an integer step is captured as a constant.
    replica: the index of this process among the data-parallel replicas, from 0. Replicas round X
        and dY with different random bits, so that their rounding errors average out. None: the
        rank in torch.distributed's default group, or 0 without one. Pass it where ranks of that
        group hold the same tokens.
    average: float32 [out, in], the moving average towards which the recipe rounds W (Q-EMA). None:
        the weight itself, as before the first update. Other recipes take none.
    torch.compile breaks its graph here: the linear runs between two compiled graphs, and under
    fullgraph=True the compiler raises.
    Raises ConfigError for unsupported tensors or shapes that do not fit, for an axis that is not a
    multiple of its block or Hadamard group, and for an invalid seed, step or replica.
    Warns of a recipe with `Recipe.ramping`, which is the optimizer's.
    """
    if not isinstance(recipe, Recipe):
        recipe = get_recipe(recipe)
    if recipe.ramping is not None:
        warn_of_ramping(recipe)
    check_operands(x, weight, bias, name)
    tokens = None  # unchecked: only wgrad contracts the tokens
    if torch.is_grad_enabled() and weight.requires_grad:
        tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
    check_sizes(recipe, tokens, weight.shape[1], weight.shape[0], name)
    if isinstance(step, Tensor):
        if step.device != x.device:
            raise ConfigError(f"{name}: its step is on {step.device} and x on {x.device}: move it")
        step = step.clone()  # backward reads it too, and by then the caller may have increased it
    replica = own_replica() if replica is None else replica
    call = Call(Key(seed, step), replica)
    site = _site(name, replica)
    if average is not None:
        _check_average(average, weight, recipe, name)
        site = replace(site, average=average)
    return quantized_linear(x, weight, bias, recipe, site, call)


def warn_of_ramping(recipe: Recipe) -> None:
    """Warns, once in a process for each recipe, that a linear cannot do its ramping."""
    warnings.warn(
        f"recipe {recipe.name} updates weights at periods of their own, which Megatron's "
        "optimizers do here and a linear cannot: it multiplies as without ramping",
        stacklevel=3,
    )


def _check_average(average: Tensor, weight: Tensor, recipe: Recipe, name: str) -> None:
    """Raises ConfigError unless the recipe reads such an average of such a weight."""
    if recipe.weight_average is None:
        raise ConfigError(f"{name}: recipe {recipe.name} reads no average of W: leave it out")
    check_tensor(average, f"{name}: average")
    same = average.shape == weight.shape and average.device == weight.device
    if not same or average.dtype != torch.float32:
        raise ConfigError(
            f"{name}: an average is float32 {list(weight.shape)} on {weight.device}, not "
            f"{average.dtype} {list(average.shape)} on {average.device}"
        )


@lru_cache(4096)
def _site(name: str, replica: int) -> Site:
    return Site(name, replica_placements(replica))
