"""FP4 tensor cores (compute capability 10.x and 12.x): NVFP4 codes and scales as they are.

The products are those of Transformer Engine, where it is installed. Operands are quantized in plain
PyTorch. No Blackwell GPU has run it yet: it has to show itself first, as torch's products for MXFP4
(backends/sm100.py).
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

from megatron_fp4.backends.base import Operand, capability
from megatron_fp4.backends.bf16 import Bf16
from megatron_fp4.backends.trial import trial
from megatron_fp4.quantizer import NVFP4, QuantizedTensor, Quantizer
from megatron_fp4.recipe import GemmRecipe

TILE = 16, 32  # what rows and K are multiples of
TRIED = ((256, 512, 1024), (208, 176, 416), (16, 16, 32))  # M, N, K


class Nvfp4(Bf16):
    """Quantizes as the reference does; the tensor cores decode."""

    name = "nvfp4"

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        if capability(device)[0] not in (10, 12):
            return "NVFP4 products need a GPU of compute capability 10.x or 12.x"
        if (reason := super().unavailable(gemm, device, dtype)) is not None:
            return reason
        if gemm.a is None or gemm.b is None:
            return "an operand is in high precision"
        if not (_is_nvfp4(gemm.a) and _is_nvfp4(gemm.b)):
            return "an operand is not NVFP4 in blocks of 16"
        return problem(device)

    def _decoded(self, operand: Operand, dtype: torch.dtype) -> Operand:
        return operand if _is_native(operand) else super()._decoded(operand, dtype)

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
        dtype = out_dtype if into is None else into.dtype
        wide = dtype == torch.float32 or (dtype == torch.bfloat16 and into is None)
        if not (wide and _is_native(a) and _is_native(b)):
            return super().multiply(a, b, correction, out_dtype, into)
        if into is not None and not into.is_contiguous():
            return super().multiply(a, b, correction, out_dtype, into)
        from megatron_fp4.kernels.te_nvfp4 import product

        return product(a, b, out_dtype, correction=correction, into=into)


def _is_nvfp4(quantizer: Quantizer) -> bool:
    return (quantizer.element, quantizer.scale, quantizer.block) == ("e2m1", "e4m3", (1, 16))


def _is_native(operand: Operand) -> TypeGuard[QuantizedTensor]:
    if not (isinstance(operand, QuantizedTensor) and _is_nvfp4(operand.quantizer)):
        return False
    rows, k = operand.codes.shape[0], 2 * operand.codes.shape[-1]
    whole = rows % TILE[0] == k % TILE[1] == 0 and operand.codes.dim() == 2
    return whole and operand.codes.numel() > 0 and operand.codes.is_contiguous()


@cache
def problem(device: torch.device) -> str | None:
    """Why Transformer Engine's products are not used on `device`, in one line; None where they are
    right, in BF16 and added to float32."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed: pip install 'transformer-engine[pytorch]'"

    def rounded(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        from megatron_fp4.kernels.te_nvfp4 import product

        return product(a, b, torch.bfloat16)

    def added(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        from megatron_fp4.kernels.te_nvfp4 import product

        ones = torch.ones(len(a.codes), len(b.codes), device=device)
        return product(a, b, torch.float32, correction=2.0, into=ones).sub_(1.0).div_(2.0)

    for products in (rounded, added):
        reason = trial("Transformer Engine's GEMM", products, NVFP4, TRIED, device)
        if reason is not None:
            return reason
    return None
