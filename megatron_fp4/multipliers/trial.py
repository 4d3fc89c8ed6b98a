"""Compares a GEMM with float64 products on the GPU where it is to run.

For GEMMs that could not be tested on hardware while this package was developed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer

# Relative Frobenius errors that docs/numerics.md allows, by the dtype of the output.
_BOUND = {torch.bfloat16: 2e-3, torch.float32: 2e-4}
_BOUND_FP8 = {torch.bfloat16: 2e-3, torch.float32: 5e-4}  # where a method keeps operands in FP8

# The M, N, K that are compared for MXFP4: sizes that fill the tiles of scales and of GEMMs, sizes
# that leave tiles partly filled in both directions, and the smallest.
TRIED = ((256, 512, 1024), (200, 176, 416), (1, 16, 32))


def bound(output: torch.dtype, quantizer: Quantizer) -> float:
    """The relative Frobenius error that docs/numerics.md allows a product (Accumulation).

    quantizer: of both operands.
    """
    return (_BOUND if quantizer.format.packed else _BOUND_FP8)[output]


def trial(
    name: str,
    product: Callable[[QuantizedTensor, QuantizedTensor], Tensor],
    quantizer: Quantizer,
    shapes: Iterable[tuple[int, int, int]],
    device: torch.device,
) -> str | None:
    """Why `product` cannot be used, in one line; None if it can.

    The reason is that it raised, that its error exceeds the bound of its output's dtype, or that it
    lost or moved a NaN.

    name: how the line names it. product: gives A B^T of A [M, K] and B [N, K]. quantizer: of both
    operands. shapes: the M, N, K that are tried.
    """
    for shape in shapes:
        try:
            a, b = _operands(quantizer, device, *shape)
            expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
            made = product(a, b)
            found = made.double()
        except Exception as error:  # whatever an untried GEMM may raise
            said = str(error).strip().partition("\n")[0]
            return f"{name} raised {type(error).__name__}: {said}"
        if not torch.equal(found.isnan(), expected.isnan()):
            return f"{name} loses or misplaces a NaN, for M, N, K = {shape}"
        off = float((found - expected).nan_to_num().norm() / expected.nan_to_num().norm())
        if not off < bound(made.dtype, quantizer):
            return f"{name} errs by {off:.1e}, for M, N, K = {shape}"
    return None


def _operands(
    quantizer: Quantizer, device: torch.device, m: int, n: int, k: int
) -> list[QuantizedTensor]:
    """Random operands [m, k] and [n, k] whose blocks have different scales.

    Those of more than 16 rows have a block of zeros and a block with a NaN scale too.
    """
    generator = torch.Generator("cpu").manual_seed(m)  # leaves torch's default generator unchanged
    operands = []
    for rows in (m, n):
        x = torch.randn(rows, k // 32, 32, generator=generator, device="cpu")
        x *= 2.0 ** torch.randint(-6, 7, (rows, k // 32, 1), generator=generator, device="cpu")
        if rows > 16:
            x[3, 0] = 0.0
            x[7, -1] = torch.nan
        operands.append(quantize_matrix(x.view(rows, k).to(device), quantizer, axis=1))
    return operands
