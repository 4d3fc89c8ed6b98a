"""The rotary embedding of one kernel against float64, in Triton's interpreter, and compiled."""

import pytest
import torch

from megatron_fp4.kernels import rotary
from testing.kernels.compiling import compiled_launch, sass
from testing.kernels.interpreter import differences


@pytest.mark.slow
def test_results_are_those_of_float64_and_mistakes_are_noticed() -> None:
    assert differences("rotary") == [""]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("backward", [False, True])
def test_a_head_of_llama_is_moved_16_bytes_at_a_time(backward: bool, capability: int) -> None:
    strides = tuple((2 * n * 128, n * 128, 128) for n in (32, 8, 8))
    launch = rotary._launch(torch.bfloat16, (8192, 2, 8), strides, 6, 128, 128, backward)
    lines = sass(compiled_launch(launch, capability)["cubin"]).splitlines()
    moves = [line for line in lines if "LDG" in line or "STG" in line]
    assert moves and all(".128" in line for line in moves)
    assert not any("LDL" in line or "STL" in line for line in lines)  # no spills
