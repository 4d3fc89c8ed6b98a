"""What a backend is: it prepares an operand and multiplies two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fp4.philox import Noise
from megatron_fp4.quantizer import QuantizedTensor, Quantizer, ReduceMax
from megatron_fp4.recipe import GemmRecipe

# A prepared operand: [rows, K] with the contracted axis last, quantized or in high precision.
Operand = QuantizedTensor | Tensor


@dataclass(frozen=True)
class Preparation:
    """What one operand goes through, in this order: fold, Hadamard, quantizer.

    label: "<module>:<gemm>:<operand>", which also names the operand's noise stream.
    axis: the contracted axis of the matrix as the model holds it.
    fold: float32 [K], multiplies along the contracted axis: the other operand's vector-wise scale.
    group, signs: the Hadamard transform; group 0 is none.
    noise: for a stochastic quantizer.
    reduce_row, reduce_tensor: see `quantize_matrix`.
    """

    label: str
    quantizer: Quantizer | None
    axis: int
    fold: Tensor | None = None
    group: int = 0
    signs: Tensor | None = None
    noise: Noise | None = None
    reduce_row: ReduceMax | None = None
    reduce_tensor: ReduceMax | None = None


class Backend(Protocol):
    """One way to run a GEMM. Codes and scales are the reference's bit for bit."""

    name: str

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this GEMM cannot run here, in a few words; None where it can."""
        ...

    def prepare(self, x: Tensor, preparation: Preparation) -> Operand:
        """The operand of a GEMM from a matrix [rows, columns] as the model holds it."""
        ...

    def multiply(self, a: Operand, b: Operand, correction: float, out_dtype: torch.dtype) -> Tensor:
        """a b^T, accumulated in float32, times `correction`, rounded once to `out_dtype`."""
        ...
