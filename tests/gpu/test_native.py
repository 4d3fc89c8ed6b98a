"""On a GPU without FP4 tensor cores Triton decodes first: the native GEMM's addresses, tails and
sums, against float64."""

import pytest
import torch

from megatron_fp4 import get_quantizer
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.multipliers.blackwell import Blackwell
from megatron_fp4.operands import Made
from testing.oracles import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def quantized(rows: int, columns: int, seed: int) -> QuantizedTensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    x *= torch.exp(
        torch.randn(rows, columns // 32, generator=generator, device="cuda")
    ).repeat_interleave(32, 1)
    return quantize_matrix(x.bfloat16(), get_quantizer("mxfp4-ceil"), axis=1)


@pytest.mark.parametrize("shape", [(256, 512, 1024), (16, 48, 32), (200, 1000, 4128)], ids=str)
def test_products(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, multiplier = quantized(m, k, 1), quantized(n, k, 2), Blackwell()
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    assert multiplier.decode([Made(a)], ["x"], torch.bfloat16)[0] is a
    assert relative_error(multiplier.multiply(a, b, 1.0, torch.bfloat16), expected) < 2e-3
    assert (
        relative_error(multiplier.multiply(a, b, 16 / 9, torch.float32), expected * 16 / 9) < 2e-4
    )
    into = torch.full((m, n), 3.0, device="cuda")
    assert multiplier.multiply(a, b, 1.0, torch.bfloat16, into) is into
    assert relative_error(into - 3.0, expected) < 2e-4
    # The control: another matrix's scales.
    a.scales.add_(1)
    assert relative_error(multiplier.multiply(a, b, 1.0, torch.float32), expected) > 0.5


def test_a_nan_block_shows() -> None:
    a, b = quantized(64, 64, 1), quantized(32, 64, 2)
    a.scales[5, 1] = 0xFF
    product = Blackwell().multiply(a, b, 1.0, torch.float32)
    assert product[5].isnan().all() and int(product.isnan().sum()) == 32
