"""The kernels compile for Ampere, Hopper and Blackwell, on a machine without a GPU."""

import re
from typing import Any

import pytest
import torch

from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels import blocks, carrier
from megatron_fp4.kernels.carrier import carry_kernel
from megatron_fp4.kernels.estimator import factor_kernel
from megatron_fp4.kernels.fp8 import FORMATS
from megatron_fp4.kernels.hadamard import transform_kernel
from megatron_fp4.kernels.mxfp4 import quantize_kernel
from megatron_fp4.kernels.outliers import split_kernel, warps
from megatron_fp4.kernels.quantize import tile
from megatron_fp4.kernels.rows import EXPONENTS, cast_kernel, largest_kernel
from testing.kernels.compiling import (
    CARRIER_TYPES,
    PLAIN,
    SHARED,
    VARIANTS,
    compiled,
    pointers,
    sass,
)


def assembly(
    kernel: Any,
    x: str,
    capability: int,
    constants: dict[str, Any],
    warps: int,
    rows: int = 64,
    registers: int | None = None,
) -> Any:
    """registers: at most, with sizes that are multiples of 16."""
    types = dict.fromkeys(("rows_ptr", "groups_ptr", "step_ptr", "draw_ptr"), "*i64")
    types |= {"x_ptr": x, "average_ptr": "*fp32"}
    types |= {name: "*i32" for name in kernel.arg_names if name.endswith("codes_ptr")}
    types |= {name: "*u8" for name in kernel.arg_names if name.endswith("scales_ptr")}
    types |= {n: "*i32" for n in kernel.arg_names if n.endswith(("carriers_ptr", "tally_ptr"))}
    # Triton makes a constant of an argument that is 1.
    constants = constants | ({"n_rows": 1} if rows == 1 else {})
    aligned = pointers(kernel) + ([] if registers is None else ["n_rows", "n_columns"])
    return compiled(
        kernel, types, capability, constants, aligned, num_warps=warps, maxnreg=registers
    )


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_compiles(variant: str, capability: int) -> None:
    ptx = assembly(quantize_kernel, "*i32", capability, PLAIN | VARIANTS[variant], 4)["ptx"]
    # Subnormal numbers are not flushed where the codes are made.
    assert ".ftz" not in ptx
    assert "prmt.b32" in ptx and "max.NaN.bf16x2" in ptx


@pytest.mark.parametrize("variant", ["along", "carried along"])
def test_a_kernel_compiles_for_one_row(variant: str) -> None:
    assembly(quantize_kernel, "*i32", 90, PLAIN | VARIANTS[variant], 4, rows=1)


