"""The linear as an autograd function that executes its plan in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fp4.arithmetic.formats import wide
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.backward import Backward
from megatron_fp4.execution.call import ALONE, Beside, Call, Site
from megatron_fp4.execution.follow import Follower
from megatron_fp4.execution.forward import Saved, forward
from megatron_fp4.execution.tensor_lists import Build, TensorList, take_apart
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.inputs import autocasts
from megatron_fp4.operands import Computed, Normed, Operand, Swiglu
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import SwigluPlace

# Disables torch function modes inside a linear, to reduce host overhead. A call runs hundreds of
# small torch operations, none of which a mode has to change. Where a mode is active (the CPU
# runtime installs one), calling it for each operation would cost more than most operations.
_plain_tensors = torch._C.DisableTorchFunction
_view = torch.ops.aten._unsafe_view.default._op  # takes no Python code


@dataclass(slots=True)
class ForwardContext:
    """What a backward pass needs of its forward pass, beside the tensors that are saved.

    builds: for each field of `Saved`, which of the saved tensors are its own, and what builds it
        from them; None where there is none.
    shared_w: W's operand where the calls of a step share it, or its owners sent it, so that it is
        not saved; else None.
    x_shape: the shape of X.
    bias_dtype: of the bias, if its gradient is asked for; else None.
    weight: the parameter to whose main_grad dW is added; None where dW is returned.
    """

    plan: LinearPlan
    site: Site
    call: Call
    held: HeldWeight | None
    builds: tuple[tuple[slice, Build] | None, ...]
    shared_w: Operand | None
    x_shape: torch.Size
    bias_dtype: torch.dtype | None
    weight: Tensor | None


class LinearFunction(torch.autograd.Function):
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
        follower: Follower | None,
        beside: Beside = ALONE,
    ) -> Any:
        needs = ctx.needs_input_grad if differentiates else (False, False, False)
        given = x if beside.y is None else beside.y
        given = given.reshape(-1, given.shape[-1])
        matrix: Tensor | Computed = given
        if beside.y is not None:
            matrix = Swiglu(given)
        elif site.norm is not None:
            matrix = Normed(given, site.norm)
        plan = _plan(given, weight, bias, recipe, site, needs, beside.place)

        def run(followed: Site) -> tuple[Tensor, ForwardContext, TensorList]:
            y, saved = forward(plan, matrix, weight, bias, followed, call, held)
            is_kept = held is not None or plan.fprop.b.is_sent
            shares_w = is_kept and plan.saves_w == "operand"
            tensors, builds = _taken_apart(saved, shares_w) if differentiates else ([], ())
            context = ForwardContext(
                plan, site, call, held, builds,
                shared_w=saved.w if shares_w else None,
                x_shape=x.shape,
                bias_dtype=bias.dtype if needs[2] and bias is not None else None,
                weight=None if plan.setting.main_grad is None else weight,
            )  # fmt: skip
            return y, context, tensors

        with _plain_tensors():
            if follower is None:
                y, context, tensors = run(site)
            else:
                y, context, tensors = follower.forward(run, given, weight, bias)
        ctx.context, ctx.follower = context, follower
        ctx.save_for_backward(*tensors)
        leading = [*x.shape[:-1]]
        if leading and site.parallel is not None and x.numel():
            # Sequence parallelism changes the number of tokens.
            leading[0] = leading[0] * y.shape[0] // (x.numel() // x.shape[-1])
        # Autograd would call the result of `view` a view, which nothing may change in place.
        y = _view(y, [*leading, y.shape[-1]])
        if beside.place != "before":
            return y
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # or autograd would fill a gradient of y with zeros
        return y, result_of(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dy = dys[-1]  # of Y, or of the result of the SwiGLU that follows
        # Autocast may be enabled around backward, and must not change the dtypes of the plan.
        device = dy.device.type
        if autocasts(device):
            with torch.autocast(device, enabled=False):
                found = gradients(ctx.context, ctx.saved_tensors, dy, ctx.follower)
        else:
            found = gradients(ctx.context, ctx.saved_tensors, dy, ctx.follower)
        return *found, None, None, None, None, None, None, None


def gradients(
    context: ForwardContext, tensors: Sequence[Tensor | None], dy: Tensor, follower: Follower | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of X, W and the bias; None for those that are not asked for.

    tensors: what the forward pass saved. dy: of Y's shape. follower: follows the pass, or None.
    """
    weight = context.weight
    dy = dy.reshape(-1, dy.shape[-1])
    into = None if weight is None else weight.main_grad  # type: ignore[attr-defined]

    def run(site: Site) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        saved = _put_together(context, tensors)
        made = Backward(context.plan, saved, site, context.call, context.held).gradients(dy, into)
        db = None
        if context.bias_dtype is not None:
            # Where dX is not needed, dgrad quantizes no dY, and dY itself is summed.
            quantized = context.plan.recipe.bias_gradient == "quantized"
            summed = made.dy if quantized and made.dy is not None else dy
            db = _bias_gradient(summed, dy.dtype).to(context.bias_dtype)
        return made.dx, made.dw, db

    with _plain_tensors():
        if follower is None:
            dx, dw, db = run(context.site)
        else:
            dx, dw, db = follower.backward(run, context.held, dy, into, tensors)
    if dw is not None and weight is not None:
        dw = _added_to_main_grad(weight)
    return None if dx is None else dx.view(context.x_shape), dw, db


