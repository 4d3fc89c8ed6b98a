"""The kernels compile for Ampere, Hopper and Blackwell, on a machine without a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.messages import FORMS
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.kernels import (
    carrier,
    estimator,
    low_bit_adamw,
    messages,
    outliers,
    rms_norm,
    swiglu,
    transpose,
)
from megatron_fp4.kernels.fp8 import FORMATS
from megatron_fp4.kernels.quantize import transform_launch
from testing.kernels.compiling import (
    E4M3,
    E5M2,
    VARIANTS,
    carry_launch,
    compiled_launch,
    quantize_launch,
    registers,
    sass,
)

# Other releases of Triton spill a few more registers in some kernels, or add instructions.
PINNED = (Path(__file__).parents[2] / "constraints.txt").read_text()
OF_PINNED_TRITON = pytest.mark.skipif(
    f"triton=={triton.__version__}\n" not in PINNED,
    reason="registers and instructions are limited for the Triton of constraints.txt",
)


def slow(*words: Any) -> Any:
    return pytest.param(*words, marks=pytest.mark.slow)


ELSEWHERE = [pytest.param(each, marks=pytest.mark.outside) for each in (80, 120)]
GPUS = [90, slow(100), *ELSEWHERE]


@pytest.mark.parametrize("capability", [*GPUS, pytest.param(89, marks=pytest.mark.outside)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_kernel_compiles(variant: str, capability: int) -> None:
    if "E4M3" in variant and capability < 89:
        pytest.skip("is not launched there (makers/computed.py)")
    ptx = compiled_launch(VARIANTS[variant], capability)["ptx"]
    # Subnormal numbers are not flushed where the codes are made; a SwiGLU's sigmoid may be 0.
    for approximation in ("ex2.approx.ftz", "rcp.approx.ftz"):
        assert (approximation in ptx) == ("swiglu" in variant)
        ptx = ptx.replace(approximation, "")
    assert ".ftz" not in ptx
    assert "prmt.b32" in ptx and "max.NaN.bf16x2" in ptx


@pytest.mark.slow
@OF_PINNED_TRITON
@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.outside)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_y_in_e4m3_takes_no_more_memory_than_in_bf16(rounding: str, capability: int) -> None:
    """It spills no more registers, hands no element to another thread, and as many programs run at
    once, whose registers are given out by eights."""

    def made(of_y: torch.dtype) -> Any:
        return compiled_launch(
            quantize_launch(
                rounding, E5M2, E5M2, rule="ceil", sizes=(1024, 1024), reads="swiglu gradient",
                shared=rounding == "stochastic", of_y=of_y,
            ),
            capability,
        )  # fmt: skip

    def counts(asm: Any, *names: str) -> list[int]:
        return [len(re.findall(rf"\b{name}\b", sass(asm["cubin"]))) for name in names]

    wide, narrow = made(torch.int32), made(torch.int16)
    memory = "STL", "LDL", "STS", "LDS"
    pairs = zip(counts(narrow, *memory), counts(wide, *memory), strict=True)
    assert all(mine <= others for mine, others in pairs)
    at_once = [65536 // (128 * -(-registers(asm["cubin"]) // 8 * 8)) for asm in (narrow, wide)]
    assert at_once[0] >= at_once[1] >= 2
    assert "cvt.rn.f16x2.e4m3x2" in narrow["ptx"] and "e4m3x2" not in wide["ptx"]


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_a_separate_gradient_reads_e4m3(capability: int) -> None:
    start = swiglu._launch(swiglu.swiglu_gradient_kernel, 64, 64, torch.int16)
    assert "cvt.rn.f16x2.e4m3x2" in compiled_launch(start, capability)["ptx"]


@pytest.mark.parametrize("carries", [True, E4M3])
def test_a_kernel_compiles_for_one_row(carries: Any) -> None:
    compiled_launch(quantize_launch("nearest", carries, False, sizes=(1, 64)), 90)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(128, 128), (136, 96)])
def test_an_average_fits_the_registers(sizes: tuple[int, int]) -> None:
    start = quantize_launch("ema", E4M3, rule="ceil", sizes=sizes)

    def made(warps: int) -> str:
        return sass(compiled_launch(start, 90, num_warps=warps)["cubin"])

    assert "STL" not in made(start.options["num_warps"]) and "LDG" in made(8)
    assert "STL" in made(2)  # Negative control: what nearest rounding takes.


@pytest.mark.slow
@pytest.mark.parametrize("along", [(E4M3, E4M3), (E4M3, False), (False, E4M3), (True, True)])
def test_a_choice_by_errors_fits_the_registers(along: tuple[Any, Any]) -> None:
    start = quantize_launch("nearest", *along, rule="mse", sizes=(1024, 1024))

    def made(warps: int) -> str:
        return sass(compiled_launch(start, 90, num_warps=warps)["cubin"])

    assert "STL" not in made(start.options["num_warps"])
    if along == (E4M3, E4M3):  # Negative control: half as many threads.
        assert "STL" in made(start.options["num_warps"] // 2)


@OF_PINNED_TRITON
@pytest.mark.parametrize("block", [32, pytest.param(16, marks=pytest.mark.outside)])
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(
    "form",
    [slow("along rows"), slow("along columns"), "both", slow("one draw"), slow("packed")],
)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_tiles_fit_the_registers(rounding: Any, form: str, carried: bool, block: int) -> None:
    """With as many as `tile` grants. One draw is for both copies of dY, whose carriers are E5M2.

    With carriers this kernel stores a few registers in memory, once, and loads them again. Programs
    in the other order keep all, but are slower on an H200 (docs/notes/quantize-kernels.md).
    """
    wanted: Any = (E5M2 if form == "one draw" else E4M3) if carried else True
    start = quantize_launch(
        rounding,
        wanted if form in ("along rows", "both", "one draw") else False,
        wanted if form != "along rows" else False,
        sizes=(1024, 1024),
        packed=block if form == "packed" else 0,
        shared=form == "one draw",
        block=(1, block),
    )

    def spilled(**options: Any) -> int:
        return sass(compiled_launch(start, 90, **options)["cubin"]).count("STL")

    assert spilled() <= (8 if form == "one draw" and carried else 0)
    assert form != "both" or carried or spilled(maxnreg=48) > 8  # Negative control.


@pytest.mark.slow
@pytest.mark.parametrize("carrier", [True, E5M2])
def test_one_draw_for_both_copies_saves_instructions(carrier: Any) -> None:
    """A tenth at least. Three programs of four warps share the registers of a multiprocessor."""

    def made(shared: bool) -> tuple[int, int]:
        start = quantize_launch(
            "stochastic", carrier, carrier, rule="ceil", sizes=(1024, 1024), shared=shared
        )
        cubin = compiled_launch(start, 90)["cubin"]
        return len(re.findall(r"^\s+.*;$", sass(cubin), re.M)), registers(cubin)

    (two, _), (one, used) = made(False), made(True)
    assert one < two * 0.9
    assert 3 * 4 * 32 * used <= 2**16


@pytest.mark.slow
@OF_PINNED_TRITON
@pytest.mark.parametrize("carried", [(E4M3, False), (False, E5M2), (E4M3, E5M2)])
def test_a_norm_costs_less_than_half_more_instructions(carried: tuple[Any, Any]) -> None:
    """And no spill, though the weights of the columns are broadcast over the rows."""

    def made(reads: str) -> str:
        start = quantize_launch("nearest", *carried, rule="ceil", sizes=(1024, 1024), reads=reads)
        return sass(compiled_launch(start, 90)["cubin"])

    plain, normed = made(""), made("normed")
    assert "STL" not in normed
    assert normed.count(";") < 1.5 * plain.count(";")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [4096, 8192])
def test_kernels_of_norms_hold_their_rows_in_registers(columns: int) -> None:
    words = columns // 2
    for start in (
        rms_norm._factor_launch(64, words),
        rms_norm._normed_launch(64, words, False),
        rms_norm._gradient_launch(64, words, True, False),
    ):
        assert "STL" not in sass(compiled_launch(start, 90)["cubin"])


def test_threads_go_over_the_axes_as_said() -> None:
    """Triton's own order of axes along which no addresses lie together is another in 3.9."""
    start = quantize_launch("stochastic", False, rule="ceil", sizes=(128, 96))
    ttgir = compiled_launch(start, 90)["ttgir"]
    orders = dict(re.findall(r"^(#blocked\d*) = .*order = (\[.*?\])", ttgir, re.M))
    loads = re.findall(r"tt\.load .*?tensor<([\dx]+)x!tt.*(#blocked\d*)>", ttgir)
    assert [orders[layout] for shape, layout in loads[:2]] == ["[2, 0, 1]", "[0, 1, 2]"]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 128, 256, 1024])
