"""FP4 tensor cores of data centre GPUs (compute capability 10.x), by torch's own GEMM.

torch.nn.functional.scaled_mm multiplies where the output is BF16 and the product has no factor:
fprop without a bias, and dgrad without a prescale. float32 outputs, main_grad with them, are
Triton's, as on other Blackwell GPUs. No Blackwell GPU has run it yet, so it has to show itself
first: once a process and device its products are compared with float64, and where they differ, or
it raises, that is the reason why it is passed over.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megatron_fp4.backends.base import Operand, capability
from megatron_fp4.backends.blackwell import Blackwell, is_native
from megatron_fp4.backends.trial import trial
from megatron_fp4.quantizer import QuantizedTensor, get_quantizer
from megatron_fp4.recipe import GemmRecipe

ALIGNMENT = 16  # of b's rows, and of codes in memory
# M, N, K: whole tiles of scales; neither rows nor blocks fill one; the smallest.
TRIED = ((256, 512, 1024), (200, 176, 416), (1, 16, 32))


class Sm100(Blackwell):
    """Blackwell, with torch's products where torch has them."""

    name = "sm100"

    def unavailable(self, gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> str | None:
        if capability(device)[0] != 10:
            return "torch's MXFP4 products need a GPU of compute capability 10.x"
        return super().unavailable(gemm, device, dtype) or problem(device)

    def multiply(
        self,
        a: Operand,
        b: Operand,
        correction: float,
        out_dtype: torch.dtype,
        into: Tensor | None = None,
    ) -> Tensor:
        plain = correction == 1.0 and out_dtype == torch.bfloat16 and into is None
        if not (plain and is_native(a) and is_native(b) and _aligned(a, b)):
            return super().multiply(a, b, correction, out_dtype, into)
        from megatron_fp4.kernels.scaled_mm import product

        return product((a.codes, a.scales), (b.codes, b.scales))


def _aligned(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    if not a.codes.numel() or not b.codes.numel() or len(b.codes) % ALIGNMENT:
        return False
    return all(
        q.codes.is_contiguous() and q.codes.data_ptr() % ALIGNMENT == 0 and q.scales.dim() == 2
        for q in (a, b)
    )


@cache
def problem(device: torch.device) -> str | None:
    """Why torch's products are not used on `device`, in one line; None where they are right."""
    from megatron_fp4.kernels.scaled_mm import product

    def torchs(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
        return product((a.codes, a.scales), (b.codes, b.scales))

    return trial("torch's scaled_mm", torchs, get_quantizer("mxfp4-ceil"), TRIED, device)
