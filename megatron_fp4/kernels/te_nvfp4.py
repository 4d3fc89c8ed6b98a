"""Products of NVFP4 operands by Transformer Engine's GEMM, which is cuBLASLt's.

It takes E2M1 codes and E4M3 block scales of 16 as they are, and the tensor scale as the magnitude
that Transformer Engine would have made it of: amax / (6 * 448).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from megatron_fp4.arithmetic.quantizer import QuantizedTensor

LARGEST = 6.0 * 448.0  # of codes and block scales: what a tensor scale of 1 can hold


def product(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    *,
    correction: float = 1.0,
    into: Tensor | None = None,
) -> Tensor:
    """a b^T times `correction`, in `out_dtype` or added to `into`. a, b: [rows, K] in blocks of 16
    along K."""
    out, *_ = general_gemm(
        _operand(b),  # its matrices are columns first
        _operand(a, correction),
        out_dtype=out_dtype if into is None else into.dtype,
        layout="TN",
        out=into,
        accumulate=into is not None,
    )
    return out


def _operand(q: QuantizedTensor, factor: float = 1.0) -> NVFP4TensorStorage:
    rows, blocks = q.scales.shape
    # Its swizzle kernel reads whole tiles of 128 rows and 4 blocks.
    scales = nn.functional.pad(q.scales, (0, -blocks % 4, 0, -rows % 128))
    scale = torch.ones((), device=q.device) if q.tensor_scale is None else q.tensor_scale
    return NVFP4TensorStorage(
        rowwise_data=q.codes,
        rowwise_scale_inv=scales.contiguous(),
        columnwise_data=None,
        columnwise_scale_inv=None,
        amax_rowwise=(scale.float() * (LARGEST * factor)).view(1),
        amax_columnwise=None,
        fp4_dtype=DType.kFloat4E2M1,
        quantizer=None,
        with_gemm_swizzled_scales=False,
        fake_dtype=torch.bfloat16,
    )
