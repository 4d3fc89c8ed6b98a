"""The linear layer as an autograd function, and for users."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fp4.backends import Operand
from megatron_fp4.call import Call
from megatron_fp4.errors import ConfigError
from megatron_fp4.formats import wide
from megatron_fp4.gemms import Backward, Needs, Saved, fprop
from megatron_fp4.inputs import autocasts, check_operands, computes_in
from megatron_fp4.outliers import Residual
from megatron_fp4.philox import Key
from megatron_fp4.quantizer import QuantizedTensor
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import get_recipe
from megatron_fp4.replicas import own_replica, replica_placements

# Hundreds of small operations run here, and none for a mode of torch functions to change: asking
# one each time (the CPU runtime installs one) would cost more than most of them.
_plain_tensors = torch._C.DisableTorchFunction


class _Linear(torch.autograd.Function):
    """The three GEMMs of one linear; what they do is all in the recipe."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        call: Call,
        differentiates: bool,
    ) -> Tensor:
        with _plain_tensors():
            needs_dw = differentiates and ctx.needs_input_grad[1]
            matrix = x.reshape(-1, x.shape[-1])
            y, saved = fprop(matrix, weight, bias, recipe, call, needs_dw)
            if differentiates:
                _save(ctx, saved, call)
        ctx.recipe, ctx.call, ctx.x_shape = recipe, call, x.shape
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if call.fuses and isinstance(getattr(weight, "main_grad", None), Tensor):
            ctx.accumulates_in = weight
        leading = list(x.shape[:-1])
        if leading and x.numel():  # sequence parallelism gathers tokens, or scatters them
            leading[0] = leading[0] * y.shape[0] // (x.numel() // x.shape[-1])
        return y.view(*leading, y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        recipe, call, weight = ctx.recipe, ctx.call, getattr(ctx, "accumulates_in", None)
        dy = dy.reshape(-1, dy.shape[-1])
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        into = None if weight is None else weight.main_grad
        needs = Needs(needs_dx, needs_dw, ctx.weight_dtype, into)
        # Autocast may be on around backward; what this computes in is settled.
        with _plain_tensors(), _without_autocast(dy.device.type):
            dx, dw, dy_operand = Backward(dy, _load(ctx), recipe, call, needs).gradients()
            db = None
            if needs_db:
                # Where dX is not needed dY is not quantized for it, and the raw one serves.
                quantized = recipe.bias_gradient == "quantized"
                summed = dy_operand if quantized and isinstance(dy_operand, QuantizedTensor) else dy
                db = _bias_gradient(summed, dy.dtype).to(ctx.bias_dtype)
        if dw is not None and weight is not None:
            dw = _added_to_main_grad(weight)
        return None if dx is None else dx.view(ctx.x_shape), dw, db, None, None, None


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def _bias_gradient(dy: Operand, dtype: torch.dtype) -> Tensor:
    if isinstance(dy, QuantizedTensor):
        return dy.dequantize(wide(dtype)).sum(0)
    assert isinstance(dy, Tensor)
    return dy.to(wide(dtype)).sum(0)


def _added_to_main_grad(weight: Tensor) -> Tensor:
    """Tells Megatron's DistributedDataParallel that main_grad has dW already; the gradient that
    autograd must have in its place, which nobody reads unless it is to be zeros."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return _nobodys(weight.shape, weight.dtype, weight.device).detach()  # one memory for all


@cache
def _nobodys(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _save(ctx: Any, saved: Saved, call: Call) -> None:
    """Saved's tensors through save_for_backward, so that hooks on saved tensors see every byte;
    W's operand is none of a call's own where it is kept for others."""
    ctx.kept_w = None if call.weights is None else saved.w
    parts = [saved.x, saved.weight, saved.residual, saved.w if call.weights is None else None]
    apart = [take_apart(part) for part in parts]
    ctx.save_for_backward(*(tensor for tensors, _ in apart for tensor in tensors))
    ctx.builds = [(len(tensors), build) for tensors, build in apart]


def _load(ctx: Any) -> Saved:
    tensors = iter(ctx.saved_tensors)
    x, weight, residual, w = (build(*islice(tensors, count)) for count, build in ctx.builds)
    return Saved(x, w if ctx.kept_w is None else ctx.kept_w, weight, residual)


def take_apart(
    part: Operand | Residual | None,
) -> tuple[list[Tensor | None], Callable[..., Any]]:
    """(tensors, what puts them together again and holds none of them)."""
    if isinstance(part, QuantizedTensor):
        build = partial(QuantizedTensor, quantizer=part.quantizer, shape=part.shape, axis=part.axis)
        return [part.codes, part.scales, part.tensor_scale], build
    if isinstance(part, Residual):
        return [part.values, part.places], partial(Residual, scope=part.scope, shape=part.shape)
    assert part is None or isinstance(part, Tensor)
    return [part], _itself


def _itself(tensor: Tensor | None) -> Tensor | None:
    return tensor


def quantized_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, call: Call
) -> Tensor:
    """Y = X W^T + bias under `recipe`, differentiable in all three.

    x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype. Under
    torch.autocast x and weight are cast as nn.functional.linear casts them. torch.compile leaves it
    out of its graphs.
    """
    product = _out_of_graphs if torch.compiler.is_compiling() else _product
    return product(x, weight, bias, recipe, call)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, call: Call) -> Tensor:
    x, weight = x.to(computes_in(x)), weight.to(computes_in(weight))
    with _without_autocast(x.device.type):
        return _Linear.apply(x, weight, bias, recipe, call, torch.is_grad_enabled())


# Noise, kept weights and replays are Python's to keep. Its import of the compiler waits for a call.
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
) -> Tensor:
    """Y = X W^T + bias with the three GEMMs in the recipe's precision.

    x: [..., in]; weight: [out, in]; bias: [out] or None; plain tensors on one device and, outside
        torch.autocast, in one dtype: float16, bfloat16, float32 or float64. Returns [..., out] in
        that dtype.
    recipe: a Recipe or anything `get_recipe` takes. seed, step, name: key the random bits; two
        linears of a model need two names, and each step of training its own number. A CUDA graph
        reads a step that is an int64 tensor [] beside x whenever it runs; a number it repeats.
    replica: which data-parallel replica this process is, from 0: replicas round X and dY by other
        noise, so that their errors average out. None: the rank in torch.distributed's default
        group, or 0. Give it where ranks of that group hold the same tokens.
    torch.compile breaks its graph here: the linear runs between two compiled graphs, and under
    fullgraph=True the compiler raises.
    Raises ConfigError for tensors of another kind or of shapes that do not fit, where a block does
    not divide an axis that it tiles, and for a seed, step or replica of another kind.
    """
    if not isinstance(recipe, Recipe):
        recipe = get_recipe(recipe)
    check_operands(x, weight, bias, name)
    tokens = None  # wgrad alone contracts them
    if torch.is_grad_enabled() and weight.requires_grad:
        tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
    recipe.check_linear(tokens, weight.shape[1], weight.shape[0], name)
    if isinstance(step, Tensor):
        if step.device != x.device:
            raise ConfigError(f"{name}: its step is on {step.device} and x on {x.device}: move it")
        step = step.clone()  # backward draws for it too, when it may have gone on
    replica = own_replica() if replica is None else replica
    call = Call(
        name=name,
        key=Key(seed, step),
        microbatch=replica,
        placements=replica_placements(replica),
    )
    return quantized_linear(x, weight, bias, recipe, call)
