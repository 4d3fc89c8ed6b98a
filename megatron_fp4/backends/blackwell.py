"""FP4 tensor cores (compute capability 10.x and 12.x): MXFP4 codes and scales as they are.

The products are Triton's, which take a scale for each block of 32 and add to a float32 main_grad.
What they compile to is tested for every commit; no Blackwell GPU has run them yet.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from megatron_fp4.backends import fused
from megatron_fp4.backends.base import Operand, capability, finish
from megatron_fp4.backends.bf16 import Bf16
from megatron_fp4.quantizer import QuantizedTensor
from megatron_fp4.recipe import GemmRecipe


class Blackwell(Bf16):
    """Quantizes as the other backends do; the tensor cores decode."""

    name = "blackwell"

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        if capability(device)[0] not in (10, 12):
            return "FP4 tensor cores need a GPU of compute capability 10.x or 12.x"
        if (reason := super().unavailable(gemm, device, dtype) or fused.problem()) is not None:
            return reason
        if gemm.a is None or gemm.b is None:
            return "an operand is in high precision"
        if not (gemm.a.mxfp4 and gemm.b.mxfp4):
            return "an operand is not MXFP4 in blocks of 32"
        return None

    def _decoded(self, operand: Operand, dtype: torch.dtype) -> Operand:
        return operand if is_native(operand) else super()._decoded(operand, dtype)

    def decoded_bytes(self, dtype: torch.dtype) -> int:
        return 0  # codes and scales, which are kept anyway

    def multiply(
        self,
        a: Operand,
        b: Operand,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        if not (is_native(a) and is_native(b)) or not a.codes.numel() * b.codes.numel():
            return super().multiply(a, b, correction, out_dtype, into)
        from megatron_fp4.kernels.native import product  # imports Triton

        operands = (a.codes, a.scales), (b.codes, b.scales)
        if into is not None and into.dtype == torch.float32 and into.is_contiguous():
            return product(*operands, into, alpha=correction, accumulates=True)
        dtype = out_dtype if into is None and out_dtype == torch.bfloat16 else torch.float32
        out = a.codes.new_empty(len(a.codes), len(b.codes), dtype=dtype)
        return finish(product(*operands, out, alpha=correction), out_dtype, into)


def is_native(operand: Operand) -> TypeGuard[QuantizedTensor]:
    return isinstance(operand, QuantizedTensor) and operand.quantizer.mxfp4
