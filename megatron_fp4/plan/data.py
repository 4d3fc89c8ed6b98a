"""LinearPlan: what one linear does, as data.

plan/compiler.py makes it; execution/forward.py and execution/backward.py execute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatron_fp4.makers.base import Maker, MatrixName, OperandPlan
from megatron_fp4.makers.estimator import Estimating
from megatron_fp4.makers.outliers import Splitting
from megatron_fp4.multipliers.base import Multiplier, Product
from megatron_fp4.operands import Compute
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import Setting


@dataclass(frozen=True, eq=False)
class Making:
    """Operands that one maker makes from one matrix, in one pass over it.

    matrix: the name of the matrix. passed_over: (name, reason) of each faster maker that
    cannot make them.
    computes_source: for sources "swiglu" and "normed", whether the maker computes the matrix as it
    reads what the model holds. compute: computes it first, where the maker does not; None for other
    sources.
    """

    matrix: MatrixName
    maker: Maker
    operands: tuple[OperandPlan, ...]
    passed_over: tuple[tuple[str, str], ...]
    compute: Compute | None = None
    computes_source: bool = False


@dataclass(frozen=True, eq=False)
class GemmPlan:
    """One GEMM, A B^T.

    a, b: its operands.
    product: the formats of the operands and of the output.
    multiplier: what runs it. passed_over: (name, reason) of each faster one that cannot.
    holds_b: whether b, as W's operand, is held for the other calls of the step.
    holds_form: whether its decoded form, which the multiplier reads, is held too.
    """

    name: str
    a: OperandPlan
    b: OperandPlan
    product: Product
    multiplier: Multiplier
    passed_over: tuple[tuple[str, str], ...]
    holds_b: bool
    holds_form: bool


@dataclass(frozen=True, eq=False)
class LinearPlan:
    """What one linear does, forward and backward.

    fprop, dgrad, wgrad: the GEMMs; None where the setting does not ask for that gradient.
    forward, backward: what is made at the start of the forward and of the backward pass.
    late: what is made after dgrad's product, because it depends on the gathered X.
    saves_x: what is saved of X for backward: fprop's operand ("operand"), wgrad's operand
        ("packed"), the matrix from which wgrad's operand is made, X itself or that whose SwiGLU it
        is ("model"), or nothing ("").
    saves_w: what is saved of W: fprop's operand ("operand"), or W itself ("model"). Where the
        backward pass reads that operand and it is not saved, `backward` begins with it.
    splitting: splits outliers off X as recipe.outliers says; None where the recipe splits none off.
    compute_x: computes X as a matrix, if X is the result of a SwiGLU or of a norm and more than
        fprop's maker reads it: outliers or the mean are taken out of it, or it is saved. Else None.
    compensation: the multiplier that adds outliers times W^T to Y; None where the recipe does not
        compensate. residual_in_dw: whether it also adds dY^T times the outliers to dW.
    mean_in_y: the multiplier that adds the mean of X times W^T to Y; None where fprop multiplies X
        with its mean. mean_in_dw: whether the mean is added to dW, because wgrad multiplies X
        without it.
    shows_packed_x: whether the forward pass reports wgrad's packed X to `Site.observe`, because
        fprop does not quantize X and reports none.
    estimates_w, estimates_x: apply the recipe's estimators to dW and to dX; None where it has none,
        or that gradient is not asked for. estimates_x reads X, which is saved beside fprop's
        operand; estimates_w reads W and fprop's operand.
    """

    recipe: Recipe
    setting: Setting
    fprop: GemmPlan
    dgrad: GemmPlan | None
    wgrad: GemmPlan | None
    forward: tuple[Making, ...]
    backward: tuple[Making, ...]
    late: tuple[Making, ...]
    saves_x: Literal["operand", "packed", "model", ""]
    saves_w: Literal["operand", "model"]
    splitting: Splitting | None
    compute_x: Compute | None
    compensation: Multiplier | None
    residual_in_dw: bool
    mean_in_y: Multiplier | None
    mean_in_dw: bool
    shows_packed_x: bool
    estimates_w: Estimating | None
    estimates_x: Estimating | None

    @cached_property
    def remade(self) -> Making | None:
        """What makes fprop's operand of W again in the backward pass; None where nothing does."""
        first = self.backward[0] if self.backward else None
        return first if first is not None and first.operands[0].gemm == "fprop" else None

    @cached_property
    def makes_x_at_start(self) -> bool:
        """Whether wgrad's operand of X is made at the start of the backward pass."""
        return self.wgrad is not None and any(self.wgrad.b in m.operands for m in self.backward)

    @cached_property
    def subtracts_mean(self) -> bool:
        """Whether the forward pass subtracts the mean of X."""
        return self.mean_in_y is not None or self.mean_in_dw

    @property
    def gemms(self) -> tuple[GemmPlan, ...]:
        """The GEMMs that run, in the order fprop, dgrad, wgrad."""
        return tuple(gemm for gemm in (self.fprop, self.dgrad, self.wgrad) if gemm is not None)

    @property
    def makings(self) -> tuple[Making, ...]:
        """All makings, of the forward and the backward pass."""
        return self.forward + self.backward + self.late
