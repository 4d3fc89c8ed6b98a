"""What benchmarks/linear_kernels.py makes of the kernels that ran, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import linear, linear_kernels
from benchmarks.linear_kernels import Ran, by_call, floors, of_kinds, times
from megatron_fp4 import get_recipe
from testing.worlds.launch import ROOT

NAMES = {"quantize": "quantize_kernel", "carry": "carry_kernel", "gemm": "nvjet_qqtst_128x256"}


def test_the_kernels_floors_add_up_to_the_linear_s() -> None:
    """Its bytes are counted in benchmarks/linear.py from the recipe, not from the kernels."""
    inputs, outputs, speed = 4096, 14336, 4e12
    products = [100.0, 200.0, 300.0]
    whole = 600 + linear.moved(get_recipe("tetrajet"), inputs, outputs) / speed * 1e6
    assert sum(floors(inputs, outputs, speed, products)) == pytest.approx(whole)


def test_calls_are_told_apart_and_timed() -> None:
    kinds = ["quantize", "gemm"]
    starts = [0.0, 5.0, 20.0, 27.0, 40.0, 46.0]
    kernels = [
        Ran(NAMES[kind], start, start + (4 if kind == "gemm" else 3))
        for kind, start in zip(kinds * 3, starts, strict=True)
    ]
    waits = [Ran("at::cuda::spin_kernel(long)", at - 4, at - 1) for at in starts[::2]]
    others = [*waits, Ran("Memset (Device)", 3, 3.5)]
    given = [*others, *kernels[::-1]]  # the profiler has them in any order
    calls = of_kinds(by_call(given), kinds)
    assert [len(replay) for replay in calls] == [2, 2, 2]
    assert times(calls) == [3, 4, 3]  # idle between the two: 2, 4 and 3


def test_other_kernels_are_an_error() -> None:
    call = [Ran(NAMES["quantize"], 0, 1), Ran("elementwise_kernel", 2, 3)]
    with pytest.raises(ValueError, match="elementwise"):
        of_kinds([call], ["quantize", "gemm"])


def test_each_step_is_a_kernel_of_the_recording() -> None:
    """Of the passes that make W's operands, as a linear for a Hopper GPU records them."""
    command = [sys.executable, "-m", "testing.scripts.recorded_steps", "9.0", "tetrajet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    passes = json.loads(done.stdout)["tetrajet"]
    made = [passes[f"{direction}, makes W"] for direction in ("forward", "backward")]
    kinds = [step.kind for step in linear_kernels.STEPS]
    assert (kinds.count("quantize") + kinds.count("carry"), kinds.count("gemm")) == (8, 3)
    assert (sum(p["launches"] for p in made), sum(p["products"] for p in made)) == (8, 3)
