"""The three GEMMs of a linear, and what travels between ranks around them.

Under sequence parallelism an operand is prepared from this rank's tokens, and its codes and scales
are gathered, forward and backward. What is kept for backward is never gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    call: Call,
    needs_dw: bool = True,
) -> tuple[Tensor, Saved]:
    """Y = X W^T + bias for x [tokens, in], weight [out, in], bias [out] or None; returns
    (y [tokens, out], what may be saved). All terms are summed before the output is rounded."""
    outliers = recipe.outliers
    clamped, residual = x, None
    if outliers is not None:
        clamped, residual = call.backend(recipe, "fprop", x).split(x, outliers)
    raw = x if needs_dw and call.packs_x and recipe.packs_x(x.shape[0]) else None
    x_operand, w_operand, packed = _forward_operands(clamped, weight, raw, recipe, call)
    travels: Pending[Operand] = Pending.of(x_operand)
    if call.parallel is not None and call.has_part("x"):
        travels = call.parallel.gather(x_operand)
    compensates = residual is not None and outliers is not None and outliers.compensate
    alone = not compensates and bias is None
    operands = travels.wait(), w_operand
    y = call.product(recipe, "fprop", operands, x, x.dtype if alone else wide(x.dtype))
    if residual is not None and compensates:
        dense = _all_tokens(residual, call).wait().dense()
        backend = call.backend(recipe, "fprop", x)
        y = backend.multiply(dense, weight.to(x.dtype), 1.0, y.dtype, y)
    if bias is not None:
        y += bias
    y = y.to(x.dtype)
    if call.parallel is not None and call.has_part("dy"):
        y = call.parallel.scatter_sum(y).wait()
    clamps_dw = recipe.keeps_forward_x  # raw X has its outliers still
    compensates_dw = outliers is not None and outliers.compensate and outliers.residual_in_wgrad
    kept_x = x_operand if clamps_dw else x if packed is None else packed
    return y, Saved(
        _plain(kept_x) if needs_dw else None,
        _plain(w_operand)
        if recipe.backward == "forward" and recipe.fprop.b is not None
        else weight,
        weight if recipe.estimator is not None else None,
        residual if needs_dw and clamps_dw and compensates_dw else None,
    )


def _forward_operands(
    x: Tensor, weight: Tensor, raw: Tensor | None, recipe: Recipe, call: Call
) -> tuple[Operand, Operand, Operand | None]:
    """X's and W's, with W's from an earlier call where it is kept, and wgrad's of a raw X. They
    are made together: what ranks must agree on takes one collective."""
    kept, is_part = call.weights, call.has_part("x")
    sources = [Source("fprop", "x", x, is_part=is_part)]
    if raw is not None:
        sources.append(Source("wgrad", "x", raw, is_part=is_part, at_once=False))
    has_w = kept is not None and "fprop" in kept
    if not has_w:
        sources.append(Source("fprop", "w", weight.to(x.dtype)))
    made = call.prepare(recipe, x, *sources)
    packed = None if raw is None else made[1]
    if packed is not None and recipe.fprop.a is None:  # nothing else shows X in forward
        call.watch("wgrad", "x", packed)
    if kept is not None and has_w:
        return made[0], kept["fprop"][0], packed
    if kept is not None and recipe.fprop.b is not None:
        kept["fprop"] = _plain(made[-1]), None
    return made[0], made[-1], packed


def _plain(operand: Operand) -> Operand:
    """What may be kept: not what a backend has made of it to be multiplied."""
    return operand.plain() if isinstance(operand, QuantizedTensor) else operand


def _all_tokens(residual: Residual, call: Call) -> Pending[Residual]:
    if call.parallel is None or not call.has_part("x"):
        return Pending.of(residual)
    return call.parallel.gather_residual(residual)


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
        others = self._under_way()
        kept = self.saved.residual
        residual = _all_tokens(kept, self.call) if kept is not None and self.needs.dw else None
        wanted = [g for g, need in (("dgrad", self.needs.dx), ("wgrad", self.needs.dw)) if need]
        # What is to be folded into dY comes with X: where that travels dgrad does not wait for it.
        late = ["wgrad"] if "wgrad" in others and self._left_by_forward("wgrad") else []
        dy = self._operands([g for g in wanted if g not in late], others)
        dx = dw = None
        if self.needs.dx:
            operand = dy["dgrad"].wait()
            dx = self._summed(self._dgrad(operand, others.pop("dgrad").wait()[0]))
            dy["dgrad"] = Pending.of(_plain(operand))
        if self.needs.dw:
            if late:
                dy |= self._operands(late, others)
            dw = self._wgrad(dy["wgrad"].wait(), others["wgrad"].wait()[0], residual)
        return (
            None if dx is None else dx.wait(),
            dw,
            dy["dgrad"].wait() if "dgrad" in dy else self.dy,
        )

    # --- operands ---

    def _left_by_forward(self, gemm: str) -> bool:
        """Whether `gemm` multiplies W or X as the forward pass left it. Its elements are exact in
        BF16; its scale, if it spans the axis, is another's affair."""
        own = self.recipe.gemm(gemm)
        plain = own.b is None and own.hadamard is None and self.recipe.fprop.hadamard is None
        return plain and isinstance(self._kept(gemm), QuantizedTensor)

    def _matrix(self, gemm: str, kept: Operand) -> tuple[Tensor | QuantizedTensor, Tensor | None]:
        """(W or X in the model's layout, what is to be folded into dY)."""
        dtype = self.dy.dtype
        if not isinstance(kept, QuantizedTensor):
            assert isinstance(kept, Tensor)
            return kept.to(dtype), None
        if self._left_by_forward(gemm):
            exact = dtype if dtype == torch.bfloat16 else wide(dtype)  # float16 overflows
            if self.recipe.multiplied(gemm).b is not None and not any(n % 2 for n in kept.shape):
                fold = kept.block_scales(wide(dtype)).flatten()
                return kept.unscaled(), fold.expand(kept.shape[0])
            values, scale = kept.factors(exact)
            return values, None if scale is None else scale.expand(len(values), 1).flatten()
        turned = self.recipe.fprop.hadamard is not None
        own = self.recipe.quantizer(gemm, OPERANDS[gemm][1])
        # Two significant bits and a power of two are exact in BF16 too.
        narrow = kept.quantizer.scale == "e8m0" and dtype == torch.bfloat16 and not turned
        if narrow and own is not None:
            return kept, None
        value = kept.dequantize(dtype if narrow else wide(dtype))
        if turned:  # from the basis in which it was quantized
            source = Source("fprop", OPERANDS[gemm][1], value)
            forward = self.call.preparation(self.recipe, source)
            value = inverse(value, forward.group, forward.sign_vector(value.device))
        return value, None

    def _under_way(self) -> dict[str, Pending[_Folded]]:
        """W's and X's operands, by their GEMM, for which nothing is made of what this rank holds:
        W's of an earlier call of the step; X's that forward packed; X that has to be gathered
        first, since its blocks straddle the ranks' tokens or it stays in high precision."""
        found: dict[str, Pending[_Folded]] = {}
        weights, x, parallel = self.call.weights, self.saved.x, self.call.parallel
        if self.needs.dx and weights is not None and "dgrad" in weights:
            found["dgrad"] = Pending.of(weights["dgrad"])
        if not self.needs.dw or x is None:
            return found
        ready = isinstance(x, QuantizedTensor) and x.axis == CONTRACTED["wgrad", "x"]
        if parallel is None or not self.call.has_part("x"):
            return found | ({"wgrad": Pending.of((x, None))} if ready else {})
        if ready or not self._stands_alone("x", _tokens(x)):
            whole = parallel.gather(x)
            found["wgrad"] = whole.then(lambda x: (x, None) if ready else self._prepared_x(x))
        return found

    def _prepared_x(self, whole: Operand) -> _Folded:
        matrix, fold = self._matrix("wgrad", whole)
        [operand] = self.call.prepare(self.recipe, self.dy, Source("wgrad", "x", matrix))
        return operand, fold

    def _operands(
        self, gemms: list[str], others: dict[str, Pending[_Folded]]
    ) -> dict[str, Pending[Operand]]:
        """dY's operands of these GEMMs, with all tokens. The other operand of each goes to `others`
        where it is not there. All are made together: what ranks must agree on takes one
        collective."""
        parallel, is_part = self.call.parallel, self.call.has_part("dy")
        if is_part and parallel is not None and not self._dy_travels_as_codes():
            whole = parallel.gather(self.dy).wait()
            assert isinstance(whole, Tensor)
            self.dy, is_part = whole, False
        sources, folds = [], {}
        missing = [gemm for gemm in gemms if gemm not in others]
        for gemm in missing:
            operand = OPERANDS[gemm][1]
            matrix, folds[gemm] = self._matrix(gemm, self._kept(gemm))
            sources.append(Source(gemm, operand, matrix, is_part=self.call.has_part(operand)))
        for gemm in gemms:
            fold = folds.get(gemm)
            if gemm in others and self._left_by_forward(gemm):
                fold = others[gemm].wait()[1]
            if gemm == "wgrad" and fold is not None and is_part and parallel is not None:
                fold = parallel.part(fold)
            sources.append(Source(gemm, "dy", self.dy, fold, is_part))
        made = self.call.prepare(self.recipe, self.dy, *sources)
        for gemm, other in zip(missing, made, strict=False):
            others[gemm] = self._whole(gemm, other, folds[gemm])
        return {
            gemm: parallel.gather(operand) if is_part and parallel else Pending.of(operand)
            for gemm, operand in zip(gemms, made[len(missing) :], strict=True)
        }

    def _whole(self, gemm: str, operand: Operand, fold: Tensor | None) -> Pending[_Folded]:
        """An operand made of what this rank holds; X's is gathered, W's kept."""
        call = self.call
        if gemm == "wgrad" and call.parallel is not None and call.has_part("x"):
            return call.parallel.gather(operand).then(lambda x: (x, fold))
        # What is only decoded from fprop's codes weighs as much as W: kept where that was asked.
        if gemm == "dgrad" and call.weights is not None:
            if call.decodes or isinstance(operand, QuantizedTensor):
                call.weights[gemm] = _plain(operand), fold
        return Pending.of((operand, fold))

    def _kept(self, gemm: str) -> Operand:
        kept = self.saved.w if gemm == "dgrad" else self.saved.x
        assert kept is not None
        return kept

    def _stands_alone(self, operand: str, tokens: int, gemm: str = "wgrad") -> bool:
        """Whether a part of the tokens can be quantized by itself, to travel as 4-bit codes."""
        quantizer = self.recipe.quantizer(gemm, operand)
        tile = self.recipe.token_tile(gemm, operand)
        return quantizer is not None and quantizer.element == "e2m1" and tokens % tile == 0

    def _dy_travels_as_codes(self) -> bool:
        """Not where one copy stays wide: dY itself weighs no more then, and both are made of it."""
        gemms = [("dgrad", self.needs.dx), ("wgrad", self.needs.dw)]
        return self.saved.residual is None and all(
            self._stands_alone("dy", len(self.dy), gemm) for gemm, needed in gemms if needed
        )

    # --- products ---

    def _dgrad(self, dy: Operand, w: Operand) -> Tensor:
        return self.call.product(self.recipe, "dgrad", (dy, w), self.dy, self.dy.dtype)

    def _summed(self, dx: Tensor) -> Pending[Tensor]:
        parallel = self.call.parallel
        if parallel is not None and self.call.has_part("x"):
            return parallel.scatter_sum(dx)
        return parallel.sum(dx) if parallel is not None and parallel.sums_dx else Pending.of(dx)

    def _wgrad(self, dy: Operand, x: Operand, residual: Pending[Residual] | None) -> Tensor:
        needs, saved, estimator = self.needs, self.saved, self.recipe.estimator
        alone = residual is None and estimator is None
        dtype, into = (needs.dw_dtype, needs.dw_into) if alone else (wide(self.dy.dtype), None)
        dw = self.call.product(self.recipe, "wgrad", (dy, x), self.dy, dtype, into)
        if not alone:
            backend = self.call.backend(self.recipe, "wgrad", self.dy)
            if estimator is not None:
                # Recipe's own checks see to it that W was quantized and is here.
                assert isinstance(saved.w, QuantizedTensor) and saved.weight is not None
                dw = backend.estimate(dw, estimator, saved.w, saved.weight.to(self.dy.dtype))
            if residual is not None:  # its product took W itself: no quantizer to see through
                dense = residual.wait().dense()
                dw = backend.multiply(self.dy.t(), dense.t(), 1.0, dw.dtype, dw)
            dw = finish(dw, needs.dw_dtype, needs.dw_into)
        return dw


# An operand, and what is to be folded into the other one of its GEMM.
_Folded = tuple[Operand, Tensor | None]


def _tokens(x: Operand) -> int:
    return x.shape[0] if isinstance(x, QuantizedTensor | Tensor) else len(x.values)
