"""The kernels in Triton's interpreter, on a CPU, against the reference."""

from typing import Any

import pytest

from testing.kernels.interpreter import differences

# Nearest and stochastic rounding, a transform with signs, codes that are quantized again, and both
# copies with one draw.
QUICK = (
    "ceil nearest 1.0 axes (1, 0).",
    "mse nearest 1.0 axes (1, 0).",
    "nearest nearest 1.0 axes (1, 0).",
    "ceil stochastic 1.0 axes (1, 0) shard",
    "axes (1, 0) group 64 shard signs",
    "axes (1, 0) group 64 shard fixed signs",
    "stochastic 1.0 axes (0,) packed.",
    "one draw",
)


def slow(*words: str) -> Any:
    return pytest.param(*words, marks=pytest.mark.slow)


@pytest.mark.parametrize("cases", QUICK)
def test_codes_and_scales_are_the_reference_s(cases: str) -> None:
    assert differences("mxfp4", cases) == [""]


@pytest.mark.outside
@pytest.mark.parametrize(
    "cases",
    ["floor", "ceil", "mse", *(f"nearest {each}" for each in ("nearest", "stochastic", "ema"))],
)
def test_all_codes_and_scales_are_the_reference_s(cases: str) -> None:
    assert differences("mxfp4", cases) == [""]


@pytest.mark.parametrize(
    "comparison",
    [
        pytest.param("carriers", marks=pytest.mark.outside),
        slow("row_scales"),
        pytest.param("block_scales", marks=pytest.mark.outside),
        "dge_factor",
        pytest.param("outlier_clamp", marks=pytest.mark.outside),
        "averages",
        "sent_weights",
        slow("ramping"),
        pytest.param("low_bit_adamw", marks=pytest.mark.outside),
        pytest.param("swiglu", marks=pytest.mark.outside),
        slow("rms_norm"),
        "scaled_product",
        pytest.param("quotients", marks=pytest.mark.outside),
    ],
)
def test_other_kernels_are_the_reference_s(comparison: str) -> None:
    assert differences(comparison) == [""]


@pytest.mark.parametrize(
    ("comparison", "cases"),
    [
        *(("block_scales", name) for name in ("2d", "ue5m3-sr")),
        *(slow("block_scales", name) for name in ("in-fp8-tensor", "gain-drawn")),
        *(("block_scales", f"transformed {name}") for name in ("nvfp4-17-16-sr 16", "ue5m3 64")),
        ("block_scales", "four-over-six-32"),
        ("block_scales", "float32 e8m0-ceil-sr"),
        ("block_scales", "restored e8m0 32"),
        *(slow("block_scales", each) for each in ("float32", "restored", "transformed e8m0")),
        ("quotients", "some"),
        ("quotients", "exponents"),
        ("carriers", "16 x 96"),
        slow("carriers", "row scales"),
        slow("carriers", "mse-fp8"),
        ("low_bit_adamw", "place"),
        slow("low_bit_adamw", "range"),
        slow("swiglu", "result 32 x 128 ceil nearest"),  # quantized as it is computed
        ("swiglu", "gradient 32 x 128 ceil stochastic"),
    ],
)
def test_some_cases_are_the_reference_s(comparison: str, cases: str) -> None:
    assert differences(comparison, cases) == [""]


@pytest.mark.parametrize("cases", [" e4m3 float32", slow("aligned bf16 bfloat16")])
def test_messages_are_the_reference_s(cases: str) -> None:
    assert differences("messages", cases) == [""]


@pytest.mark.outside
def test_all_messages_are_the_reference_s() -> None:
    assert differences("messages") == [""]


@pytest.mark.parametrize("cases", [slow("34 features, 0.99"), "fine"])
def test_outliers_are_the_reference_s(cases: str) -> None:
    assert differences("outlier_clamp", cases) == [""]
