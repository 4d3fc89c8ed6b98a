"""The executor in C++ computes the bits of the one in Python, and known mistakes do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from megatron_fp4.recipes import uniform_recipes
from testing.worlds.launch import ROOT

SCRIPT = "testing/scripts/compare_executors.py"
LAYOUTS = "testing/scripts/compare_layouts.py"
ESTIMATED, CENTERED = "tests/cpp/estimated.yaml", "tests/cpp/centered.yaml"
OUTER, HOT = "tests/cpp/outer_scale.yaml", "tests/cpp/hot.yaml"


def compared(
    *words: str, ranks: int = 1, interpreted: bool = False, script: str = SCRIPT
) -> dict[str, Any]:
    """What the script says of each case."""
    launch = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ran = subprocess.run(
        [*launch, script, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": str(int(interpreted))},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_operators_of_pytorch_and_collectives(ranks: int) -> None:
    found = compared("fp8", *["--mlps"] * (ranks == 1), ranks=ranks)
    assert len(found) == (12 if ranks == 1 else 8)
    for name, case in found.items():
        assert case["equal"] and not case["problems"], (name, case)
        assert case["in C++"] >= case["passes"] // 2, (name, case)


@pytest.mark.slow
def test_w_that_comes_as_codes() -> None:
    """W itself is NaN in the passes in C++."""
    found = compared("tetrajet", "tetrajet-ema", "--sent")
    assert len(found) == 10
    for name, case in found.items():
        assert case["equal"] and not case["problems"], (name, case)
        assert case["in C++"] >= case["passes"] // 2, (name, case)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", [ESTIMATED, CENTERED, OUTER, HOT])
def test_operators_on_gradients_and_on_x(recipe: str, ranks: int) -> None:
    found = compared(recipe, *["--mlps"] * (ranks == 1), ranks=ranks)
    for name, case in found.items():
        assert case["equal"] and not case["problems"], (name, case)
        assert case["in C++"] >= case["passes"] // 2, (name, case)


@pytest.mark.outside
def test_w_that_comes_as_codes_in_kernels() -> None:
    for name, case in compared("tetrajet", "--sent", interpreted=True).items():
        assert case["equal"] and not case["problems"], (name, case)


@pytest.mark.slow
def test_codes_of_w_that_the_backward_pass_makes_again() -> None:
    for name, case in compared("tetrajet", "--remade", interpreted=True).items():
        assert case["equal"] and not case["problems"], (name, case)
        assert case["in C++"] >= case["passes"] // 2, (name, case)


OTHERS = [name for name in uniform_recipes() if name not in ("tetrajet", "fp8")]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("tetrajet", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.outside) for name in OTHERS),
    ],
)
def test_kernels_and_products_of_cublas(recipe: str) -> None:
    for name, case in compared(recipe, interpreted=True).items():
        assert case["equal"] and not case["problems"], (name, case)
        assert case["in C++"] >= case["passes"] // 2, (name, case)


@pytest.mark.outside
def test_an_mlp_in_kernels() -> None:
    for name, case in compared("tetrajet", "--mlps", interpreted=True).items():
        assert case["equal"] and not case["problems"], (name, case)


@pytest.mark.outside
def test_codes_on_two_ranks() -> None:
    for name, case in compared("tetrajet", ranks=2, interpreted=True).items():
        assert case["equal"] and not case["problems"], (name, case)


@pytest.mark.outside
def test_a_layout_of_arguments_that_is_not_known_stays_in_python() -> None:
    """Where the small kernel of the start shows it, and where later kernels alone do."""
    found = compared("mxfp4", interpreted=True, script=LAYOUTS)
    known, unknown, later, mistaken = found.values()
    why = (
        f"Triton {version('triton')} lays out the arguments of kernels in a way that is not known "
        "here: install a version that README.md lists"
    )
    in_cpp = "linears run in C++ once their calls have been recorded, in the first steps"
    in_python = f"linears run in Python: the executor in C++ cannot launch kernels: {why}"
    assert known["table"] == [in_cpp] and not known["problems"] and known["in C++"]
    assert unknown == {"table": [in_python], "in C++": 0, "problems": [], "equal": True}
    # What the table would say, were no kernel compiled at the start.
    assert later == {"table": [in_cpp], "in C++": 0, "problems": [why], "equal": True}
    # Negative control: bits that differ are noticed.
    assert mistaken == known | {"equal": False}


@pytest.mark.slow
def test_a_flag_that_is_left_out_is_noticed() -> None:
    """Where dW is added to main_grad, and nowhere else."""
    found = compared("fp8", "--mistake", "grad_added_to_main_grad left out")
    assert {name: case["equal"] for name, case in found.items()} == {
        name: "fused" not in name for name in found
    }
    assert len({case["equal"] for case in found.values()}) == 2


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param("a step that stays", marks=pytest.mark.slow),
        pytest.param("memory that is used again too early", marks=pytest.mark.outside),
    ],
)
def test_known_mistakes_are_noticed(mistake: str) -> None:
    found = compared("tetrajet", "--mistake", mistake, interpreted=True)
    assert not any(case["equal"] for case in found.values()), found
