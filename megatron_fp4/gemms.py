"""The three GEMMs of a linear, and what travels between ranks around them.

Under sequence parallelism an operand is prepared from this rank's tokens, and its codes and scales
are gathered, forward and backward. What is kept for backward is never gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_fp4.backends import Operand, finish
from megatron_fp4.call import CONTRACTED, Call, Source
from megatron_fp4.communication import Pending
from megatron_fp4.formats import wide
from megatron_fp4.hadamard import inverse
from megatron_fp4.outliers import Residual
from megatron_fp4.quantizer import QuantizedTensor
from megatron_fp4.recipe import OPERANDS, Recipe


@dataclass(frozen=True)
class Saved:
    """What backward needs, with this rank's tokens of X.

    x: the operand that fprop multiplied, where the recipe's backward takes that; else wgrad's own
        copy (blocked along the tokens), or X itself. None where W gets no gradient.
    w: the operand of fprop likewise, or W itself. weight: W where DGE reads it.
    residual: the outliers of X where they reach dW.
    """

    x: Operand | None
    w: Operand
    weight: Tensor | None
    residual: Residual | None


@dataclass(frozen=True)
class Needs:
    """Which gradients a backward pass is asked for. dw_into: what dW is added to; dw_dtype: what it
    is rounded to where there is none of that."""

    dx: bool
    dw: bool
    dw_dtype: torch.dtype
    dw_into: Tensor | None = None


# --- forward --------------------------------------------------------------------------------------


def fprop(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, call: Call
) -> tuple[Tensor, Saved]:
    """Y = X W^T + bias for x [tokens, in], weight [out, in], bias [out] or None; returns
    (y [tokens, out], what may be saved, wgrad's X not packed yet). All terms are summed before the
    output is rounded."""
    call.watch("fprop", "x", x)
    call.watch("fprop", "w", weight)
    gemm, outliers = recipe.fprop, recipe.outliers
    clamped, residual = (x, None) if outliers is None else outliers.split(x)
    x_operand, w_operand = _forward_operands(clamped, weight, recipe, call)
    travels: Pending[Operand] = Pending.of(x_operand)
    if call.parallel is not None and call.has_part("x"):
        travels = call.parallel.gather(x_operand)
    compensation = None
    if residual is not None and outliers is not None and outliers.compensate:
        compensation = _all_tokens(residual, call).wait().dense() @ weight.to(x.dtype).t()
    alone = compensation is None and bias is None
    backend = call.backend(recipe, "fprop", x)
    y = backend.multiply(
        travels.wait(),
        _multiplied(w_operand, "fprop", recipe, call, x),
        gemm.correction,
        x.dtype if alone else wide(x.dtype),
    )
    for term in (compensation, bias):
        if term is not None:
            y += term
    call.watch("fprop", "y", y)
    y = y.to(x.dtype)
    if call.parallel is not None and call.has_part("dy"):
        y = call.parallel.scatter_sum(y).wait()
    forward = recipe.backward == "forward"
    clamped_for_wgrad = forward and gemm.a is not None  # raw X has its outliers still
    reaches_dw = outliers is not None and outliers.compensate and outliers.residual_in_wgrad
    return y, Saved(
        x_operand if clamped_for_wgrad else x,
        w_operand if forward and gemm.b is not None else weight,
        weight if recipe.estimator is not None else None,
        residual if reaches_dw and clamped_for_wgrad else None,
    )


def _forward_operands(
    x: Tensor, weight: Tensor, recipe: Recipe, call: Call
) -> tuple[Operand, Operand]:
    """X's and W's, with W's from an earlier call where it is kept."""
    kept = call.weights
    sources = [Source("fprop", "x", x, is_part=call.has_part("x"))]
    if kept is not None and "fprop" in kept:
        return call.prepare(recipe, x, *sources)[0], kept["fprop"][0]
    x_operand, w_operand = call.prepare(
        recipe, x, *sources, Source("fprop", "w", weight.to(x.dtype))
    )
    if kept is not None and recipe.fprop.b is not None:
        kept["fprop"] = w_operand, None
    return x_operand, w_operand


def _all_tokens(residual: Residual, call: Call) -> Pending[Residual]:
    if call.parallel is None or not call.has_part("x"):
        return Pending.of(residual)
    return call.parallel.gather_residual(residual)


def pack_x(saved: Saved, recipe: Recipe, call: Call) -> Saved:
    """`saved` with wgrad's copy of X in place of X, where wgrad quantizes X itself: the codes that
    backward would make, in a quarter of the bytes."""
    x = saved.x
    tiles = isinstance(x, Tensor) and x.shape[0] % recipe.token_tile("wgrad", "x") == 0
    if not (isinstance(x, Tensor) and tiles and recipe.wgrad.b is not None):
        return saved
    [packed] = call.prepare(recipe, x, Source("wgrad", "x", x, is_part=call.has_part("x")))
    return replace(saved, x=packed)


# --- backward -------------------------------------------------------------------------------------


@dataclass
class Backward:
    """dX = dY W and dW = dY^T X of one call, for dy [tokens, out].

    X travels while dX is computed, and the sum of dX over the ranks while dW is.
    """

    dy: Tensor
    saved: Saved
    recipe: Recipe
    call: Call
    needs: Needs

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Operand]:
        """(dx [tokens, in] or None, dw [out, in] or None, dY as dgrad multiplied it or as it
        came)."""
        x = self._wgrad_x() if self.needs.dw else None
        kept = self.saved.residual
        residual = _all_tokens(kept, self.call) if kept is not None and self.needs.dw else None
        wanted = [g for g, need in (("dgrad", self.needs.dx), ("wgrad", self.needs.dw)) if need]
        # A vector-wise scale of X lies along the axis that wgrad contracts: into dY with it.
        # Where X travels dgrad does not wait for it.
        folds_x = x is not None and self._left_by_forward("wgrad")
        late = ["wgrad"] if folds_x and self.call.has_part("x") else []
        x_fold = x.wait()[1] if x is not None and folds_x and not late else None
        dy = self._dy_operands([gemm for gemm in wanted if gemm not in late], x_fold)
        dx = dw = None
        if "dgrad" in dy:
            dx = self._summed(self._dgrad(dy["dgrad"].wait()))
        if x is not None:
            if late:
                dy |= self._dy_operands(late, x.wait()[1])
            dw = self._wgrad(dy["wgrad"].wait(), x.wait()[0], residual)
        return (
            None if dx is None else dx.wait(),
            dw,
            dy["dgrad"].wait() if "dgrad" in dy else self.dy,
        )

    # --- operands ---

    def _left_by_forward(self, gemm: str) -> bool:
        """Whether `gemm` multiplies W or X as the forward pass left it. Its elements are exact in
        BF16; its scale, if it spans the axis, is another's affair."""
        own, kept = self.recipe.gemm(gemm), self.saved.w if gemm == "dgrad" else self.saved.x
        plain = own.b is None and own.hadamard is None and self.recipe.fprop.hadamard is None
        return plain and isinstance(kept, QuantizedTensor)

    def _matrix(self, gemm: str, kept: Operand) -> tuple[Tensor, Tensor | None]:
        """(W or X in the model's layout, what is to be folded into dY)."""
        dtype = self.dy.dtype
        if not isinstance(kept, QuantizedTensor):
            assert isinstance(kept, Tensor)
            return kept.to(dtype), None
        if self._left_by_forward(gemm):
            exact = dtype if dtype == torch.bfloat16 else wide(dtype)  # float16 overflows
            values, scale = kept.factors(exact)
            return values, None if scale is None else scale.expand(len(values), 1).flatten()
        turned = self.recipe.fprop.hadamard is not None
        # Two significant bits and a power of two are exact in BF16 too.
        narrow = kept.quantizer.scale == "e8m0" and dtype == torch.bfloat16 and not turned
        value = kept.dequantize(dtype if narrow else wide(dtype))
        if turned:  # from the basis in which it was quantized
            source = Source("fprop", OPERANDS[gemm][1], value)
            forward = self.call.preparation(self.recipe, source)
            value = inverse(value, forward.group, forward.signs)
        return value, None

    def _prepare(self, gemm: str, kept: Operand, is_part: bool = False) -> _Folded:
        """W's or X's operand of a backward GEMM, with what is to be folded into dY."""
        matrix, fold = self._matrix(gemm, kept)
        source = Source(gemm, OPERANDS[gemm][1], matrix, is_part=is_part)
        [operand] = self.call.prepare(self.recipe, self.dy, source)
        return operand, fold

    @cached_property
    def _w(self) -> _Folded:
        """W's operand of dgrad, from an earlier call of the step where it is kept."""
        kept = self.call.weights
        if kept is not None and "dgrad" in kept:
            return kept["dgrad"]
        made = self._prepare("dgrad", self.saved.w)
        # What is only decoded from fprop's codes weighs as much as W: kept where that was asked.
        if kept is not None and (self.call.decodes or isinstance(made[0], QuantizedTensor)):
            kept["dgrad"] = made
        return made

    def _wgrad_x(self) -> Pending[_Folded]:
        """X's operand with all tokens: made of this rank's and gathered, or the reverse where its
        blocks straddle the ranks' tokens or it stays in high precision."""
        kept, parallel = self.saved.x, self.call.parallel
        assert kept is not None
        ready = isinstance(kept, QuantizedTensor) and kept.axis == CONTRACTED["wgrad", "x"]
        if parallel is None or not self.call.has_part("x"):
            return Pending.of((kept, None) if ready else self._prepare("wgrad", kept))
        if not ready and self._stands_alone("x", _tokens(kept)):
            kept, ready = self._prepare("wgrad", kept, is_part=True)[0], True
        whole = parallel.gather(kept)
        return whole.then(lambda x: (x, None) if ready else self._prepare("wgrad", x))

    def _stands_alone(self, operand: str, tokens: int, gemm: str = "wgrad") -> bool:
        """Whether a part of the tokens can be quantized by itself, to travel as 4-bit codes."""
        quantizer = self.recipe.quantizer(gemm, operand)
        tile = self.recipe.token_tile(gemm, operand)
        return quantizer is not None and quantizer.element == "e2m1" and tokens % tile == 0

    def _dy_operands(self, gemms: list[str], x_fold: Tensor | None) -> dict[str, Pending[Operand]]:
        """dY's operands of these backward GEMMs, with all tokens."""
        parallel, is_part = self.call.parallel, self.call.has_part("dy")
        if is_part and parallel is not None and not self._dy_travels_as_codes():
            whole = parallel.gather(self.dy).wait()
            assert isinstance(whole, Tensor)
            self.dy, is_part = whole, False
        if x_fold is not None and is_part and parallel is not None:
            x_fold = parallel.part(x_fold)
        folds = {"dgrad": self._w[1] if "dgrad" in gemms else None, "wgrad": x_fold}
        sources = [Source(gemm, "dy", self.dy, folds[gemm], is_part) for gemm in gemms]
        made = self.call.prepare(self.recipe, self.dy, *sources)
        return {
            gemm: parallel.gather(operand) if is_part and parallel else Pending.of(operand)
            for gemm, operand in zip(gemms, made, strict=True)
        }

    def _dy_travels_as_codes(self) -> bool:
        """Not where one copy stays wide: dY itself weighs no more then, and both are made of it."""
        gemms = [("dgrad", self.needs.dx), ("wgrad", self.needs.dw)]
        return self.saved.residual is None and all(
            self._stands_alone("dy", len(self.dy), gemm) for gemm, needed in gemms if needed
        )

    # --- products ---

    def _dgrad(self, dy: Operand) -> Tensor:
        backend = self.call.backend(self.recipe, "dgrad", self.dy)
        w = _multiplied(self._w[0], "dgrad", self.recipe, self.call, self.dy)
        dx = backend.multiply(dy, w, self.recipe.dgrad.correction, self.dy.dtype)
        self.call.watch("dgrad", "dx", dx)
        return dx

    def _summed(self, dx: Tensor) -> Pending[Tensor]:
        parallel = self.call.parallel
        if parallel is not None and self.call.has_part("x"):
            return parallel.scatter_sum(dx)
        return parallel.sum(dx) if parallel is not None and parallel.sums_dx else Pending.of(dx)

    def _wgrad(self, dy: Operand, x: Operand, residual: Pending[Residual] | None) -> Tensor:
        needs, saved, estimator = self.needs, self.saved, self.recipe.estimator
        multiply = self.call.backend(self.recipe, "wgrad", self.dy).multiply
        correction = self.recipe.wgrad.correction
        if residual is None and estimator is None:
            dw = multiply(dy, x, correction, needs.dw_dtype, needs.dw_into)
        else:
            dw = multiply(dy, x, correction, wide(self.dy.dtype))
            if estimator is not None:
                # Recipe's own checks see to it that W was quantized and is here.
                assert isinstance(saved.w, QuantizedTensor) and saved.weight is not None
                scaled = saved.w.grid_coordinates(saved.weight.to(self.dy.dtype))
                dw *= estimator.factor(scaled)
            if residual is not None:  # its product took W itself: no quantizer to see through
                dw += self.dy.t() @ residual.wait().dense()
            dw = finish(dw, needs.dw_dtype, needs.dw_into)
        self.call.watch("wgrad", "dw", dw)
        return dw


# An operand, and what is to be folded into the other one of its GEMM.
_Folded = tuple[Operand, Tensor | None]


def _multiplied(operand: Operand, gemm: str, recipe: Recipe, call: Call, like: Tensor) -> Operand:
    """W's operand as the backend multiplies it, kept if the call keeps that."""
    if call.weights is None or not (call.decodes and isinstance(operand, QuantizedTensor)):
        return operand
    decoded = f"{gemm} decoded"
    if decoded not in call.weights:
        call.weights[decoded] = call.backend(recipe, gemm, like).decode(operand, like.dtype), None
    return call.weights[decoded][0]


def _tokens(x: Operand) -> int:
    return x.shape[0] if isinstance(x, QuantizedTensor | Tensor) else len(x.values)
