"""What passes run in C++ beside kernels and products: operators of PyTorch cost host time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_fp4.cpp.recorder import record_pass
from testing.scripts.recorded_steps import steps
from testing.worlds.launch import ROOT


def printed(*words: str) -> dict[str, Any]:
    """What testing/scripts/recorded_steps.py prints. It is a process of its own because it pretends
    to have a GPU."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "testing.scripts.recorded_steps", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return printed()


@pytest.mark.parametrize("recipe", ["tetrajet", "fp8"])
def test_quantized_operands_take_no_operator(recipe: str, recorded: dict[str, Any]) -> None:
    for name, found in recorded[recipe].items():
        assert found["operators"] == [], name
        assert found["products"] == (1 if name.startswith("forward") else 2)


def test_a_transform_of_fprop_is_undone_by_kernels() -> None:
    """The backward pass decodes and quantizes X and W again without an operator of PyTorch."""
    [found] = printed("9.0", "benchmarks/study/ablations/tetrajet-forward-hadamard.yaml").values()
    # dY, two launches each for X and W, and carriers of all operands.
    for name, launches in (("backward, makes W", 7), ("backward, reads W", 5)):
        assert found[name] == {"launches": launches, "products": 2, "operators": []}, name


def test_blackwell_s_products_are_launches() -> None:
    """Triton's GEMM of FP4 tensor cores is repeated as a kernel among others. Operators of PyTorch
    look for NaN in the codes, which kernels do where carriers are made of them."""
    found = printed("12.0", "tetrajet")["tetrajet"]
    assert {name: each["launches"] for name, each in found.items()} == {
        "forward, makes W": 3,  # quantize X and W, multiply
        "backward, makes W": 5,  # quantize dY, X's codes and W's again, multiply twice
        "forward, reads W": 2,
        "backward, reads W": 4,
    }
    looking = ["eq.Scalar", "any.default", "stack.default", "_to_copy.default"] * 2
    for name, each in found.items():
        assert each["operators"] == looking * (1 if name.startswith("forward") else 2), name
        assert each["products"] == 0


def test_each_matrix_of_fp8_takes_two_launches(recorded: dict[str, Any]) -> None:
    """X and dY are quantized along both axes: one kernel finds the maxima, and one quantizes."""
    launches = {name: found["launches"] for name, found in recorded["fp8"].items()}
    assert launches == {
        "forward, makes W": 3,
        "backward, makes W": 4,
        "forward, reads W": 2,
        "backward, reads W": 2,
    }


def test_products_in_bf16_are_all_that_pytorch_runs(recorded: dict[str, Any]) -> None:
    """Kernels quantize, count NaN, decode, and scale the products. On a CPU a product in BF16 takes
    casts of both matrices, which a GPU does not."""
    product = ["_to_copy.default"] * 2 + ["mm.default"]
    for name, found in recorded["nvfp4-nvidia"].items():
        assert found["operators"] == product * (1 if name.startswith("forward") else 2), name


def test_outliers_take_their_product_and_a_cast(recorded: dict[str, Any]) -> None:
    """The product is addmm on a GPU, and on a CPU what is counted here: casts of both matrices, and
    the product, which a kernel adds. Y is cast to BF16 too, and dW added to main_grad."""
    product = ["_to_copy.default"] * 2 + ["mm.default"]
    for name, found in recorded["dge-occ"].items():
        extra = ["_to_copy.default" if name.startswith("forward") else "add_.Tensor"]
        assert found["operators"] == product + extra, name


def test_an_operator_is_counted() -> None:
    """Negative control: one more operator, in a pass that is recorded."""
    x = torch.zeros(4)
    with record_pass([x]) as recording:
        x.new_zeros(4)
        x.exp()
    assert steps(recording)["operators"] == ["exp.default"]
