"""LinearPlan: what one linear does, as data. `compiler.py` makes it; forward.py and backward.py
execute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.arithmetic.quantizer import QuantizedTensor, Quantizer
from megatron_fp4.recipe import Recipe

if TYPE_CHECKING:
    from megatron_fp4.makers.base import Maker
    from megatron_fp4.multipliers.base import Multiplier, Product
    from megatron_fp4.plan.setting import Setting

# What an operand is made of.
#   model     X, W or dY as the model holds it
#   clamped   X without its outliers
#   codes     what fprop multiplied, read as codes and scales
#   decoded   what fprop multiplied, decoded to `OperandPlan.dtype`, transformed back if fprop
#             transformed it
#   values    the same without the scale of a whole row or tensor, which is folded into dY
#   elements  fprop's codes without any scale: the scale of a whole row is folded into dY
Source = Literal["model", "clamped", "codes", "decoded", "values", "elements"]


@dataclass(frozen=True, eq=False)
class OperandPlan:
    """What one operand of a GEMM goes through, in the order of the fields.

    gemm, letter: which operand it is: "fprop", "dgrad" or "wgrad"; "x", "w" or "dy".
    source: what it is made of. dtype: of the matrix that the source gives. codes: the quantizer of
        the source where it is given as codes and scales, else None.
    shape: rows and columns of that matrix as the model holds it, or divisors of them (see
        `Setting.tokens`). axis: the contracted one.
    is_part: the matrix has this rank's part of the tokens alone.
    gathered: whether the tokens of all ranks are gathered, "before" it is made (the matrix travels)
        or "after" (codes and scales travel); "" where nothing is gathered.
    folds: multiplied along the contracted axis by the row scales of the other operand of the GEMM.
    hadamard: the transform. quantizer: None leaves the operand in high precision.
    agrees: ranks share a scale, and take the maximum of their absolute maxima first.
    carrier: the FP8 dtype in which the maker writes the elements too.
    """

    gemm: str
    letter: str
    source: Source
    dtype: torch.dtype
    codes: Quantizer | None
    shape: tuple[int, int]
    axis: int
    is_part: bool
    gathered: Literal["", "before", "after"]
    folds: bool
    hadamard: Hadamard | None
    quantizer: Quantizer | None
    agrees: bool
    carrier: torch.dtype | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the operand is a QuantizedTensor."""
        return self.quantizer is not None or self.codes is not None

    @property
    def group(self) -> int:
        """The size of the Hadamard transform; 0 is none."""
        return 0 if self.hadamard is None else self.hadamard.group


@dataclass(frozen=True, eq=False)
class Making:
    """Operands that one maker makes of one matrix, in one pass over it.

    matrix: which one, as (letter, source). passed_over: (maker, reason) of each faster maker that
    cannot make them.
    """

    matrix: tuple[str, Source]
    maker: Maker
    operands: tuple[OperandPlan, ...]
    passed_over: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class GemmPlan:
    """One GEMM, A B^T.

    a, b: its operands. product: their formats and the output's. multiplier: who runs it.
    passed_over: (multiplier, reason) of each faster one that cannot.
    holds_b: b is W's operand and is held for the other calls of the step; holds_form: in the form
    in which it is multiplied too.
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

    dgrad, wgrad: None where the setting does not ask for that gradient.
    forward, backward: what is made at the start of each pass. late: what is made after dgrad's
        product, because it has to wait for X to be gathered.
    saves_x: what backward is given of X: fprop's operand ("operand"), wgrad's operand ("packed"),
        X ("model"), or nothing. saves_w: fprop's operand, or W.
    split: takes the outliers off X as recipe.outliers says; None where the recipe clamps nothing.
    compensation: adds the product of the outliers and W to Y and, with `residual_in_dw`, that of
        dY and the outliers to dW; None where the recipe does not compensate.
    shows_packed_x: the packed X is shown to the observer in forward, where nothing else shows X.
    estimate: multiplies dW by the factor of recipe.estimator; None where the recipe has none.
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
    split: Callable[[Tensor], tuple[Tensor, Residual]] | None
    compensation: Multiplier | None
    residual_in_dw: bool
    shows_packed_x: bool
    estimate: Callable[[Tensor, QuantizedTensor, Tensor], Tensor] | None

    @property
    def gemms(self) -> tuple[GemmPlan, ...]:
        """The GEMMs that run."""
        return tuple(gemm for gemm in (self.fprop, self.dgrad, self.wgrad) if gemm is not None)

    @property
    def makings(self) -> tuple[Making, ...]:
        """All that is made, forward and backward."""
        return self.forward + self.backward + self.late