def _plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    site: Site,
    needs: Sequence[bool],
    swiglu: SwigluPlace,
) -> LinearPlan:
    """The plan for x [tokens, in], the part of X that this rank holds.

    needs: whether X and W need gradients, in this order. swiglu: see `Setting.swiglu`; of a linear
    after a SwiGLU x is what goes through it, [tokens, 2 in].
    """
    sharding = site.sharding
    tokens = x.shape[0] // (sharding.ranks if sharding.scattered == "dy" else 1)
    main_grad = None
    if site.fuses and needs[1]:
        found = getattr(weight, "main_grad", None)
        main_grad = found.dtype if isinstance(found, Tensor) else None
    has_bias = bias is not None
    return site.plan(
        recipe, tokens, weight, x.dtype, main_grad, needs[0], needs[1], has_bias, swiglu
    )


def result_of(y: Tensor) -> Tensor:
    """What stands for the SwiGLU of y [..., 2 n] in autograd: [..., n], of one element's memory.

    See `operands.Activated`.
    """
    shape = (*y.shape[:-1], y.shape[-1] // 2)
    return torch.empty_strided(shape, (0,) * len(shape), dtype=y.dtype, device=y.device)


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
    return unread(weight.shape, weight.dtype, weight.device).detach()  # all share its memory


@cache
def unread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized memory: a gradient that autograd expects and nobody reads."""
    return torch.empty(shape, dtype=dtype, device=device)


def _taken_apart(
    saved: Saved, shares_w: bool
) -> tuple[TensorList, tuple[tuple[slice, Build] | None, ...]]:
    """(tensors, `ForwardContext.builds`) of what the forward pass saved.

    They are for save_for_backward, so that hooks on saved tensors see them. shares_w: whether the
    calls of a step share W's operand, which is then not among them.
    """
    tensors: TensorList = []
    builds: tuple[tuple[slice, Build] | None, ...] = ()
    end = 0
    w = None if shares_w else saved.w
    # In the order of the fields, in which `_put_together` gives them to Saved.
    for each in (saved.x, w, saved.weight, saved.x_itself, saved.outliers, saved.y, saved.mean):
        if each is None:
            builds += (None,)
            continue
        mine, build = take_apart(each)
        start, end = end, end + len(mine)
        builds += ((slice(start, end), build),)
        tensors += mine
    return tensors, builds


def _put_together(context: ForwardContext, tensors: Sequence[Tensor | None]) -> Saved:
    found: list[Any] = [
        None if each is None else each[1](*tensors[each[0]]) for each in context.builds
    ]
    x, w, *others = found
    return Saved(x, w if context.shared_w is None else context.shared_w, *others)
