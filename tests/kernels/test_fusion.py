"""Each kernel says whether products and sums are fused; Triton's default does not matter."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import triton

from megatron_fp4.kernels import launch
from megatron_fp4.kernels.launch import Launch
from testing.kernels.compiling import CARRIER_TYPES, PLAIN, SHARED, VARIANTS, compiled, pointers

FUSED = ("fma.rn.f32", "fma.rn.f64")

CAST = {"AXIS": 1, "PER_ROW": True, "HAS_FOLD": True, "LIMIT": 6.0, "E2M1": True}
CAST |= {"MANTISSA": 1, "BIAS": 1, "TILE_ROWS": 64, "TILE_COLUMNS": 64}
BLOCKS: dict[str, Any] = {"AXIS": 1, "ACROSS": 1, "ALONG": 16, "TILE": 64, "TENSOR_MAX": 448.0}
BLOCKS |= {"INFLATE": 17 / 16, "PRESCALE": 0.9, "UP": False, "BIAS": 7, "MAX": 448.0, "NAN": 0x7F}
BLOCKS |= {"STOCHASTIC": False, "IN_MEMORY": False, "HAS_GROUPS": False, "INTERPRETED": False}
TRANSFORM = SHARED | {"AXIS": 1, "GROUP": 32, "FACTOR": 32**-0.5, "STOCHASTIC": False}
TRANSFORM |= {"PRESCALE": 1.0, "HAS_SIGNS": True, "IN_MEMORY": False, "EVEN": True}
TRANSFORM |= {"TILE_ROWS": 64, "TILE_COLUMNS": 64}
PRODUCT = {"ADDS": True, "TILE_M": 64, "TILE_N": 64, "TILE_K": 64, "BAND": 8}
CARRY = {"A": (0, 1, 256, 3, 7, 0x7F, -8, 6, -7), "B": None, "ALL_BLOCKS": 256}
# Of pointers that are not to bytes, and of arguments that are not int32.
TYPES = CARRIER_TYPES | {"x_ptr": "*i16", "weight_ptr": "*i16", "top_ptr": "*i32"}
TYPES |= dict.fromkeys(["dw_ptr", "gamma_ptr", "fold_ptr", "unit_ptr", "average_ptr"], "*fp32")
TYPES |= dict.fromkeys(["rows_ptr", "groups_ptr", "step_ptr"], "*i64") | {"largest_ptr": "*i32"}
TYPES |= dict.fromkeys(["power", "share", "clip", "alpha"], "fp32")
HALVES = dict.fromkeys(["clamped_ptr", "values_ptr", "places_ptr"], "*i16")
WEIGHTS = dict.fromkeys(["low_weight", "high_weight"], "i64")
WORDS = dict.fromkeys(["codes_ptr", "out_ptr", "x_ptr"], "*i32")
WORDS |= {f"{copy}_{name}_ptr": "*i32" for copy in ("along", "across") for name in
          ("codes", "carriers", "tally")}  # fmt: skip
# Of each kernel: its types, beside TYPES, and constants for which it has something to fuse, if it
# ever has.
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "blocks.top_kernel": ({}, BLOCKS),
    "blocks.cast_kernel": ({}, BLOCKS),
    "carrier.carry_kernel": ({}, CARRY | {"INTERPRETED": False}),
    "carrier.elements_kernel": (WORDS, {"INTERPRETED": False, "TILE": 1024}),
    "estimator.factor_kernel": ({}, {"TILE": 2048}),
    "hadamard.transform_kernel": (WORDS | {"x_ptr": "*bf16"}, TRANSFORM),
    "mxfp4.quantize_kernel": (WORDS, PLAIN | VARIANTS["averaged"] | {"ALONG_CARRIED": 0}),
    "native.product_kernel": ({"out_ptr": "*fp32"}, PRODUCT),
    "outliers.split_kernel": (HALVES | WEIGHTS, {"FEATURES": 64, "SLOTS": 16}),
    "rows.largest_kernel": ({}, CAST),
    "rows.cast_kernel": ({}, CAST),
    "rows.transpose_kernel": ({}, {"TILE_ROWS": 64, "TILE_BYTES": 64}),
}


def kernel_of(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"megatron_fp4.kernels.{module}"), function)


def ptx(name: str, **options: Any) -> str:
    kernel, (types, constants) = kernel_of(name), CASES[name]
    known = dict.fromkeys(pointers(kernel), "*u8") | TYPES | types
    return compiled(kernel, known, 90, constants, pointers(kernel), **options)["ptx"]


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


@pytest.mark.parametrize("name", CASES)
def test_the_default_of_triton_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    language = triton.knobs.language
    as_said = ptx(name)
    for default in (True, False):
        monkeypatch.setattr(language, "default_fp_fusion", default)
        assert ptx(name) == as_said
    if not kernel_of(name).fp_fusion:
        assert not any(instruction in as_said for instruction in FUSED)
        # Negative control: there is something to fuse.
        assert any(i in ptx(name, enable_fp_fusion=True) for i in FUSED)


@pytest.mark.parametrize("name", ["mxfp4.quantize_kernel", "blocks.cast_kernel"])
def test_what_is_allowed_is_fused(name: str) -> None:
    assert "fma.rn.f32" in ptx(name) and "fma.rn.f32" not in ptx(name, enable_fp_fusion=False)


def test_a_kernel_that_does_not_say_is_not_started() -> None:
    def silent_kernel(x_ptr):  # type: ignore[no-untyped-def]
        pass

    silent = triton.jit(silent_kernel)
    for start in (lambda: Launch(silent, (1,), {}), lambda: launch.run(silent, (1,), [0])):
        with pytest.raises(TypeError, match="silent_kernel.* says nothing about fusion"):
            start()


def test_kernels_are_started_in_one_place() -> None:
    """kernel[grid](...) would leave out what the kernel says."""
    for name, module in sources().items():
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        starts = [call for call in calls if isinstance(call.func, ast.Subscript)]
        assert bool(starts) == (name == "launch"), name
