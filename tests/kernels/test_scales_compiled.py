"""The kernels for row scales and for block scales in small floats compile for Ampere, Hopper and
Blackwell, on a machine without a GPU."""

import re
from typing import Any

import pytest
import torch

from megatron_fp4 import get_quantizer, get_recipe
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels import block_values, blocks, row_operands, scaled_product
from megatron_fp4.kernels.tile_hadamard import GROUPS, NO_TURN, Turn
from testing.kernels.compiling import E4M3, compiled_launch, sass
from tests.kernels.test_compiled import GPUS

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("element", row_operands.EXPONENTS)
def test_casts_with_float32_scales_compile(element: Any, axis: int, capability: int) -> None:
    quantizer = Quantizer(element=element, scale="fp32", block=(1, 0), rule="absmax")
    find, cast = (
        compiled_launch(start, capability)["ptx"]
        for start in (
            row_operands._find_launch(72, 96, quantizer, (axis, True, None)),
            row_operands._cast_launch(72, 96, quantizer, (axis, True, None)),
        )
    )
    row = compiled_launch(row_operands._row_launch(72, 96, quantizer, (1, True, None)), capability)
    assert ".ftz" not in find + cast + row["ptx"]
    # The reference divides as IEEE 754 does; an approximate quotient would move codes.
    for ptx in (cast, row["ptx"]):
        assert "div.rn.f32" in ptx and "div.full" not in ptx


@pytest.mark.slow
@pytest.mark.parametrize("element", row_operands.EXPONENTS)
def test_row_scales_fit_the_registers(element: Any) -> None:
    """Both operands of a matrix, and rows of the most columns, with all that they may have."""
    quantizer = Quantizer(element=element, scale="fp32", block=(1, 0), rule="absmax")
    carrier = E4M3 if element == "e2m1" else None
    kinds = (1, True, carrier), (0, True, carrier)
    both = (
        row_operands._find_launch(1024, 1024, quantizer, *kinds),
        row_operands._cast_launch(1024, 1024, quantizer, *kinds),
    )
    rows = row_operands._row_launch(1024, row_operands.WIDEST, quantizer, (1, True, carrier))
    for start in (*both, rows):
        assert "STL" not in sass(compiled_launch(start, 90)["cubin"])
    # Negative control: rows that are held by an eighth of the threads.
    assert "STL" in sass(compiled_launch(rows, 90, num_warps=2)["cubin"])


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("group", [0, 16])
@pytest.mark.parametrize(("rule", "rounding"), [("nearest", "stochastic"), ("up", "nearest")])
def test_casts_with_scales_in_small_floats_compile(
    rule: Any, rounding: Any, group: int, axis: int, capability: int
) -> None:
    """No number is flushed to 0. A transform is a product on tensor cores."""
    quantizer = Quantizer(
        scale="e4m3", block=(16, 16), rule=rule, rounding=rounding, tensor_max=448.0,
        inflate=17 / 16, prescale=0.9,
    )  # fmt: skip
    turn = Turn(group, 0.25, True) if group else NO_TURN
    find, cast = (
        compiled_launch(start, capability)["ptx"]
        for start in (
            blocks._find_launch(80, 96, quantizer, axis, turn, BF16),
            blocks._cast_launch(
                80, 96, quantizer, axis, rounding == "stochastic", True, turn, BF16
            ),
        )
    )
    assert ".ftz" not in find + cast
    assert "div.rn.f32" in cast and "div.full" not in cast
    for ptx in (find, cast):
        assert ("mma" in ptx) == (group != 0)