@pytest.mark.parametrize("second", [None, False, True], ids=["alone", "beside", "both"])
def test_rows_are_corrected_without_spilling(second: bool | None, blocks: int) -> None:
    """Triton tells of registers that did not suffice as local memory."""
    kinds: list[tuple[Any, ...]] = [(4096, blocks, 32, E5M2, True)]
    kinds += [] if second is None else [(4096, blocks, 32, E4M3, second)]
    start = carry_launch(*kinds)

    def made(**constants: Any) -> str:
        return sass(compiled_launch(start, 90, constants)["cubin"])

    assert "STL" not in made() and "LDG" in made()
    if blocks == 256:  # Negative control: as many blocks at a time as where nothing is corrected.
        assert "STL" in made(A=start.constants["A"]._replace(BLOCKS=carrier.BLOCKS))


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("group", [32, slow(64), 128])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("memory", [False, True])
def test_a_transform_compiles(memory: bool, axis: int, group: int, capability: int) -> None:
    noisy = Quantizer(rounding="stochastic", prescale=0.75)
    start = transform_launch(256, 256, noisy, axis, group, "random", memory, True)
    asm = compiled_launch(start, capability)
    assert "mma.sync.aligned.m16n8k16" in asm["ptx"] and ".ftz" not in asm["ptx"]
    # Nothing changes hands on the way to the tensor cores, nor back, nor the random bits: what goes
    # through shared memory are the matrices, and codes and scales on their way out.
    assert asm["ttgir"].count("ttg.local_alloc") <= 1
    widest = re.findall(r"convert_layout .*: tensor<([0-9x]+)xbf16", asm["ttgir"])
    assert widest


