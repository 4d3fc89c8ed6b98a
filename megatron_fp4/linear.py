"""The linear layer: one autograd function where the three GEMMs of a recipe meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fp4.backends import Operand, Preparation, choose
from megatron_fp4.hadamard import inverse
from megatron_fp4.philox import (
    WHOLE,
    Key,
    Noise,
    Placement,
    random_signs,
    stream_id,
    stream_label,
)
from megatron_fp4.quantizer import QuantizedTensor, ReduceMax
from megatron_fp4.recipe import OPERANDS, Recipe
from megatron_fp4.recipes import get_recipe

# The contracted axis of each operand as the model holds it: X [tokens, in], W [out, in],
# dY [tokens, out].
CONTRACTED = {
    ("fprop", "x"): 1,
    ("fprop", "w"): 1,
    ("dgrad", "dy"): 1,
    ("dgrad", "w"): 0,
    ("wgrad", "dy"): 0,
    ("wgrad", "x"): 0,
}


@dataclass(frozen=True)
class Call:
    """What identifies one call of one linear, beside its tensors.

    name: the module's global name; key: seed and step; microbatch: its index in the global batch,
        which makes wgrad's Hadamard signs fresh.
    placements: where the local x, w and dy lie in the unsharded tensors.
    sharded: the axis along which tensor parallelism shards an operand; absent where it does not.
    reduce_max: takes a maximum over the tensor-parallel group in place.
    observe: called with (gemm, operand, tensor) on each incoming operand and each product (y, dx,
        dw), to watch for NaN.
    """

    name: str = "linear"
    key: Key = field(default_factory=lambda: Key(0))
    microbatch: int = 0
    placements: Mapping[str, Placement] = field(default_factory=dict)
    sharded: Mapping[str, int] = field(default_factory=dict)
    reduce_max: ReduceMax | None = None
    observe: Callable[[str, str, Tensor], None] | None = None

    def preparation(self, recipe: Recipe, gemm: str, operand: str, like: Tensor) -> Preparation:
        """What `operand` of `gemm` goes through in this call."""
        gemm_recipe = recipe.gemm(gemm)
        quantizer = gemm_recipe.a if OPERANDS[gemm][0] == operand else gemm_recipe.b
        axis = CONTRACTED[gemm, operand]
        label = stream_label(self.name, gemm, operand)
        noise = None
        if quantizer is not None and quantizer.stochastic:
            noise = Noise(self.key, stream_id(label), self.placements.get(operand, WHOLE))
        signs = None
        hadamard = gemm_recipe.hadamard
        if hadamard is not None and hadamard.signs == "random":
            # W is quantized once a step, so the signs that it shares are fixed within one.
            draw = self.microbatch if gemm == "wgrad" else 0
            stream = stream_id(stream_label(self.name, gemm))
            signs = random_signs(hadamard.group, self.key, stream, draw, like.device)
        shard = self.sharded.get(operand)
        return Preparation(
            label=label,
            quantizer=quantizer,
            axis=axis,
            group=hadamard.group if hadamard is not None else 0,
            signs=signs,
            noise=noise,
            reduce_row=self.reduce_max if shard == axis else None,
            reduce_tensor=self.reduce_max if shard is not None else None,
        )

    def watch(self, gemm: str, operand: str, tensor: Tensor) -> None:
        if self.observe is not None:
            self.observe(gemm, operand, tensor)


@dataclass(frozen=True)
class Saved:
    """What backward needs, with X as [tokens, in]: both operands of fprop as the recipe's backward
    takes them, the weight itself where DGE reads it, and X's outlier residual (dense, in X's
    dtype)."""

    x: Operand
    w: Operand
    weight: Tensor | None
    residual: Tensor | None


def fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, call: Call
) -> tuple[Tensor, Saved]:
    """Y = X W^T + bias for x [tokens, in], weight [out, in], bias [out] or None; returns
    (y [tokens, out], what to save). All terms are summed before the output is rounded."""
    call.watch("fprop", "x", x)
    call.watch("fprop", "w", weight)
    gemm = recipe.fprop
    backend = choose(gemm, x.device, x.dtype).backend
    outliers = recipe.outliers
    clamped, residual = outliers.split(x) if outliers is not None else (x, None)
    x_operand = backend.prepare(clamped, call.preparation(recipe, "fprop", "x", x))
    w_operand = backend.prepare(weight.to(x.dtype), call.preparation(recipe, "fprop", "w", x))
    if outliers is not None and not outliers.compensate:
        residual = None
    alone = residual is None and bias is None
    y = backend.multiply(
        x_operand, w_operand, gemm.correction, x.dtype if alone else _wide(x.dtype)
    )
    if residual is not None:
        y += residual @ weight.to(x.dtype).t()
    if bias is not None:
        y += bias
    call.watch("fprop", "y", y)
    forward = recipe.backward == "forward"
    clamped_for_wgrad = forward and gemm.a is not None  # raw X has its outliers still
    if outliers is not None and not (outliers.residual_in_wgrad and clamped_for_wgrad):
        residual = None
    return y.to(x.dtype), Saved(
        x_operand if clamped_for_wgrad else x,
        w_operand if forward and gemm.b is not None else weight,
        weight if recipe.estimator is not None else None,
        residual,
    )


def dgrad(dy: Tensor, saved: Saved, recipe: Recipe, call: Call) -> tuple[Tensor, Operand]:
    """dX = dY W for dy [tokens, out]; returns (dx [tokens, in], dY as it was multiplied)."""
    return _backward_gemm("dgrad", dy, saved.w, recipe, call, dy.dtype)


def wgrad(dy: Tensor, saved: Saved, recipe: Recipe, call: Call, out_dtype: torch.dtype) -> Tensor:
    """dW = dY^T X for dy [tokens, out]; returns [out, in] in `out_dtype`."""
    if saved.residual is None and recipe.estimator is None:
        return _backward_gemm("wgrad", dy, saved.x, recipe, call, out_dtype)[0]
    dw = _backward_gemm("wgrad", dy, saved.x, recipe, call, _wide(dy.dtype))[0]
    if recipe.estimator is not None:
        # Recipe's own checks see to it that W was quantized and is here.
        assert isinstance(saved.w, QuantizedTensor) and saved.weight is not None
        dw *= recipe.estimator.factor(saved.w.grid_coordinates(saved.weight.to(dy.dtype)))
    if saved.residual is not None:  # its product took W itself: no quantizer to see through
        dw += dy.t() @ saved.residual
    return dw.to(out_dtype)


def _backward_gemm(
    gemm: str, dy: Tensor, saved: Operand, recipe: Recipe, call: Call, out_dtype: torch.dtype
) -> tuple[Tensor, Operand]:
    """dY against the saved W (dgrad) or X (wgrad); returns (product, dY as it was multiplied)."""
    backend = choose(recipe.gemm(gemm), dy.device, dy.dtype).backend
    name = OPERANDS[gemm][1]
    dy_preparation = call.preparation(recipe, gemm, "dy", dy)
    preparation = call.preparation(recipe, gemm, name, dy)
    if not isinstance(saved, QuantizedTensor):
        other = saved.to(dy.dtype)
    elif preparation.quantizer is None and not (preparation.group or recipe.fprop.hadamard):
        # As the forward pass left it. Its elements are exact in BF16, and its vector-wise scale
        # lies along the axis that this GEMM contracts, so the scale goes into dY.
        exact = dy.dtype if dy.dtype == torch.bfloat16 else _wide(dy.dtype)  # float16 overflows
        other, scale = saved.factors(exact)
        if scale is not None:
            fold = scale.expand(other.shape[0], 1).flatten()
            dy_preparation = replace(dy_preparation, fold=fold)
    else:
        other = saved.dequantize(_wide(dy.dtype))
        if recipe.fprop.hadamard is not None:  # back from the basis in which it was quantized
            forward = call.preparation(recipe, "fprop", name, dy)
            other = inverse(other, forward.group, forward.signs)
    dy_operand = backend.prepare(dy, dy_preparation)
    operand = backend.prepare(other, preparation)
    correction = recipe.gemm(gemm).correction
    return backend.multiply(dy_operand, operand, correction, out_dtype), dy_operand


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# Hundreds of small operations run here, and none for a mode of torch functions to change: asking
# one each time (the CPU runtime installs one) would cost more than most of them.
_plain_tensors = torch._C.DisableTorchFunction


class _Linear(torch.autograd.Function):
    """The three GEMMs of one linear; what they do is all in the recipe."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, call: Call
    ) -> Tensor:
        with _plain_tensors():
            y, saved = fprop(x.reshape(-1, x.shape[-1]), weight, bias, recipe, call)
        ctx.recipe, ctx.call, ctx.x_shape = recipe, call, x.shape
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        _save(ctx, saved)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, recipe, call = _load(ctx), ctx.recipe, ctx.call
        dy = dy.reshape(-1, dy.shape[-1])
        call.watch("dgrad", "dy", dy)
        dx = dw = db = None
        dy_operand: Operand = dy
        # Autocast may be on around backward; what this computes in is settled.
        with _plain_tensors(), torch.autocast(dy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx, dy_operand = dgrad(dy, saved, recipe, call)
                call.watch("dgrad", "dx", dx)
                dx = dx.view(ctx.x_shape)
            if ctx.needs_input_grad[1]:
                dw = wgrad(dy, saved, recipe, call, ctx.weight_dtype)
                call.watch("wgrad", "dw", dw)
        if ctx.needs_input_grad[2]:
            # Where dX is not needed dY is not quantized for it, and the raw one serves.
            quantized = recipe.bias_gradient == "quantized"
            summed = dy_operand if quantized and isinstance(dy_operand, QuantizedTensor) else dy
            db = _bias_gradient(summed, _wide(dy.dtype)).to(ctx.bias_dtype)
        return dx, dw, db, None, None


def _bias_gradient(dy: Operand, dtype: torch.dtype) -> Tensor:
    wide = dy.dequantize(dtype) if isinstance(dy, QuantizedTensor) else dy.to(dtype)
    return wide.sum(0)


def _save(ctx: Any, saved: Saved) -> None:
    """Saved's tensors through save_for_backward, so that hooks on saved tensors see every byte."""
    tensors: list[Tensor | None] = [saved.weight, saved.residual]
    ctx.rebuild = []
    for operand in (saved.x, saved.w):
        if isinstance(operand, QuantizedTensor):
            ctx.rebuild.append(
                partial(
                    QuantizedTensor,
                    quantizer=operand.quantizer,
                    shape=operand.shape,
                    axis=operand.axis,
                )
            )
            tensors += [operand.codes, operand.scales, operand.tensor_scale]
        else:
            ctx.rebuild.append(lambda tensor, *_: tensor)
            tensors += [operand, None, None]
    ctx.save_for_backward(*tensors)


def _load(ctx: Any) -> Saved:
    weight, residual, *rest = ctx.saved_tensors
    x, w = (build(*three) for build, three in zip(ctx.rebuild, (rest[:3], rest[3:]), strict=True))
    return Saved(x, w, weight, residual)


def quantized_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, call: Call
) -> Tensor:
    """Y = X W^T + bias under `recipe`, differentiable in all three.

    x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype. Under
    torch.autocast x and weight are cast as nn.functional.linear casts them.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        return _Linear.apply(x, weight, bias, recipe, call)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str,
    seed: int = 0,
    step: int = 0,
    name: str = "linear",
) -> Tensor:
    """Y = X W^T + bias with the three GEMMs in the recipe's precision.

    x: [..., in]; weight: [out, in]; bias: [out] or None. Returns [..., out] in x's dtype.
    recipe: a Recipe or anything `get_recipe` takes. seed, step, name: key the random bits; two
        linears of a model need two names, and each step of training its own number.
    Raises ConfigError where a block does not divide an axis that it tiles.
    """
    if isinstance(recipe, str):
        recipe = get_recipe(recipe)
    tokens = None  # wgrad alone contracts them
    if torch.is_grad_enabled() and weight.requires_grad:
        tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
    recipe.check_linear(tokens, weight.shape[1], weight.shape[0], name)
    return quantized_linear(x, weight, bias, recipe, Call(name=name, key=Key(seed, step)))
