"""The quantize kernels in Triton's interpreter, on a CPU, against the reference."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The file, the cases that each is tried on, and the edit.
MISTAKES = {
    "ties go up": ("encode", "floor nearest", "+ 2 * unit", "+ 3 * unit"),
    "1.5 is clipped": ("encode", "ceil nearest", "widest + 0x3F if", "widest + 0x40 if"),
    "a whole's noise": ("philox", "floor stochastic", "at_rows * per_row", "at_rows * 12"),
    "sums for differences": ("hadamard", "group 64", "first - second", "first + second"),
    "signs of another half": ("hadamard", "group 64 shard", "!= 0, w1, w0", "!= 0, w0, w1"),
    "the next group's rows": ("hadamard", "(0,) group 32", "== 32 else 4  #", "== 64 else 4  #"),
    "words in another order": ("philox", "floor stochastic", "tl.join(w0, w2)", "tl.join(w0, w1)"),
    "half a draw twice": ("philox", "floor stochastic", "(words >> 8) &", "(words << 8) &"),
    "NaN is hidden": ("encode", "floor nearest", ", widest < 0x7F80", ", widest >= 0"),
    "no sign of zeros": ("encode", "floor nearest", "return (odd & -0x7F7F7F80) |", "return"),
    "1/2 is decoded as 3/4": ("decode", "packed", "magnitude < 2", "magnitude < 1"),
}
CARRIER_MISTAKES = {
    "halves go down": (" + ((bits >> cut) & 1)) >> cut", ") >> cut"),
    "a NaN is the largest": ("tl.where(scales == 255, 0, scales)", "scales"),
    "zeros are counted": ("(words | (words >> 1) | (words >> 2))", "(words | ~words)"),
    "the other half first": ("tl.join(first, second)", "tl.join(second, first)"),
}
ROW_MISTAKES = {
    "halves go down": (" + ((bits >> CUT) & 1)\n", "\n"),
    "subnormal numbers are cut off": ("magnitude + anchor", "magnitude * 0.99 + anchor"),
    "a NaN is a number": ("largest < INFINITE", "largest >= 0"),
    "nothing is folded": ("    if HAS_FOLD:", "    if HAS_FOLD and AXIS == 1:"),
    "the other half first": ("low | (high << 4)", "high | (low << 4)"),
}
ESTIMATOR_MISTAKES = {
    "of 3 the step of 4": ("x < 4.0, 1.0", "x < 3.0, 1.0"),
    "the place in half a step": ("2.0 * (x - low)", "1.0 * (x - low)"),
    "no NaN": ('float("nan")', "0.0"),
}


def differences(*path: Path, cases: str = "", module: str = "cases") -> list[str]:
    """What tests/kernels/<module>.py prints with the packages that lie in `path` first."""
    search = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}", cases],
        cwd=path[0] if path else ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": search},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n")[:-1]


def test_codes_and_scales_are_the_reference_s() -> None:
    assert differences() == [""]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_kernel_is_noticed(mistake: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "megatron_fp4", tmp_path / "megatron_fp4")
    file, cases, right, wrong = MISTAKES[mistake]
    path = tmp_path / f"megatron_fp4/kernels/{file}.py"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    assert differences(tmp_path, cases=cases) != [""]


def test_carriers_are_ml_dtypes() -> None:
    assert differences(module="carriers") == [""]


def test_codes_with_float32_scales_are_the_reference_s() -> None:
    assert differences(module="rows") == [""]


def test_the_estimator_s_factor_is_the_reference_s() -> None:
    assert differences(module="estimator") == [""]


OTHERS = [("carrier", "carriers", name) for name in CARRIER_MISTAKES]
OTHERS += [("rows", "rows", name) for name in ROW_MISTAKES]
OTHERS += [("estimator", "estimator", name) for name in ESTIMATOR_MISTAKES]


@pytest.mark.parametrize(("file", "module", "mistake"), OTHERS)
def test_a_mistake_in_another_kernel_is_noticed(
    file: str, module: str, mistake: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "megatron_fp4", tmp_path / "megatron_fp4")
    path = tmp_path / f"megatron_fp4/kernels/{file}.py"
    mistakes = {"carrier": CARRIER_MISTAKES, "rows": ROW_MISTAKES, "estimator": ESTIMATOR_MISTAKES}
    right, wrong = mistakes[file][mistake]
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    assert differences(tmp_path, module=module) != [""]