@pytest.mark.parametrize("even", [True, False])
def test_an_average_fits_the_registers(even: bool) -> None:
    rows, columns, warps, down, _ = tile(Quantizer(rounding="ema"), False, True, True, True)
    sizes = {"TILE_ROWS": rows, "TILE_COLUMNS": columns, "DOWN": down, "EVEN": even}
    constants = PLAIN | VARIANTS["averaged"] | sizes | {"CEIL": True, "PRESCALE": 1.0}

    def made(warps: int) -> str:
        return sass(assembly(quantize_kernel, "*i32", 90, constants, warps)["cubin"])

    assert "STL" not in made(warps) and "LDG" in made(warps)
    assert "STL" in made(warps // 4)  # Negative control: what nearest rounding takes.


@pytest.mark.parametrize("carried", [0, 3])
@pytest.mark.parametrize("form", ["along", "across", "both", "packed"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_tiles_fit_the_registers(rounding: Any, form: str, carried: int) -> None:
    """With as many as `tile` grants."""
    along, across, packed = form in ("along", "both"), form != "along", form == "packed"
    quantizer = Quantizer(rounding=rounding)
    limits = tile(quantizer, packed, along, across, carried > 0)
    rows, columns, warps, down, registers = limits
    constants = PLAIN | {"TILE_ROWS": rows, "TILE_COLUMNS": columns, "DOWN": down, "EVEN": True}
    constants |= {"ALONG": along, "ACROSS": across, "PACKED": packed, "PRESCALE": 1.0}
    constants |= {"STOCHASTIC": rounding == "stochastic"}
    constants |= {"ALONG_CARRIED": carried * along, "ACROSS_CARRIED": carried * across}

    def spills(registers: int) -> bool:
        made = assembly(quantize_kernel, "*i32", 90, constants, warps, registers=registers)
        return "STL" in sass(made["cubin"])

    assert not spills(registers or 255)
    assert form != "both" or carried or spills(48)  # Negative control.


def test_threads_go_over_the_axes_as_said() -> None:
    """Triton's own order of axes along which no addresses lie together is another in 3.9."""
    sizes = {"TILE_ROWS": 128, "TILE_COLUMNS": 32, "EVEN": True}
    ttgir = assembly(quantize_kernel, "*i32", 90, PLAIN | VARIANTS["across"] | sizes, 2)["ttgir"]
    orders = dict(re.findall(r"^(#blocked\d*) = .*order = (\[.*?\])", ttgir, re.M))
    loads = re.findall(r"tt\.load .*?tensor<([\dx]+)x!tt.*(#blocked\d*)>", ttgir)
    assert [orders[layout] for shape, layout in loads[:2]] == ["[2, 0, 1]", "[0, 1, 2]"]


@pytest.mark.parametrize("n_blocks", [1, 128, 256, 1024])
@pytest.mark.parametrize("second", [None, False, True], ids=["alone", "beside", "both"])
def test_rows_are_mended_without_spilling(second: bool | None, n_blocks: int) -> None:
    """Launch's own constants: Triton tells of registers that did not suffice as local memory."""
    kinds = [(4096, torch.float8_e5m2, True)]
    kinds += [] if second is None else [(4096, torch.float8_e4m3fn, second)]
    start = carrier._launch(n_blocks, *kinds)

    def made(constants: dict[str, Any]) -> str:
        constants = start._constants | constants
        even = pointers(carry_kernel)
        asm = compiled(carry_kernel, CARRIER_TYPES, 90, constants, even, **start._options)
        return sass(asm["cubin"])

    assert "STL" not in made({}) and "LDG" in made({})
    if n_blocks == 256:  # Negative control: as many blocks at a time as where nothing is mended.
        mends, rows, _, *rest = start._constants["A"]
        assert "STL" in made({"A": (mends, rows, carrier.BLOCKS, *rest)})


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("memory", [False, True])
def test_a_transform_compiles(memory: bool, axis: int, group: int, capability: int) -> None:
    constants = SHARED | {"STOCHASTIC": True, "AXIS": axis, "GROUP": group, "EVEN": True}
    constants |= {
        "FACTOR": 1.0 if group == 64 else group**-0.5,
        "HAS_SIGNS": True,
        "IN_MEMORY": memory,
    }
    constants |= {"TILE_ROWS": 128, "TILE_COLUMNS": max(64, group) if axis else 32}
    asm = assembly(transform_kernel, "*bf16", capability, constants, 1)
    assert "mma.sync.aligned.m16n8k16" in asm["ptx"] and ".ftz" not in asm["ptx"]
    # Nothing changes hands on the way to the tensor cores, nor back, nor the random bits: what goes
    # through shared memory are the matrices, and codes and scales on their way out.
    assert asm["ttgir"].count("ttg.local_alloc") <= 1
    widest = re.findall(r"convert_layout .*: tensor<([0-9x]+)xbf16", asm["ttgir"])
    assert widest


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("element", EXPONENTS)
def test_casts_with_float32_scales_compile(element: str, axis: int, capability: int) -> None:
    mantissa, bias = EXPONENTS[element]
    constants = {"AXIS": axis, "PER_ROW": True, "HAS_FOLD": True, "LIMIT": 6.0}
    constants |= {"E2M1": element == "e2m1", "MANTISSA": mantissa, "BIAS": bias}
    constants |= {"TILE_ROWS": 64, "TILE_COLUMNS": 64}
    types = {"x_ptr": "*i16", "fold_ptr": "*fp32", "largest_ptr": "*i32", "codes_ptr": "*u8"}
    types |= {"gamma_ptr": "*fp32"}
    for kernel in (largest_kernel, cast_kernel):
        ptx = compiled(kernel, types, capability, constants)["ptx"]
        assert ".ftz" not in ptx
        # The reference divides as IEEE 754 does; an approximate quotient would move codes.
        assert kernel is largest_kernel or "div.rn.f32" in ptx and "div.full" not in ptx


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("stochastic", [False, True])
def test_casts_with_scales_in_small_floats_compile(
    stochastic: bool, axis: int, capability: int
) -> None:
    constants: dict[str, Any] = {"AXIS": axis, "ACROSS": 16, "ALONG": 16, "TILE": 64}
    constants |= {"TENSOR_MAX": 448.0, "INFLATE": 17 / 16, "PRESCALE": 0.9, "UP": False}
    constants |= {"BIAS": 7, "MAX": 448.0, "NAN": 0x7F, "STOCHASTIC": stochastic}
    constants |= {"HAS_GROUPS": True, "INTERPRETED": False, "IN_MEMORY": stochastic}
    types = {"x_ptr": "*i16", "top_ptr": "*i32", "codes_ptr": "*u8", "scales_ptr": "*u8"}
    types |= {"unit_ptr": "*fp32", "rows_ptr": "*i64", "groups_ptr": "*i64"}
    types |= {"step_ptr": "*i64"}
    for kernel in (blocks.top_kernel, blocks.cast_kernel):
        ptx = compiled(kernel, types, capability, constants)["ptx"]
        assert ".ftz" not in ptx
        assert kernel is blocks.top_kernel or "div.rn.f32" in ptx and "div.full" not in ptx


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_estimator_compiles(capability: int) -> None:
    types = {"dw_ptr": "*fp32", "weight_ptr": "*i16", "gamma_ptr": "*fp32", "power": "fp32"}
    types |= {"share": "fp32", "clip": "fp32"}
    assert "ex2.approx" in compiled(factor_kernel, types, capability, {"TILE": 2048})["ptx"]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("element", FORMATS, ids=str)
@pytest.mark.parametrize("mends", [False, True])
def test_a_carrier_compiles(mends: bool, element: Any, capability: int) -> None:
    start = carrier._launch(512, (4096, element, mends), (4096, torch.float8_e4m3fn, not mends))
    ptx = compiled(carry_kernel, CARRIER_TYPES, capability, start._constants)["ptx"]
    assert "prmt.b32" in ptx and "mul.ftz" not in ptx


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("features", [64, 4096, 16384])
def test_an_outlier_clamp_compiles(features: int, capability: int) -> None:
    constants = {"FEATURES": features, "SLOTS": 256}
    types = dict.fromkeys(pointers(split_kernel), "*i16")
    types |= {name: "i64" for name in split_kernel.arg_names if name.endswith("weight")}
    even = [*pointers(split_kernel), "n_features"]

    def made(**options: Any) -> str:
        options |= {"num_warps": warps(features)}
        return compiled(split_kernel, types, capability, constants, even, **options)["ptx"]

    ptx = made()
    assert "mul.rn.f64" in ptx and "fma.rn.f64" not in ptx and ".ftz" not in ptx
    if features > 64:  # eight numbers at once
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and re.search(r"st\.global\S*\.v4", ptx)
    # Negative control: what Triton makes of it by itself.
    assert "fma.rn.f64" in made(enable_fp_fusion=True)
