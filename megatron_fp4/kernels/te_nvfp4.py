"""GEMMs of NVFP4 operands by Transformer Engine, which calls cuBLASLt.

E2M1 codes and the E4M3 scales of blocks of 16 are passed as they are. Transformer Engine takes the
tensor's largest magnitude, amax, and derives the tensor scale amax / (6 * 448) from it. So amax is
computed back from the tensor scale.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor

LARGEST = 6.0 * 448.0  # the largest code times the largest block scale


def product(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    *,
    correction: float = 1.0,
    into: Tensor | None = None,
) -> Tensor:
    """a b^T times `correction`, in `out_dtype`, or added to `into`.

    a, b: [M, K] and [N, K] in E2M1 with a scale for each block of 16 along K.
    into: [M, N], to which the product is added; its dtype replaces `out_dtype`. None returns a new
        tensor.
    """
    out, *_ = general_gemm(
        _operand(b),  # cuBLAS matrices are column-major, so b comes first
        _operand(a, correction),
        out_dtype=out_dtype if into is None else into.dtype,
        layout="TN",
        out=into,
        accumulate=into is not None,
    )
    return out


def _operand(q: QuantizedTensor, factor: float = 1.0) -> NVFP4TensorStorage:
    """q in Transformer Engine's class, its tensor scale multiplied by `factor`."""
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