@pytest.mark.slow
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("signs", ["fixed", "none"])
def test_signs_that_are_constants_compile(signs: str, axis: int, group: int) -> None:
    start = transform_launch(256, 256, Quantizer(), axis, group, signs, False, False)
    assert "mma.sync.aligned.m16n8k16" in compiled_launch(start, 90)["ptx"]


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("carrier", [None, E4M3, E5M2])
def test_a_transpose_compiles(carrier: Any, capability: int) -> None:
    start = transpose._launch(4096, 2048, carrier)
    assert "STL" not in sass(compiled_launch(start, capability)["cubin"])


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("block", [0, 16])
def test_the_estimator_compiles(block: int, capability: int) -> None:
    start = estimator._launch(64, 4096, block, Estimator(), True)
    assert "ex2.approx" in compiled_launch(start, capability)["ptx"]


@pytest.mark.parametrize("capability", [*GPUS[:2], ELSEWHERE[1]])
@pytest.mark.parametrize("element", FORMATS, ids=str)
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("block", [16, 32])
def test_a_carrier_compiles(block: int, corrects: bool, element: Any, capability: int) -> None:
    start = carry_launch(
        (4096, 512, block, element, corrects), (4096, 512, block, E4M3, not corrects)
    )
    ptx = compiled_launch(start, capability)["ptx"]
    assert "prmt.b32" in ptx and "mul.ftz" not in ptx


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["e4m3", "ue5m3"])
@pytest.mark.parametrize("block", [16, 32])
def test_a_carrier_of_scales_in_small_floats_compiles(block: int, scale: str) -> None:
    """Alone, and beside an operand with E8M0 scales."""
    kind = (4096, 512, block, E4M3, False, scale)
    for kinds in ([kind], [(4096, 512, 32, E5M2, True), kind]):
        asm = compiled_launch(carry_launch(*kinds), 90)
        assert "prmt.b32" in asm["ptx"] and ".ftz" not in asm["ptx"]
        assert "STL" not in sass(asm["cubin"])


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(
    "features", [64, slow(4096), pytest.param(16384, marks=pytest.mark.outside)]
)
def test_an_outlier_clamp_compiles(features: int, capability: int) -> None:
    start = outliers._launch(64, features, OutlierClamp(), native=capability >= 90)

    def made(**options: Any) -> str:
        return str(compiled_launch(start, capability, **options)["ptx"])

    ptx = made()
    assert ("set.lt.u32.bf16x2" in ptx) == (capability >= 90)
    if capability == 90:
        assert "STL" not in sass(compiled_launch(start, 90)["cubin"])
        spills = compiled_launch(start, 90, num_warps=1)["cubin"]  # Negative control.
        assert "STL" in sass(spills) or features < 4096
    assert "mul.rn.f64" in ptx and "fma.rn.f64" not in ptx and ".ftz" not in ptx
    if features > 64:  # eight numbers at once
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx) and re.search(r"st\.global\S*\.v4", ptx)
    # Negative control: what Triton makes of it by itself.
    assert "fma.rn.f64" in made(enable_fp_fusion=True)


