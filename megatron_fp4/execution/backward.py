"""The backward pass of a linear, dX = dY W and dW = dY^T X, executed from its plan.

Under sequence parallelism X is gathered while dX is computed, and dX is reduce-scattered while dW
is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_fp4.arithmetic.estimators import Ranks
from megatron_fp4.arithmetic.hot_channels import Columns, Outliers
from megatron_fp4.execution.call import Call, Site
from megatron_fp4.execution.communication import Pending
from megatron_fp4.execution.forward import Saved, all_tokens
from megatron_fp4.execution.gemm import run_gemm
from megatron_fp4.execution.making import make_operands, matrix_of, source_of
from megatron_fp4.execution.weights import HeldWeight
from megatron_fp4.makers.base import MatrixName, OperandPlan
from megatron_fp4.makers.estimator import Estimating
from megatron_fp4.multipliers.base import finish
from megatron_fp4.operands import Decoded, Made, Matrix, Operand, SwigluGradient
from megatron_fp4.plan.data import GemmPlan, LinearPlan, Making


@dataclass(slots=True)
class Gradients:
    """The gradients of one backward pass; None where one is not asked for.

    dx: [tokens, in]. dw: [out, in], or the main_grad to which it was added. dy: dgrad's operand of
    dY, [tokens, out], if the bias gradient is to be summed from it (`Recipe.bias_gradient`).
    """

    dx: Tensor | None
    dw: Tensor | None
    dy: Operand | None


@dataclass
class Backward:
    """One backward pass.

    saved: what the forward pass saved. held: W's operands, where the calls of a step share them.
    """

    plan: LinearPlan
    saved: Saved
    site: Site
    call: Call
    held: HeldWeight | None = None
    _matrices: dict[MatrixName, Matrix] = field(default_factory=dict)
    _folds: dict[OperandPlan, Tensor] = field(default_factory=dict)
    _made: dict[OperandPlan, Made] = field(default_factory=dict)

    def gradients(self, dy: Tensor, into: Tensor | None) -> Gradients:
        """Runs dgrad and wgrad, as far as the plan has them.

        dy: [tokens, out] in the model's dtype, or, where a SwiGLU follows, the gradient of its
        result, [tokens, out / 2]. into: the main_grad [out, in] to which dW is added, or None.
        """
        plan, site = self.plan, self.site
        x = self._send_kept_x()
        outliers = None
        if self.saved.outliers is not None:
            outliers = all_tokens(self.saved.outliers, plan, site)
        if self.saved.y is not None:
            self._matrices["dy", "swiglu"] = SwigluGradient(dy, self.saved.y)
        else:
            self._matrices["dy", "model"] = self._gather_before(dy)
        self._make_at_start()
        if x is None and plan.wgrad is not None:
            x = self._send(plan.wgrad.b)
        dgrad_dy = None if plan.dgrad is None else self._send(plan.dgrad.a)
        wgrad_dy = None
        if plan.wgrad is not None and plan.wgrad.a in self._made:
            wgrad_dy = self._send(plan.wgrad.a)
        dx = dw = bias_dy = None
        if plan.dgrad is not None and dgrad_dy is not None:
            a, dgrad_dy = dgrad_dy.wait(), None
            dx = self._sum(run_gemm(plan.dgrad, a, self._w(plan.dgrad), site, held=self.held))
            bias_dy = a.operand if plan.recipe.bias_gradient == "quantized" else None
            del a  # its memory is wgrad's to use
            self._forget(plan.dgrad)
        if plan.wgrad is not None and x is not None:
            b = x.wait()
            if plan.late:
                b = self._make_late(plan.wgrad, b)
            a = self._made[plan.wgrad.a] if wgrad_dy is None else wgrad_dy.wait()
            dw = self._dw(plan.wgrad, a, b, outliers, into)
        summed = None if dx is None else dx.wait()
        if summed is not None and plan.estimates_x is not None:
            saved = self.saved
            summed = self._estimated(
                plan.estimates_x, plan.fprop.a, summed, saved.x, saved.x_itself
            )
        return Gradients(summed, dw, bias_dy)

    # --- operands ---

    def _send_kept_x(self) -> Pending[Made] | None:
        """Starts to gather X in the form in which it was saved for backward.

        This form is wgrad's operand, packed, or the matrix or codes from which wgrad's operand is
        made after the gather. Returns None where nothing of it is gathered: wgrad's operand is then
        made from this rank's part first.
        """
        wgrad, x = self.plan.wgrad, self.saved.x
        if wgrad is None or x is None:
            return None
        if self.plan.saves_x == "packed":
            self._made[wgrad.b] = Made(x)
            return self._send(wgrad.b)
        if wgrad.b.gathered == "before" and self.site.parallel is not None:
            x = x if self.saved.x_itself is None else _kept_for(wgrad, x, self.saved.x_itself)
            return self.site.parallel.gather(x).then(Made)
        return None

    def _gather_before(self, dy: Tensor) -> Tensor:
        """dY of all tokens, where its operands are made from that; else `dy`."""
        gemm = self.plan.dgrad or self.plan.wgrad
        if gemm is None or gemm.a.gathered != "before" or self.site.parallel is None:
            return dy
        whole = self.site.parallel.gather(dy).wait()
        assert isinstance(whole, Tensor)
        return whole

    def _make_at_start(self) -> None:
        """Makes all operands that do not wait for the gathered X; W's operand if it is not held."""
        plan, saved, makings = self.plan, self.saved, self.plan.backward
        if plan.remade is not None:
            self._remake_w(plan.remade)
            makings = makings[1:]
        if plan.dgrad is not None:
            if self.held is not None and "dgrad" in self.held.made:
                makings = tuple(m for m in makings if plan.dgrad.b not in m.operands)
                fold = self.held.folds["dgrad"]
                if fold is not None:
                    self._folds[plan.dgrad.a] = fold
            else:
                w, weight = saved.w, saved.weight
                w = w if weight is None else _kept_for(plan.dgrad, w, weight)
                self._take_source(plan.dgrad, w, plan.fprop.b)
        if plan.wgrad is not None and plan.makes_x_at_start:
            assert saved.x is not None
            x, x_itself = saved.x, saved.x_itself
            x = x if x_itself is None else _kept_for(plan.wgrad, x, x_itself)
            self._take_source(plan.wgrad, x, plan.fprop.a)
        self._make(makings)

    def _remake_w(self, making: Making) -> None:
        """Quantizes W again as fprop did, since the forward pass saved W and no codes of it.

        The codes and scales are those of the forward pass, bit for bit: W has not changed, and the
        same call draws the same random bits. They replace W in `saved`.
        """
        assert isinstance(self.saved.w, Tensor)
        matrices: dict[MatrixName, Matrix] = {
            making.matrix: self.saved.w.to(self.plan.setting.dtype)
        }
        made = make_operands([making], matrices, {}, self.site, self.call)
        self.saved.w = made[making.operands[0]].operand

    def _make_late(self, wgrad: GemmPlan, x: Made) -> Made:
        """Makes the operands that depend on the gathered X, `x`; returns X's operand."""
        self._take_source(wgrad, x.operand, self.plan.fprop.a)
        self._make(self.plan.late)
        return self._made[wgrad.b]

    def _take_source(self, gemm: GemmPlan, kept: Operand, fprop: OperandPlan) -> None:
        """Records the matrix from which b of `gemm` is made, and the row scales that multiply dY.

        gemm: dgrad or wgrad, whose b is W or X. kept: what the forward pass saved of it. fprop: the
        plan of fprop's operand of it. See `source_of`.
        """
        matrix, fold = source_of(gemm.b, kept, fprop, self.site, self.call)
        if fold is not None and gemm.name == "wgrad" and gemm.a.is_part and self.site.parallel:
            fold = self.site.parallel.part(fold)
        self._matrices[gemm.b.letter, gemm.b.source] = matrix
        if fold is not None:
            self._folds[gemm.a] = fold

    def _make(self, makings: tuple[Making, ...]) -> None:
        self._made |= make_operands(makings, self._matrices, self._folds, self.site, self.call)
        for making in makings:
            if making.matrix[0] != "dy":  # kept, since the outliers of X are multiplied by it
                self._matrices.pop(making.matrix, None)

    def _dy(self, wgrad: GemmPlan) -> Tensor:
        """dY in the model's dtype."""
        makings = self.plan.backward + self.plan.late
        making = next(making for making in makings if wgrad.a in making.operands)
        dy = matrix_of(making, self._matrices)
        assert isinstance(dy, Tensor)
        return dy

    def _forget(self, gemm: GemmPlan) -> None:
        """Frees the operands of a GEMM that has run."""
        self._made.pop(gemm.a, None)
        self._made.pop(gemm.b, None)

    def _w(self, dgrad: GemmPlan) -> Made:
        """dgrad's operand of W, which is held for the other calls where the plan says so."""
        held = self.held
        if held is None or dgrad.b not in self._made:
            return self._made[dgrad.b] if held is None else held.made["dgrad"]
        made = self._made[dgrad.b]
        if dgrad.holds_b:
            held.made["dgrad"], held.folds["dgrad"] = Made(made.operand), self._folds.get(dgrad.a)
        return made

    def _send(self, operand: OperandPlan) -> Pending[Made]:
        """Starts to gather an operand that was made, if its plan gathers codes; else the result is
        the operand, at once."""
        made = self._made[operand]
        if operand.gathered != "after" or self.site.parallel is None:
            return Pending(None, made)
        return self.site.parallel.gather(made.operand).then(Made)

    # --- products ---

    def _sum(self, dx: Tensor) -> Pending[Tensor]:
        """Starts the reduce-scatter or all-reduce of dX; if there is none, the result is `dx`."""
        parallel, sharding = self.site.parallel, self.plan.setting.sharding
        if parallel is not None and sharding.scattered == "x":
            return parallel.scatter_sum(dx)
        return parallel.sum(dx) if parallel is not None and sharding.sums_dx else Pending(None, dx)

    def _estimated(
        self,
        estimates: Estimating,
        operand: OperandPlan,
        gradient: Tensor,
        quantized: Operand | None,
        matrix: Tensor | None,
        into: Tensor | None = None,
    ) -> Tensor:
        """The gradient of X or W with the estimator's factor.

        operand: the plan of fprop's operand. quantized, matrix: that operand, and X or W, both of
        which are saved where there is an estimator. into: see `makers.estimator.estimated`.
        """
        more: dict[str, Any] = {}
        if estimates.takes_ranks:
            more["ranks"] = self._ranks()
        if estimates.takes_outer_ranks:
            more["outer_ranks"] = self._ranks()
        if estimates.transforms:
            more["given"] = self.site.given(operand, self.call, None, None)
        return estimates.apply(gradient, quantized, matrix, into, **more)

    def _ranks(self) -> Ranks:
        """The ranks of the tensor-parallel group."""
        parallel = self.site.parallel
        assert parallel is not None
        return Ranks(lambda own: parallel.maximum([own])[0], lambda own: parallel.sum(own).wait())

    def _dw(
        self,
        wgrad: GemmPlan,
        a: Made,
        b: Made,
        outliers: Pending[Outliers] | None,
        into: Tensor | None,
    ) -> Tensor:
        """dW, with the estimator's factor and the products of X's outliers or mean where the recipe
        has them."""
        plan, saved = self.plan, self.saved
        estimates, mean = plan.estimates_w, saved.mean
        if wgrad.product.adds or (estimates is None and outliers is None and mean is None):
            dw = run_gemm(wgrad, a, b, self.site, into)
            return dw if mean is None else self._with_mean(wgrad, dw, mean)
        dw = run_gemm(wgrad, a, b, self.site)
        if estimates is not None:
            assert saved.weight is not None  # it is saved for the estimator
            # If no other term follows, the kernel of the factor adds dW to main_grad.
            adds = into is not None and into.dtype == dw.dtype and into.is_contiguous()
            adds = adds and outliers is None
            weight = saved.weight.to(plan.setting.dtype)
            added_to = into if adds else None
            dw = self._estimated(estimates, plan.fprop.b, dw, saved.w, weight, added_to)
        if outliers is not None:
            # Fprop multiplied the outliers by the unquantized W, so no estimator applies here.
            dw = self._with_outliers(wgrad, dw, outliers.wait())
        if mean is not None:  # nor to the mean
            dw = self._with_mean(wgrad, dw, mean)
        if dw is into:
            return dw
        return finish(dw, plan.setting.main_grad or plan.setting.weight_dtype, into)

    def _with_outliers(self, wgrad: GemmPlan, dw: Tensor, outliers: Outliers) -> Tensor:
        """dW, to which the product of dY and X's outliers is added. dw: float32 or wider."""
        splitting, compensation = self.plan.splitting, self.plan.compensation
        assert splitting is not None and compensation is not None
        dy, dense = Decoded(self._dy(wgrad).t()), Decoded(splitting.dense(outliers).t())
        if not isinstance(outliers, Columns):
            return compensation.multiply(dy, dense, 1.0, dw.dtype, dw)
        return dw.index_add_(1, outliers.channels, compensation.multiply(dy, dense, 1.0, dw.dtype))

    def _with_mean(self, wgrad: GemmPlan, dw: Tensor, mean: Tensor) -> Tensor:
        """dW, to which the product of X's mean is added in place: the sum of dY over the tokens of
        all ranks, times the mean. dw: float32 or wider."""
        summed = self._dy(wgrad).sum(0, dtype=dw.dtype)
        parallel = self.site.parallel
        is_part = self.plan.setting.has_part("dy") and wgrad.a.gathered != "before"
        if parallel is not None and is_part:
            summed = parallel.sum(summed).wait()
        return dw.addr_(summed, mean.to(dw.dtype))


def _kept_for(gemm: GemmPlan, codes: Operand, matrix: Tensor) -> Operand:
    """What b of dgrad or wgrad is made from, where W or X is saved as codes and as a matrix."""
    return matrix if gemm.b.source == "model" else codes
