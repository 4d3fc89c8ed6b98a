"""torch's scaled_mm as a backend, without the GPU that it needs: a stand-in decodes what it is
given and multiplies in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_fp4 import get_quantizer
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.kernels.scaled_mm import swizzle
from megatron_fp4.multipliers import blackwell, choose, sm100
from megatron_fp4.multipliers.sm100 import Sm100, problem_on
from megatron_fp4.multipliers.trial import TRIED
from megatron_fp4.target import Target, target_of
from testing.builders.products import asked
from testing.oracles import normal, relative_error

CPU, GPU = torch.device("cpu"), torch.device("cuda")
Gemm = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    problem_on.cache_clear()
    yield
    problem_on.cache_clear()


def decoded(codes: Tensor, scales: Tensor, low_nibble_first: bool = True) -> Tensor:
    """float64 [rows, K] of packed codes and swizzled scales, by ml_dtypes and cuBLAS's formula."""
    rows, k = codes.shape[0], 2 * codes.shape[1]
    packed = codes.view(torch.uint8)
    pair = (packed & 15, packed >> 4) if low_nibble_first else (packed >> 4, packed & 15)
    nibbles = torch.stack(pair, -1).numpy().reshape(rows, k)
    elements = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    row, block = np.indices((rows, k // 32))
    tile = row // 128 * -(-k // 128) + block // 4
    at = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    table = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return torch.from_numpy(elements * table[at].repeat(32, 1))


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: Any,
    scale_b: Tensor,
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    **others: Any,
) -> Tensor:
    """What torch's GEMM demands of MXFP4 operands, and its product."""
    assert not others and bias is None and output_dtype == torch.bfloat16
    assert scale_recipe_a == scale_recipe_b == nn.functional.ScalingType.BlockWise1x32
    assert swizzle_a == swizzle_b == nn.functional.SwizzleType.SWIZZLE_32_4_4
    for codes, scales in ((mat_a, scale_a), (mat_b.t(), scale_b)):
        assert codes.dtype == torch.float4_e2m1fn_x2 and codes.stride() == (codes.shape[1], 1)
        tiles = -(-codes.shape[0] // 128) * -(-codes.shape[1] // 64)
        assert scales.dtype == torch.float8_e8m0fnu and scales.is_contiguous()
        assert scales.numel() == 512 * tiles
    assert mat_b.shape[1] % 16 == 0
    return (decoded(mat_a, scale_a) @ decoded(mat_b.t(), scale_b).t()).bfloat16()


def quantized(rows: int, k: int, seed: int) -> QuantizedTensor:
    x = normal((rows, k), seed) * normal((rows, 1), seed + 9).exp()
    return quantize_matrix(x, get_quantizer("mxfp4-ceil"), axis=1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each product that torch made."""
    made: list[str] = []

    def torchs(*args: Any, **kwargs: Any) -> Tensor:
        made.append("torch")
        return scaled_mm(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_mm", torchs)
    return made


@pytest.mark.parametrize("shape", TRIED, ids=str)
def test_bf16_products_are_torchs(shape: tuple[int, int, int], products: list[str]) -> None:
    m, n, k = shape
    a, b = quantized(m, k, 1), quantized(n, k, 2)
    found = Sm100().multiply(a, b, 1.0, torch.bfloat16)
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    assert products == ["torch"] and found.dtype == torch.bfloat16
    assert relative_error(found, expected) < 2e-3
    assert relative_error(found, expected.roll(1, 0)) > 0.5 or m == 1  # the control


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "sm100"),
        ({"correction": 16 / 9}, "blackwell"),
        ({"out_dtype": torch.float32}, "blackwell"),
        ({"out_dtype": torch.float32, "adds": True}, "blackwell"),
        ({"shape": (48, 24, 64)}, "blackwell"),
        ({"shape": (0, 64, 64)}, "bf16"),
    ],
    ids=["plain", "correction", "float32", "main_grad", "unaligned", "empty"],
)
def test_what_torch_cannot_is_tritons(fields: dict[str, Any], name: str) -> None:
    choice = choose(asked(**fields), Target("cuda", (10, 0)))
    assert choice.multiplier.name == name
    assert (name == "sm100") == ("sm100" not in dict(choice.passed_over))


# --- the check at the start -----------------------------------------------------------------------


def no_swizzle(*args: Any, **kwargs: Any) -> Tensor:
    """Reads scales as they lie in memory."""
    operands = list(args)
    for codes, scales in ((args[0], 2), (args[1].t(), 4)):
        rows, blocks = codes.shape[0], codes.shape[1] // 16
        plain = args[scales].view(torch.uint8)[: rows * blocks].view(rows, blocks)
        operands[scales] = swizzle(plain).view(torch.float8_e8m0fnu)
    return scaled_mm(*operands, **kwargs)


def other_nibble_first(a: Tensor, b: Tensor, sa: Tensor, _: Any, sb: Tensor, *rest: Any, **kw: Any):
    return (decoded(a, sa) @ decoded(b.t(), sb, low_nibble_first=False).t()).bfloat16()


def without_nan(*args: Any, **kwargs: Any) -> Tensor:
    return scaled_mm(*args, **kwargs).nan_to_num()


def raises(*args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError("MXFP4 scaling only supported in CUDA for B200/B300\nand a stack")


def test_a_right_product_passes(products: list[str]) -> None:
    state = torch.get_rng_state()
    assert problem_on(CPU) is None and problem_on(CPU) is None
    assert products == ["torch"] * len(TRIED)  # once a process and device
    assert torch.equal(torch.get_rng_state(), state)  # which training draws from


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (no_swizzle, "loses or misplaces a NaN"),
        (other_nibble_first, "scaled_mm errs by"),
        (without_nan, "loses or misplaces a NaN"),
        (raises, "raised NotImplementedError: MXFP4 scaling only supported in CUDA for B200/B300"),
    ],
)
def test_a_wrong_product_is_passed_over_and_named(
    gemm: Gemm, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.functional, "scaled_mm", gemm)
    found = problem_on(CPU)
    assert found is not None and reason in found and "\n" not in found


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.functional, "scaled_mm")
    assert "raised AttributeError" in str(problem_on(CPU))


@pytest.mark.parametrize(
    ("capability", "gemm", "name"),
    [
        ((10, 0), scaled_mm, "sm100"),
        ((10, 3), scaled_mm, "sm100"),
        ((10, 0), raises, "blackwell"),
        ((12, 0), scaled_mm, "blackwell"),
        ((9, 0), scaled_mm, "hopper"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_who_is_chosen(
    capability: tuple[int, int], gemm: Gemm, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(nn.functional, "scaled_mm", gemm)
    monkeypatch.setattr(sm100, "problem_on", lambda device: problem_on(CPU))
    monkeypatch.setattr(blackwell, "problem_on", lambda device: None)
    monkeypatch.setattr("megatron_fp4.multipliers.hopper._rows_can_be_scaled", lambda: True)
    choice = choose(asked(), target_of(GPU))
    assert choice.multiplier.name == name
    if capability == (10, 0) and name == "blackwell":
        assert "raised NotImplementedError" in dict(choice.passed_over)["sm100"]
