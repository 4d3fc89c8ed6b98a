"""torch's own block-scaled GEMM: right on compute capability 10.x, and named where it is not."""

import pytest
import torch

from megatron_fp4 import get_quantizer
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.multipliers import choose
from megatron_fp4.multipliers.blackwell import Blackwell
from megatron_fp4.multipliers.sm100 import Sm100, problem_on
from megatron_fp4.target import target_of
from testing.builders.products import asked
from testing.oracles import normal, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
HAS_IT = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
DEVICE = torch.device("cuda", 0)


@pytest.mark.skipif(HAS_IT, reason="torch multiplies MXFP4 here")
def test_elsewhere_the_check_gives_torchs_reason_and_harms_nothing() -> None:
    reason = problem_on(DEVICE)
    assert reason is not None and "raised" in reason and "\n" not in reason
    torch.cuda.synchronize()
    chosen = choose(asked(), target_of(DEVICE))
    assert chosen.multiplier.name != "sm100" and "sm100" in dict(chosen.passed_over)


@pytest.mark.skipif(not HAS_IT, reason="needs compute capability 10.x")
@pytest.mark.parametrize("shape", [(8192, 4096, 4096), (8192, 14336, 4096), (200, 176, 416)])
def test_products(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    assert problem_on(DEVICE) is None
    a, b = (
        quantize_matrix(normal((rows, k), seed).to(DEVICE), get_quantizer("mxfp4-ceil"), axis=1)
        for seed, rows in enumerate((m, n))
    )
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    found = Sm100().multiply(a, b, 1.0, torch.bfloat16)
    assert relative_error(found, expected) < 2e-3
    assert relative_error(Blackwell().multiply(a, b, 1.0, torch.bfloat16), expected) < 2e-3
    b.scales.copy_(b.scales.roll(1, 0))
    assert relative_error(Sm100().multiply(a, b, 1.0, torch.bfloat16), expected) > 0.1  # control
