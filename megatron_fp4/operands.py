"""The types of a GEMM's operand on its way from its maker to its multiplier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.rms_norm import RmsNorm, factors, normed
from megatron_fp4.arithmetic.swiglu import swiglu, swiglu_gradient

# [rows, K] with the contracted axis last: quantized, or in high precision.
Operand = QuantizedTensor | Tensor


class _Computed:
    """What the matrices below have: the matrix is computed once, and kept."""

    __slots__ = ()
    _found: Tensor | None

    def by(self, compute: Compute) -> Tensor:
        """The matrix, which `compute` computes at the first call."""
        if self._found is None:
            self._found = compute(self)  # type: ignore[arg-type, misc]
        return self._found

    @property
    def result(self) -> Tensor:
        """The matrix, which has been computed (`by`)."""
        assert self._found is not None
        return self._found


@dataclass(slots=True)
class Swiglu(_Computed):
    """The matrix swiglu(y), [rows, n], which is computed where it is read (arithmetic/swiglu.py).

    y: [rows, 2 n].
    """

    y: Tensor
    _found: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.y.device

    @property
    def shape(self) -> torch.Size:
        rows, columns = self.y.shape
        return torch.Size((rows, columns // 2))

    def computed(self) -> Tensor:
        """The matrix, computed by PyTorch."""
        return swiglu(self.y)

    def lines(self, axis: int, lines: Tensor) -> Tensor:
        """Some lines along `axis` of the matrix, [k, K] with that axis last, computed by PyTorch.

        lines: int64 [k], their indices along the other axis.
        """
        if axis == 1:
            return swiglu(self.y[lines])
        return swiglu(_columns_of_halves(self.y, lines)).t()


@dataclass(slots=True)
class SwigluGradient(_Computed):
    """The gradient of a loss by y [rows, 2 n], the input of a SwiGLU; computed where it is read.

    gradient: of the loss by swiglu(y), [rows, n]. y: in the same dtype, or in E4M3.
    """

    gradient: Tensor
    y: Tensor
    _found: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.y.device

    @property
    def shape(self) -> torch.Size:
        return self.y.shape

    def computed(self) -> Tensor:
        """The gradient, computed by PyTorch."""
        return swiglu_gradient(self.gradient, self.y)

    def lines(self, axis: int, lines: Tensor) -> Tensor:
        """As `Swiglu.lines`."""
        if axis == 1:
            return swiglu_gradient(self.gradient[lines], self.y[lines])
        half = self.gradient.shape[1]
        within = lines % half
        both = swiglu_gradient(self.gradient[:, within], _columns_of_halves(self.y, within))
        left, right = both.chunk(2, -1)
        return torch.where(lines < half, left, right).t()


@dataclass(slots=True)
class Normed(_Computed):
    """The RMSNorm of x [rows, n], which is computed where it is read (arithmetic/rms_norm.py).

    factors: float32 [rows, 1], of x's rows; None: not computed yet.
    """

    x: Tensor
    norm: RmsNorm
    factors: Tensor | None = None
    _found: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def factors_by(self, compute: Callable[[Tensor, float], Tensor]) -> Tensor:
        """`factors`, which `compute` computes from x and eps at the first call."""
        if self.factors is None:
            self.factors = compute(self.x, self.norm.eps)
        return self.factors

    def computed(self) -> Tensor:
        """The matrix, computed by PyTorch."""
        return normed(self.x, self.factors_by(factors), self.norm.gain)

    def lines(self, axis: int, lines: Tensor) -> Tensor:
        """As `Swiglu.lines`."""
        by_row, gain = self.factors_by(factors), self.norm.gain
        if axis == 1:
            return normed(self.x[lines], by_row[lines], gain)
        return normed(self.x[:, lines], by_row, gain[lines]).t()


def _columns_of_halves(y: Tensor, columns: Tensor) -> Tensor:
    """[rows, 2 k]: k columns of the left half of y [rows, 2 n], then the same of the right half."""
    return torch.cat([y[:, columns], y[:, columns + y.shape[1] // 2]], 1)


# A matrix that is computed where it is read.
Computed = Swiglu | SwigluGradient | Normed
# What operands are made from: a matrix as the model holds it, codes, or a matrix to be computed.
Matrix = Operand | Computed
Compute = Callable[[Any], Tensor]  # of a Computed


class Activated(NamedTuple):
    """The SwiGLU of a linear's output y, for the next linear, which computes it.

    y: [..., 2 n]. result: stands for the SwiGLU in autograd, with its shape [..., n] and its
    gradient. It has uninitialized memory of one element, expanded by strides of 0.
    """

    y: Tensor
    result: Tensor


@dataclass(slots=True)  # a named tuple costs twice the host time
class Carriers:
    """An operand in FP8: elements, and a factor for each row. docs/numerics.md, Carriers, defines
    them.

    A kernel can write the elements beside the codes, with one guessed row exponent for all rows.
    They are multiplied after `kernels.carrier.carried` has corrected the rows for which the guess
    was wrong, and has written the factors.

    values: uint8 [rows, K], the bits of the FP8 elements. element: their FP8 dtype. counts: int32
    [4 + rows]: the tally, the guessed row exponent, 0, and the bits of the float32 row factors.
    addresses: of the codes, their scales, `values` and `counts`; see `kernels.launch.address`.
    """

    values: Tensor
    element: torch.dtype
    counts: Tensor
    addresses: tuple[Any, Any, Any, Any]

    @property
    def elements(self) -> Tensor:
        """The FP8 elements [rows, K]."""
        return self.values.view(self.element)

    @property
    def row_factors(self) -> Tensor:
        """The row factors, float32 [rows, 1], which multiply the product."""
        return self.counts[4:].view(torch.float32).view(-1, 1)

    @property
    def tally(self) -> Tensor:
        """As `Decoded.tally`."""
        return self.counts[:2]


@dataclass(slots=True)
class Made:
    """An operand as its maker returns it.

    operand: codes and scales, or a matrix in high precision. carriers: the same operand in FP8, if
    the maker wrote it beside the codes; else None. elements: the same, where scales are of whole
    rows or of the tensor, so that the elements are right without a correction.
    """

    operand: Operand
    carriers: Carriers | None = None
    elements: Decoded | None = None


class Decoded(NamedTuple):
    """An operand as plain values, with a factor for each row: it stands for values * row_factors.

    values: [rows, K], the contracted axis last. row_factors: float32 or float64 [rows, 1], [1, 1]
    or None; the multiplier applies them to the product. tally: int32 [2], how many elements the
    conversion to `values` rounded and how many blocks are NaN; None where nothing was counted.
    """

    values: Tensor
    row_factors: Tensor | None = None
    tally: Tensor | None = None


# What a multiplier reads: decoded values, FP8 carriers, or codes and scales where the tensor cores
# decode them.
Form = Decoded | Carriers | QuantizedTensor