LOW_BIT = {
    str(moments): low_bit_adamw._launch(8, moments, shifted, sharded, grouped)
    for moments, shifted, sharded, grouped in (
        (Moments(), False, False, True),
        (Moments(round="nearest"), True, False, True),
        (Moments("bf16", "bf16"), True, True, True),
        (Moments("fp8", "fp8"), True, True, False),
        (Moments("fp32", "fp16"), False, True, False),
    )
}


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("moments", LOW_BIT)
def test_adamw_in_few_bits_compiles(moments: str, capability: int) -> None:
    """Subnormal numbers are not flushed, quotients and roots are rounded to nearest, no instruction
    converts to FP8, and no register is spilled."""
    asm = compiled_launch(LOW_BIT[moments], capability)
    assert ".ftz" not in asm["ptx"] and "e4m3" not in asm["ptx"]
    assert "sqrt.rn.f32" in asm["ptx"] and "div.rn.f32" in asm["ptx"]
    assert ".approx" not in asm["ptx"] and "div.full" not in asm["ptx"]
    assert not re.search(r"\b(STL|LDL)\b", sass(asm["cubin"]))


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("element", FORMS)
def test_messages_fit_the_registers(element: str, capability: int) -> None:
    """On any GPU: codes are made and read by integers, and not by FP8 instructions."""
    form = FORMS[element]
    for start in (
        messages._encode_launch(64, 4, torch.float32, form, True),
        messages._encode_launch(64, 4, torch.bfloat16, form, False),
        messages._encode_launch(64, 4, torch.float16, form, True),
        messages._sum_launch(64, 4, torch.bfloat16, form, 8),
        messages._encode_sums_launch(64, 4, form, 8, True),
        messages._encode_sums_launch(64, 4, form, 8, False),
    ):
        spills = "STL" in sass(compiled_launch(start, capability)["cubin"])
        assert capability == 80 or not spills
