"""Multipliers: who is chosen and why not the others, and products against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import Quantizer, quantize
from megatron_fp4.multipliers import MULTIPLIERS, choose
from megatron_fp4.multipliers.base import Multiplier
from megatron_fp4.multipliers.bf16 import Bf16
from megatron_fp4.multipliers.reference import Reference
from megatron_fp4.operands import Made
from megatron_fp4.target import Target, target_of
from testing.builders.products import asked
from testing.oracles import normal, relative_error

CPU = target_of(torch.device("cpu"))
BOUND = {torch.bfloat16: 2e-3, torch.float32: 2e-4, torch.float64: 1e-13}
FP8_TENSOR = Quantizer(element="e4m3", scale="fp32", block=(0, 0), rule="absmax")
FP8_ROW = Quantizer(element="e5m2", scale="fp32", block=(1, 0), rule="absmax")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float32, "reference"),
        (torch.float16, "reference"),
        (torch.float64, "reference"),
    ],
    ids=str,
)
def test_choice_on_a_cpu(dtype: torch.dtype, name: str) -> None:
    choice = choose(asked(dtype=dtype, out_dtype=dtype), CPU)
    assert choice.multiplier.name == name
    names = [multiplier.name for multiplier in MULTIPLIERS]
    assert [n for n, _ in choice.passed_over] == names[: names.index(name)]
    assert all(reason and "\n" not in reason for _, reason in choice.passed_over)


def test_a_faster_multiplier_may_be_excluded() -> None:
    """--fp4-multiplier bf16, and what BF16 cannot run is still the reference's."""
    hopper = Target("cuda", (9, 0))
    assert choose(asked(), hopper).multiplier.name == "hopper"
    choice = choose(asked(), hopper, "bf16")
    assert choice.multiplier.name == "bf16"
    assert dict(choice.passed_over)["hopper"] == "--fp4-multiplier bf16 excludes it"
    assert choose(asked(a=torch.float32), hopper, "bf16").multiplier.name == "reference"


def test_the_reason_names_the_remedy() -> None:
    reasons = dict(choose(asked(dtype=torch.float32), CPU).passed_over)
    assert "float32" in reasons["bf16"] and "--bf16" in reasons["bf16"]


def test_an_operand_in_float32_is_not_narrowed() -> None:
    """An unquantized Hadamard output, or dY with scales folded in."""
    choice = choose(asked(a=torch.float32), CPU)
    assert choice.multiplier.name == "reference"
    assert dict(choice.passed_over)["bf16"] == "an operand is in float32"


@pytest.mark.parametrize("multiplier", MULTIPLIERS, ids=lambda m: m.name)
def test_names_are_unique(multiplier: Multiplier) -> None:
    assert [m.name for m in MULTIPLIERS].count(multiplier.name) == 1


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [
        (Quantizer(block=(1, 64)), "takes blocks of 1 x 16 and 1 x 32, not of 1 x 64"),
        (Quantizer(scale="ue5m3", rule="nearest"), "ue5m3 scales of e2m1 are not powers of two"),
    ],
    ids=["block", "format"],
)
def test_hopper_tells_a_block_from_a_format(quantizer: Quantizer, reason: str) -> None:
    choice = choose(asked(quantizer, quantizer), Target("cuda", (9, 0)))
    assert choice.multiplier.name == "bf16" and reason in dict(choice.passed_over)["hopper"]
    short = Quantizer(block=(1, 16))  # the control
    assert choose(asked(short, Quantizer()), Target("cuda", (9, 0))).multiplier.name == "hopper"


ROWS = Quantizer(rule="mse", row_max=1.0)
WITHIN = Quantizer(scale="fp32", block=(1, 16), rule="absmax")


@pytest.mark.parametrize("target", [CPU, *(Target("cuda", (n, 0)) for n in (8, 9, 10, 12))])
def test_float32_scales_within_a_row_are_a_simulation(target: Target) -> None:
    """In float32, and each multiplier that could do with less says so."""
    for a, b in ((WITHIN, WITHIN), (Quantizer(), WITHIN), (WITHIN, torch.bfloat16)):
        choice = choose(asked(a, b), target)
        assert choice.multiplier.name == "reference"
        assert "exact in float32 alone" in dict(choice.passed_over)["bf16"]
    assert choose(asked(FP8_ROW, FP8_TENSOR), target).multiplier.name != "reference"  # the control