MIDDLE = {32, 64}  # groups whose transforms need fewer registers than those of 128


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [pytest.param(each, marks=pytest.mark.outside) if each in MIDDLE else each for each in GROUPS],
)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("nvfp4-nvidia", BF16), ("ue5m3", BF16), ("ue5m3", FP32), ("quartet-2", FP32)],
)
def test_transforms_fit_the_registers(
    recipe: str, dtype: torch.dtype, axis: int, group: int
) -> None:
    quantizer = get_recipe(recipe).wgrad.a
    assert isinstance(quantizer, Quantizer)
    turn = Turn(group, group**-0.5, True)
    find = blocks._find_launch(4096, 4096, quantizer, axis, turn, dtype)
    cast = blocks._cast_launch(4096, 4096, quantizer, axis, True, False, turn, dtype)
    few = 16 if (group, dtype) == (128, FP32) else 0  # stores of registers to memory
    for start in (find, cast):
        assert sass(compiled_launch(start, 90)["cubin"]).count("STL") <= few
    if group == 128:  # Negative control: a tile is held by one warp.
        fewer = [compiled_launch(each, 90, num_warps=1) for each in (find, cast)]
        assert max(sass(each["cubin"]).count("STL") for each in fewer) > few


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_casts_of_float32_with_powers_of_two_compile(
    rounding: Any, axis: int, capability: int
) -> None:
    """No number is flushed to 0, nothing is divided, and all registers suffice."""
    quantizer = Quantizer(rule="ceil", rounding=rounding)
    start = blocks._cast_launch(4096, 4096, quantizer, axis, False, False, NO_TURN, FP32)
    asm = compiled_launch(start, capability)
    assert ".ftz" not in asm["ptx"] and "div." not in asm["ptx"]
    assert "ld.global.v4.b32" in asm["ptx"]
    assert "STL" not in sass(asm["cubin"])
    if (rounding, axis, capability) == ("stochastic", 0, 90):  # Negative control: one warp.
        assert "STL" in sass(compiled_launch(start, 90, num_warps=1)["cubin"])


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(
    "group", [32, *(pytest.param(g, marks=pytest.mark.slow) for g in (16, 128))]
)
def test_inverse_transforms_compile(group: int, capability: int) -> None:
    """They are products on tensor cores, write whole lines, and keep small numbers."""
    turn = Turn(group, group**-0.5, True)
    start = block_values._restore_launch(4096, 2048, Quantizer(rule="ceil"), turn)
    asm = compiled_launch(start, capability)
    assert "mma" in asm["ptx"] and ".ftz" not in asm["ptx"]
    assert "st.global.v4.b32" in asm["ptx"] and "STL" not in sass(asm["cubin"])
    if (group, capability) == (128, 90):  # Negative control: a tile is held by one warp.
        assert "STL" in sass(compiled_launch(start, 90, num_warps=1)["cubin"])


@pytest.mark.parametrize("capability", GPUS)
def test_decoding_reads_and_writes_whole_words(capability: int) -> None:
    decode = block_values._launch(4096, 2048, get_quantizer("nvfp4"))
    ptx = compiled_launch(decode, capability)["ptx"]
    assert ".ftz" not in ptx
    accesses = set(re.findall(r"(?:ld|st)\.global\S*", ptx))
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= accesses
    assert "STL" not in sass(compiled_launch(decode, 90)["cubin"])


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_product_is_scaled_in_whole_words(dtype: Any, capability: int) -> None:
    """A factor for each row, one of the other operand, and a sum."""
    scale = scaled_product._launch(4096, 2048, "rows", "tensor", 1.5, dtype, True)
    ptx = compiled_launch(scale, capability)["ptx"]
    assert ".ftz" not in ptx
    accesses = set(re.findall(r"(?:ld|st)\.global\S*", ptx))
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= accesses
    assert "STL" not in sass(compiled_launch(scale, 90)["cubin"])


@pytest.mark.slow
@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("axis", "length"), [(0, 16), (1, 32)])
@pytest.mark.parametrize("rule", blocks.COMPARED)
def test_casts_that_compare_scales_compile(
    rule: Any, length: int, axis: int, capability: int
) -> None:
    for scale in ({"scale": "ue5m3"}, {"scale": "e4m3", "tensor_max": 256.0}):
        quantizer = Quantizer(block=(1, length), rule=rule, **scale)  # type: ignore[arg-type]
        cast = blocks._cast_launch(4096, 4096, quantizer, axis, False, False, NO_TURN, BF16)
        compiled = compiled_launch(cast, capability)
        assert "STL" not in sass(compiled["cubin"])  # no registers are spilled
        assert ".ftz" not in compiled["ptx"] and "div.full" not in compiled["ptx"]


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("axis", [0, 1])
def test_casts_with_a_gain_of_1_compile(axis: int, capability: int) -> None:
    operand = get_recipe("quartet-2").quantizer("dgrad", "dy")
    assert operand is not None and operand.unit_gain == 128
    cast = blocks._cast_launch(4096, 4096, operand, axis, True, True, NO_TURN, BF16)
    compiled = compiled_launch(cast, capability)
    assert "STL" not in sass(compiled["cubin"])
    assert ".ftz" not in compiled["ptx"] and "div.full" not in compiled["ptx"]
