"""The first run on a new GPU reports wrong codes, wrong products and exceptions, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.first_run import COMPARISONS, ROOT, Row, collect, failures, in_process
from benchmarks.first_run_checks import (
    FORMATS,
    OUTPUTS,
    check_codes,
    check_product,
    codings,
    compared,
    matrix,
    recorded,
)
from megatron_fp4 import get_quantizer
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.makers.pytorch import PyTorch
from megatron_fp4.multipliers.bf16 import Bf16
from megatron_fp4.multipliers.reference import Reference
from megatron_fp4.multipliers.sm100 import Sm100
from megatron_fp4.operands import Form, Made, Matrix
from testing.builders.operand_plans import plan

CPU = torch.device("cpu")
SHAPES = ((32, 48, 64), (16, 16, 96))


class OneWrongCode(PyTorch):
    """Makes the last byte of the codes wrong, or of the scales."""

    def __init__(self, of: str) -> None:
        self.of = of

    def make(
        self, matrix: Matrix, operands: Sequence[OperandPlan], given: Sequence[Given]
    ) -> list[Made]:
        [made] = super().make(matrix, operands, given)
        assert isinstance(made.operand, QuantizedTensor)
        wrong = getattr(made.operand, self.of).clone()
        wrong.view(-1)[-1] ^= 1
        return [Made(replace(made.operand, **{self.of: wrong}))]


class Raising(Bf16):
    name = "raising"

    def multiply(self, *args: Any) -> Tensor:
        raise RuntimeError("no such instruction\nand more")


class Wrong(Bf16):
    """Multiplies by a factor too much, or by NaN."""

    name = "wrong"

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def multiply(self, a: Form, b: Form, correction: float, *output: Any, **named: Any) -> Tensor:
        return super().multiply(a, b, correction * self.factor, *output, **named)


# --- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["mxfp4-ceil-sr", "nvfp4"])
def test_equal_codes_are_right_and_a_planted_wrong_one_is_reported(name: str, axis: int) -> None:
    x = matrix(64, 96)
    operands = [plan(x, get_quantizer(name), axis)]
    row = compared(PyTorch(), x, operands, CPU)
    assert row["right"] and row["elements"] == x.numel()
    assert row["different codes"] == row["different scales"] == 0
    row = compared(OneWrongCode("codes"), x, operands, CPU)
    assert (row["right"], row["different codes"], row["different scales"]) == (False, 1, 0)
    row = compared(OneWrongCode("scales"), x, operands, CPU)
    assert (row["right"], row["different codes"], row["different scales"]) == (False, 0, 1)


@pytest.mark.parametrize("coding", codings(), ids=lambda c: f"{c.name} {c.axes} {c.group}")
def test_every_quantizer_has_a_row_on_a_cpu(coding: Any) -> None:
    """No kernel runs there, which the row says; plain PyTorch can make each of the operands."""
    refused = check_codes(coding, (64, 96), CPU)["refused"]
    assert refused == {"kernels": "kernels need an NVIDIA GPU"}
    x = matrix(128, 64)
    operands = [plan(x, coding.quantizer, axis, group=coding.group) for axis in coding.axes]
    assert compared(PyTorch(), x, operands, CPU)["right"]


def test_kernels_are_compared_with_the_reference() -> None:
    """In Triton's interpreter: both axes in one pass, stochastic, and after a transform."""
    script = """
import json, torch
from benchmarks.first_run_checks import compared, codings, matrix
from megatron_fp4.makers import KERNELS
from testing.builders.operand_plans import plan
x = matrix(64, 64)
for coding in codings():
    if (coding.name, coding.group) in (("mxfp4-sr", 0), ("mxfp4-sr", 64), ("nvfp4-17-16-sr", 0)):
        operands = [plan(x, coding.quantizer, axis, group=coding.group) for axis in coding.axes]
        maker = KERNELS[coding.quantizer.scale]
        print(json.dumps(compared(maker, x, operands, torch.device("cpu"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 9 and all(row["right"] for row in rows), done.stderr[-3000:]


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("form", FORMATS)
def test_right_products_are_right_and_wrong_ones_are_not(form: str, output: str) -> None:
    row = check_product(Bf16(), form, OUTPUTS[output], SHAPES, CPU)
    assert row["right"] and row["largest error"] == max(row["errors"].values())
    assert row["largest error"] < row["bound"] and "refused" not in row
    row = check_product(Wrong(1.01), form, OUTPUTS[output], SHAPES, CPU)
    assert not row["right"] and row["largest error"] == pytest.approx(0.01, rel=0.3)
    row = check_product(Wrong(float("nan")), form, OUTPUTS[output], SHAPES, CPU)
    assert not row["right"] and "not finite" in row["errors"].values()


def test_a_refusal_is_recorded_with_its_reason() -> None:
    row = check_product(Sm100(), "mxfp4", OUTPUTS["bf16"], SHAPES, CPU)
    assert set(row) == {"refused"}
    assert row["refused"]["32 x 48 x 64"] == "torch's MXFP4 GEMMs need a GPU of compute " + (
        "capability 10.x"
    )


def test_a_multiplier_that_raises_is_recorded_and_the_next_ones_run() -> None:
    rows = [
        recorded(
            lambda each=each: check_product(each, "mxfp4", OUTPUTS["bf16"], SHAPES, CPU),  # type: ignore[misc]
            multiplier=each.name,
        )
        for each in (Raising(), Reference())
    ]
    assert rows[0]["multiplier"] == "raising" and "right" not in rows[0]
    assert rows[0]["raised"] == "RuntimeError: no such instruction"
    assert "in multiply" in rows[0]["traceback"]
    assert rows[1]["right"]


# --- the run --------------------------------------------------------------------------------------


def test_the_file_has_every_part_and_a_summary(tmp_path: Path) -> None:
    found: dict[str, list[Row]] = {
        "codes": [{"right": True}, {"right": False}, {"refused": {}}],
        "products:a": [{"multiplier": "a", "right": True}],
        "products:b": [{"multiplier": "b", "raised": "RuntimeError: no"}],
        "linear:mxfp4": [{"recipe": "mxfp4", "shape": [64, 32], "times bf16": 1.5}],
    }
    out = tmp_path / "first_run.json"
    result = collect({"device": ["a GPU"]}, out, found.__getitem__, dict.fromkeys(found))
    assert json.loads(out.read_text()) == result and result["parts"] == found
    assert failures(found) == {"codes": 1, "products:b": 1}
    said = result["summary"]
    assert "On a GPU, 2 of 3 checks hold." in said and "\n" not in said
    assert "correct products: a." in said and "codes (1), products:b (1)" in said
    assert "64 x 32 in mxfp4: 1.50 x BF16" in said and f"send {out}" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_and_a_part_that_ends_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "first_run.json"
    command = [sys.executable, "-m", "benchmarks.first_run", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    line = "the first run needs an NVIDIA GPU, and this machine shows none"
    assert done.returncode == 1 and done.stderr.strip() == line and not out.exists()
    [row] = in_process("products:bf16", True)
    assert row["part"] == "products:bf16" and row["raised"] == "the process ended with status 1"
    assert line in row["output"]
    [row] = in_process("codes", True, limit=0.01)
    assert row["raised"] == "no result in 0.01 seconds"


def test_every_comparison_is_run() -> None:
    files = (ROOT / "testing/kernels").glob("compare_*.py")
    # Liger-Kernel is no part of this package, and is compared where it is installed.
    assert {path.stem.removeprefix("compare_") for path in files} == {*COMPARISONS, "liger"}
