"""What a backend is: it prepares an operand and multiplies two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fp4.estimators import DGE
from megatron_fp4.outliers import OutlierClamp, Residual
from megatron_fp4.philox import Noise, Signs
from megatron_fp4.quantizer import QuantizedTensor, Quantizer
from megatron_fp4.recipe import GemmRecipe

ROCM = "torch is built for ROCm, and megatron-fp4's kernels for NVIDIA's GPUs alone"


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) of a CPU, and of an AMD GPU, which ROCm calls
    "cuda" too and numbers in another way."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@dataclass(frozen=True)
class Decoded:
    """A quantized operand as a backend multiplies it: values [rows, K], and what is left to
    multiply the product's rows with ([rows, 1], [1, 1] or None). tally: int32
    [2], how many elements were rounded and how many blocks are NaN, where that was counted."""

    values: Tensor
    outer: Tensor | None
    tally: Tensor | None = None


# A prepared operand: [rows, K] with the contracted axis last, quantized or in high precision.
Operand = QuantizedTensor | Decoded | Tensor


@dataclass(frozen=True)
class Preparation:
    """What one operand goes through, in this order: fold, Hadamard, quantizer.

    label: "<module>:<gemm>:<operand>", which also names the operand's noise stream.
    axis: the contracted axis of the matrix as the model holds it.
    fold: float32 [K], multiplies along the contracted axis: the other operand's vector-wise scale.
    group, signs: the Hadamard transform; group 0 is none.
    noise: for a stochastic quantizer.
    average: for a quantizer that rounds towards it: of the matrix, in its layout.
    widest: see `quantize_matrix`; what `absolute_max` gives, the largest of all ranks' that share
        a scale.
    carrier: the backend's own, for an operand that it multiplies as it makes it: it may write both.
    """

    label: str
    quantizer: Quantizer | None
    axis: int
    fold: Tensor | None = None
    group: int = 0
    signs: Signs | None = None
    noise: Noise | None = None
    average: Tensor | None = None
    widest: Tensor | None = None
    carrier: torch.dtype | None = None

    def sign_vector(self, device: torch.device) -> Tensor | None:
        """float32 [group]; None where the transform has no signs."""
        return None if self.signs is None else self.signs.vector(self.group, device)


def finish(product: Tensor, out_dtype: torch.dtype, into: Tensor | None) -> Tensor:
    """A wide product as `multiply` returns it: rounded once, or added to `into`."""
    return product.to(out_dtype) if into is None else into.add_(product)


class Backend(Protocol):
    """One way to run a GEMM. Codes and scales are the reference's bit for bit."""

    name: str

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this GEMM cannot run here, in a few words; None where it can."""
        ...

    def absolute_max(self, x: Tensor | QuantizedTensor, preparation: Preparation) -> Tensor:
        """The maxima that ranks share before they prepare the parts of an operand."""
        ...

    def split(self, x: Tensor, outliers: OutlierClamp) -> tuple[Tensor, Residual]:
        """`outliers.split(x)` for X [tokens, features]; the residual's slots in any order."""
        ...

    def carrier(self, gradient: bool) -> torch.dtype | None:
        """The FP8 elements that carry MXFP4 operands, if any do. gradient: of one, not X or W."""
        ...

    def prepare(self, x: Tensor | QuantizedTensor, *preparations: Preparation) -> list[Operand]:
        """Operands of GEMMs from one matrix [rows, columns] as the model holds it; if that is
        quantized, from what it decodes to, which must be exact in BF16. Without a quantizer a
        quantized one has one scale, and stays quantized."""
        ...

    def decode(
        self, operands: Sequence[Operand], dtype: torch.dtype, gradient: bool = False
    ) -> list[Operand]:
        """The forms in which `multiply` takes operands of one GEMM of a model that computes in
        `dtype`: all at once, or each by itself. gradient: the first is one, and not X or W."""
        ...

    def decoded_bytes(self, dtype: torch.dtype) -> int:
        """What an element takes in that form."""
        ...

    def multiply(
        self,
        a: Operand,
        b: Operand,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        """a b^T, accumulated in float32, times `correction`: rounded once to `out_dtype`, or added
        to `into`, which is returned."""
        ...

    def estimate(self, dw: Tensor, estimator: DGE, w: QuantizedTensor, weight: Tensor) -> Tensor:
        """dw, in place, times the estimator's factor of the weight that `w` was made of."""
        ...
