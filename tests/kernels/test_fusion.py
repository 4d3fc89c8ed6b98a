"""Each kernel says whether products and sums are fused; Triton's default does not matter."""

import ast
import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.messages import FORMS
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantizer import NVFP4, Quantizer
from megatron_fp4.kernels import (
    averages,
    block_values,
    blocks,
    elements,
    estimator,
    launch,
    low_bit_adamw,
    messages,
    native,
    outliers,
    probe,
    ramping,
    rms_norm,
    rotary,
    row_operands,
    scaled_product,
    signs,
    swiglu,
    transpose,
)
from megatron_fp4.kernels.launch import Launch
from megatron_fp4.kernels.quantize import transform_launch
from megatron_fp4.kernels.tile_hadamard import NO_TURN, Turn
from testing.kernels.compiling import (
    E4M3,
    VARIANTS,
    carry_launch,
    compiled_launch,
)

FUSED = ("fma.rn.f32", "fma.rn.f64")

VECTOR = Quantizer(scale="fp32", block=(1, 0), rule="absmax")
INFLATED = replace(NVFP4, inflate=17 / 16, tensor_max=256.0, prescale=0.9)
# Of each kernel a launch for which it has something to fuse if it ever has.
CASES: dict[str, Launch] = {
    "averages.blend_kernel": averages._launch(4, torch.float32),
    "block_values.decode_kernel": block_values._launch(64, 64, INFLATED),
    "block_values.restore_kernel": block_values._restore_launch(
        64, 64, Quantizer(), Turn(32, 0.3, True)
    ),
    "blocks.top_kernel": blocks._find_launch(
        64, 64, INFLATED, 1, Turn(16, 0.3, True), torch.float32
    ),
    "blocks.cast_kernel": blocks._cast_launch(
        64, 64, INFLATED, 1, False, False, NO_TURN, torch.bfloat16
    ),
    "carrier.carry_kernel": carry_launch((64, 256, 32, E4M3, False)),
    "elements.elements_kernel": elements._elements(4096),
    "estimator.factor_kernel": estimator._launch(64, 4096, 0, Estimator(), True),
    "hadamard.transform_kernel": transform_launch(
        64, 64, Quantizer(), 1, 32, "random", False, False
    ),
    "messages.encode_kernel": messages._encode_launch(4, 1, torch.float32, FORMS["e4m3"], False),
    "messages.encode_sums_kernel": messages._encode_sums_launch(4, 1, FORMS["e4m3"], 2, False),
    "messages.sum_kernel": messages._sum_launch(4, 1, torch.float32, FORMS["e4m3"], 2),
    "mxfp4.quantize_kernel": VARIANTS["averaged"],
    "scaled_product.scale_kernel": scaled_product._launch(
        64, 256, "rows", "tensor", 1.5, torch.float32, True
    ),
    "signs.signs_kernel": signs._launch(64, False, True),
    "native.product_kernel": native._launch(64, 64, 64, 0.5, torch.float32, True),
    "outliers.dense_kernel": outliers._dense_launch(64, 64, 4),
    "outliers.split_kernel": outliers._launch(64, 64, OutlierClamp(), True),
    "low_bit_adamw.adamw_kernel": low_bit_adamw._launch(4, Moments(), True, True, True),
    "probe.probe_kernel": probe.probe(),
    "ramping.ramp_kernel": ramping._launch(4),
    "swiglu.swiglu_kernel": swiglu._launch(swiglu.swiglu_kernel, 64, 64, torch.int32),
    "swiglu.swiglu_gradient_kernel": swiglu._launch(
        swiglu.swiglu_gradient_kernel, 64, 64, torch.int32
    ),
    "rms_norm.rms_norm_rows_kernel": rms_norm._factor_launch(64, 64),
    "rms_norm.rms_norm_kernel": rms_norm._normed_launch(64, 64, False),
    "rms_norm.rms_norm_gradient_kernel": rms_norm._gradient_launch(64, 64, True, True),
    "rotary.rotary_kernel": rotary._launch(
        torch.bfloat16, (64, 2, 2), ((512, 256, 64),) * 3, 4, 64, 32, False
    ),
    "rows.largest_kernel": row_operands._find_launch(64, 64, VECTOR, (1, True, None)),
    "rows.cast_kernel": row_operands._cast_launch(64, 64, VECTOR, (1, True, None)),
    "rows.row_kernel": row_operands._row_launch(64, 64, VECTOR, (1, True, None)),
    "transpose.transpose_kernel": transpose._launch(64, 64, None),
}


def kernel_of(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"megatron_fp4.kernels.{module}"), function)


def ptx(name: str, **options: Any) -> str:
    """The kernel as PTX, without the names of source files: Triton's cache on disk may have it from
    another checkout."""
    assert CASES[name].kernel is kernel_of(name)
    text = str(compiled_launch(CASES[name], 90, **options)["ptx"])
    return re.sub(
        r"^\s*\.(file|loc)\b.*\n", "", text.partition("\t.section\t.debug")[0], flags=re.M
    )


def sources() -> dict[str, ast.Module]:
    """The modules of megatron_fp4/kernels, by name."""
    directory = Path(launch.__file__).parent
    return {path.stem: ast.parse(path.read_text()) for path in directory.glob("*.py")}


def test_every_kernel_is_here() -> None:
    functions = {
        f"{name}.{node.name}"
        for name, module in sources().items()
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert functions == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_default_of_triton_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    language = triton.knobs.language
    as_said = ptx(name)
    for default in (True, False):
        monkeypatch.setattr(language, "default_fp_fusion", default)
        assert ptx(name) == as_said
    if not kernel_of(name).fp_fusion:
        # What a kernel asks for in assembly is none of the compiler's doing.
        compiled_alone = re.sub(r"// begin inline asm.*?// end inline asm", "", as_said, flags=re.S)
        assert not any(instruction in compiled_alone for instruction in FUSED)
        # Negative control: there is something to fuse.
        assert any(i in ptx(name, enable_fp_fusion=True) for i in FUSED)


@pytest.mark.parametrize("name", ["mxfp4.quantize_kernel"])
def test_what_is_allowed_is_fused(name: str) -> None:
    assert "fma.rn.f32" in ptx(name) and "fma.rn.f32" not in ptx(name, enable_fp_fusion=False)


def test_a_kernel_that_does_not_say_is_not_started() -> None:
    def silent_kernel(x_ptr):  # type: ignore[no-untyped-def]
        pass

    silent = triton.jit(silent_kernel)
    with pytest.raises(TypeError, match="silent_kernel.* says nothing about fusion"):
        Launch(silent, (1,), [], {})


def test_kernels_are_started_in_one_place() -> None:
    """kernel[grid](...) would leave out what the kernel says."""
    for name, module in sources().items():
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        starts = [call for call in calls if isinstance(call.func, ast.Subscript)]
        assert bool(starts) == (name == "launch"), name