def test_hopper_multiplies_row_scales_beside_block_scales_and_blackwell_does_not() -> None:
    assert choose(asked(ROWS, ROWS), Target("cuda", (9, 0))).multiplier.name == "hopper"
    choice = choose(asked(ROWS, ROWS), Target("cuda", (10, 0)))
    assert choice.multiplier.name == "bf16"
    assert "a scale for each row beside" in dict(choice.passed_over)["blackwell"]
    plain = Quantizer(rule="mse")  # the control
    assert choose(asked(plain, plain), Target("cuda", (10, 0))).multiplier.name == "sm100"


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)], ids=str)
def test_blackwell_tells_that_no_instruction_takes_ue5m3_scales(capability: tuple) -> None:
    quantizer = Quantizer(scale="ue5m3", block=(1, 16), rule="nearest")
    e4m3 = Quantizer(scale="e4m3", block=(1, 16), rule="nearest", tensor_max=448.0)
    for a, b in ((quantizer, quantizer), (e4m3, quantizer)):
        choice = choose(asked(a, b), Target("cuda", capability))
        reasons = dict(choice.passed_over)
        assert choice.multiplier.name == "bf16"
        assert reasons["blackwell"] == reasons["nvfp4"]
        assert reasons["nvfp4"] == "FP4 tensor cores have no instruction for UE5M3 scales"
    assert choose(asked(e4m3, e4m3), Target("cuda", capability)).multiplier.name == "nvfp4"


E1M2 = {
    "e8m0": Quantizer(element="e1m2"),
    "e4m3": Quantizer(element="e1m2", scale="e4m3", block=(1, 16), rule="nearest"),
    "row": Quantizer(element="e1m2", scale="fp32", block=(1, 0), rule="absmax"),
}


@pytest.mark.parametrize("scale", E1M2)
@pytest.mark.parametrize("target", [CPU, *(Target("cuda", (n, 0)) for n in (8, 9, 10, 12))])
def test_no_tensor_core_takes_a_uniform_grid(target: Target, scale: str) -> None:
    """Alone or beside E2M1 it is multiplied in BF16, and those that could do E2M1 say why not."""
    uniform, plain = E1M2[scale], replace(E1M2[scale], element="e2m1")
    for a, b in ((uniform, uniform), (plain, uniform), (uniform, plain)):
        choice = choose(asked(a, b), target)
        reasons = dict(choice.passed_over)
        assert choice.multiplier.name == "bf16"
        if target.capability == (9, 0):
            assert reasons["hopper"] == "no kernel converts E1M2 elements to FP8" or scale == "e4m3"
        if target.capability >= (10, 0):
            for name in ("blackwell", "nvfp4"):
                assert "no instruction for E1M2 elements" in reasons[name]
    fast = {"e8m0": (9, 10, 12), "row": (9,), "e4m3": (10, 12)}[scale]  # the control
    alone = choose(asked(plain, plain), target).multiplier.name
    assert (alone != "bf16") == (target.kind == "cuda" and target.capability[0] in fast)


@pytest.mark.parametrize("shape", [(24, 256, 256), (256, 24, 256), (256, 256, 24), (0, 256, 256)])
def test_hopper_leaves_odd_sides_to_bf16(shape: tuple[int, int, int]) -> None:
    choice = choose(asked(shape=shape), Target("cuda", (9, 0)))
    assert choice.multiplier.name == "bf16"
    assert "no multiple of 16" in dict(choice.passed_over)["hopper"]
    assert choose(asked(), Target("cuda", (9, 0))).multiplier.name == "hopper"  # the control


# --- products -------------------------------------------------------------------------------------

