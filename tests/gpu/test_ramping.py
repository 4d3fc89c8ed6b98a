"""On a GPU: a calibration of Q-Ramping leaves a run as it was, and its periods act."""

from pathlib import Path

import pytest
import torch

from testing.worlds.launch import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
RECIPES = Path(__file__).parents[1] / "mcore"
FLAGS = """
    --bf16 --hidden-size 128 --ffn-hidden-size 256 --train-iters 8
    --attention-dropout 0.1 --hidden-dropout 0.1
""".split()
# Periods of 1 to the end, and no calibration: the same optimizer as with calm.yaml.
NEVER = "--fp4-recipe tetrajet-ramping --fp4-recipe-option ramping_interval=1000".split()
CASES = {
    "alone": "",
    "sharded": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "graphs": "--cuda-graph-impl local --attention-dropout 0 --hidden-dropout 0",
    "offloaded": "--fp4-offload-calibration",
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_calibrations_repeats_the_run_without(name: str) -> None:
    flags = (*FLAGS, *CASES[name].split())
    with_ = train(1, *flags, "--fp4-recipe", str(RECIPES / "calm.yaml"))
    assert with_.output.count("calibrated over 2 steps") == 2
    assert with_.losses == train(1, *flags, *NEVER).losses


def test_periods_change_the_steps_after_a_calibration() -> None:
    ramped = train(1, *FLAGS, "--fp4-recipe", str(RECIPES / "ramping.yaml")).losses
    plain = train(1, *FLAGS, *NEVER).losses
    assert ramped[:4] == plain[:4] and ramped[4:] != plain[4:]


def test_movements_on_the_host_give_the_same_periods() -> None:
    flags = (*FLAGS, "--fp4-recipe", str(RECIPES / "ramping.yaml"))
    offloaded = train(1, *flags, "--fp4-offload-calibration")
    assert "calibrated over 2 steps" in offloaded.output
    assert offloaded.losses == train(1, *flags).losses