M, N, K = 48, 32, 192
PAIRS: dict[str, tuple[Any, Any]] = {
    "mx": ("mxfp4", "mxfp4-ceil"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "vector": ("vector", "vector"),
    "vector-and-mx": ("vector", "mxfp4"),
    "fp8-tensor": (FP8_TENSOR, FP8_TENSOR),
    "e5m2-row-and-high-precision": (FP8_ROW, None),
    "high-precision-and-nvfp4": (None, "nvfp4"),
    "high-precision": (None, None),
    "row-scales": (ROWS, "mxfp4"),
    "row-scales-of-e4m3": (
        Quantizer(scale="e4m3", block=(1, 16), rule="nearest", row_max=448.0),
        ROWS,
    ),
    "square-blocks": (Quantizer(block=(16, 16)), "mxfp4"),
    "uniform": (E1M2["e8m0"], E1M2["e4m3"]),
    "uniform-rows": (E1M2["row"], "vector"),
    "mx-scale-of-a-row": (Quantizer(block=(1, 0)), "mxfp4"),
    "nvfp4-scale-of-a-row": (
        Quantizer(scale="e4m3", block=(1, 0), rule="nearest", tensor_max=448.0),
        "mxfp4",
    ),
}


def operand(rows: int, quantizer: Any, seed: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """(operand, its value in float64)."""
    x = (normal((rows, K), seed) * normal((rows, 1), seed + 9).exp()).to(dtype)
    if quantizer is None:
        return x, x.double()
    q = quantize(x, quantizer)
    return q, q.dequantize(torch.float64)


@pytest.mark.parametrize("correction", [1.0, 16 / 9], ids=["plain", "16/9"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("multiplier", [Reference(), Bf16()], ids=lambda m: m.name)
def test_products(multiplier: Multiplier, pair: str, out: torch.dtype, correction: float) -> None:
    if pair == "high-precision" and correction != 1.0:
        pytest.skip("a correction undoes the prescale of a quantizer")
    first, second = PAIRS[pair]
    a, a_value = operand(M, first, 1, torch.bfloat16)
    b, b_value = operand(N, second, 2, torch.bfloat16)
    a, b = multiplier.decode([Made(a), Made(b)], "xw", torch.bfloat16)
    product = multiplier.multiply(a, b, correction, out)
    assert product.dtype == out and product.shape == (M, N)
    assert relative_error(product, correction * a_value @ b_value.t()) < BOUND[out]


@pytest.mark.parametrize("pair", PAIRS)
def test_float64_products(pair: str) -> None:
    first, second = PAIRS[pair]
    a, a_value = operand(M, first, 1, torch.float64)
    b, b_value = operand(N, second, 2, torch.float64)
    a, b = Reference().decode([Made(a), Made(b)], "xw", torch.float64)
    product = Reference().multiply(a, b, 1.0, torch.float64)
    assert relative_error(product, a_value @ b_value.t()) < BOUND[torch.float64]


def test_correction_comes_before_the_output_rounding() -> None:
    """The float32 product times 16/9, rounded once: bit for bit."""
    a, b = quantize(normal((M, K), 5), "mxfp4"), quantize(normal((N, K), 6), "mxfp4")
    product = a.dequantize() @ b.dequantize().t()
    first, second = Bf16().decode([Made(a), Made(b)], "xw", torch.bfloat16)
    found = Bf16().multiply(first, second, 16 / 9, torch.bfloat16)
    assert torch.equal(found, (product * (16 / 9)).bfloat16())
    assert not torch.equal(found, product.bfloat16() * (16 / 9))  # negative control


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("multiplier", [Reference(), Bf16()], ids=lambda m: m.name)
def test_accumulation(multiplier: Multiplier, pair: str) -> None:
    """An operand decoded by itself gives the same product as both together; `into` takes it without
    a rounding between."""
    first, second = PAIRS[pair]
    (a, a_value), (b, b_value) = (
        operand(M, first, 1, torch.bfloat16),
        operand(N, second, 2, torch.bfloat16),
    )
    one, other = multiplier.decode([Made(a), Made(b)], "xw", torch.bfloat16)
    product = multiplier.multiply(one, other, 1.0, torch.float32)
    [form_a] = multiplier.decode([Made(a)], "x", torch.bfloat16)
    [form_b] = multiplier.decode([Made(b)], "w", torch.bfloat16)
    assert torch.equal(multiplier.multiply(form_a, form_b, 1.0, torch.float32), product)
    into, correction = normal((M, N), 14), 1.0 if pair == "high-precision" else 16 / 9
    expected = into.double() + correction * a_value @ b_value.t()
    found = multiplier.multiply(form_a, form_b, correction, torch.bfloat16, into)
    assert found is into
    assert relative_error(found, expected) < BOUND[torch.float32]
    rounded = multiplier.multiply(form_a, form_b, correction, torch.bfloat16)
    rounded = normal((M, N), 14) + rounded
    assert relative_error(rounded, expected) > BOUND[torch.float32]  # negative control
