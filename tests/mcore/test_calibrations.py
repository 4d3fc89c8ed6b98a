"""A calibration of Q-Ramping leaves a run as it was, in every layout and precision."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path

import pytest
import torch

from testing.worlds.checkpoint_contents import weights
from testing.worlds.checkpoints import EP2, MOE, PP2, SHARDED, SMALL, TP2_SP
from testing.worlds.launch import OVERLAP, SCRIPTS, Result, result_of, spawn, tiny_on_mock_data

HERE = Path(__file__).parent
CALM, RAMPING = (f"--fp4-recipe {HERE / name}.yaml" for name in ("calm", "ramping"))
UNTIED = "--untie-embeddings-and-output-weights"
TIED = "tied"  # leaves UNTIED out
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
STEPS = f"{SMALL} --train-iters 8 --save-interval 4 {DROPOUT}"
BIASED = f"{MOE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
FP16 = "--fp16 --initial-loss-scale 65536 --loss-scale-window 2"
VPP = f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"


def launch(processes: int, flags: str, forgets: str = "nothing") -> Result:
    words = [forgets, *tiny_on_mock_data(*STEPS.split(), *shlex.split(flags))]
    if TIED in words:
        words = [word for word in words if word not in (TIED, UNTIED)]
    result = result_of(spawn(processes, SCRIPTS / "pretrain_forgetting.py", *words))
    assert result.status == 0, result.output[-4000:]
    return result


CASES = {
    "bf16": (1, "--bf16"),
    "fp32": (1, ""),
    "fp16": (1, FP16),
    "recomputed": (1, "--bf16 --recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1"),
    "growing-batch": (1, "--bf16 --step-batch-size-schedule '0:2 640:4'"),
    "rerun": (1, "--bf16 --rerun-mode validate_results"),
    "experts": (1, f"--bf16 {BIASED}"),
    "tied": (2, f"--bf16 {PP2} --use-distributed-optimizer {TIED}"),
    "skipped": (1, "--bf16 --iterations-to-skip 4"),
    "dp2": (2, "--bf16"),
    "dp2-overlapped": (2, f"--bf16 {' '.join(OVERLAP)}"),
    "dp2-overlapped-fp32": (2, " ".join(OVERLAP)),
    "tp2": (2, f"--bf16 {TP2_SP}"),
    "pp2": (2, f"--bf16 {PP2}"),
    "vpp2": (2, f"--bf16 {VPP}"),
    "ep2-sharded": (2, f"--bf16 {BIASED} {EP2} {SHARDED}"),
    "fp16-dp2-sharded": (2, f"{FP16} --use-distributed-optimizer"),
}  # fmt: skip


@cache
def undisturbed(name: str, folder: Path) -> Result:
    processes, flags = CASES[name]
    return launch(processes, f"--fp4-recipe tetrajet {flags} --save {folder}")


def outside(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.outside)


@pytest.mark.parametrize("name", ["bf16", *map(outside, list(CASES)[1:])])
def test_a_run_with_calibrations_repeats_the_run_without(name: str, tmp_path: Path) -> None:
    processes, flags = CASES[name]
    without = undisturbed(name, tmp_path / "without")
    with_ = launch(processes, f"{CALM} {flags} --save {tmp_path / 'with'}")
    assert with_.output.count("megatron-fp4: calibrated over 2 steps") == 2
    assert with_.losses == without.losses
    one, other = (weights(tmp_path / f / "iter_0000008") for f in ("without", "with"))
    own = {key for key in other if "fp4_ramping" in key}
    assert own and one.keys() == other.keys() - own
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.outside
@pytest.mark.parametrize("name", ["bf16", "dp2-overlapped"])
def test_metrics_do_not_see_a_calibration(name: str, tmp_path: Path) -> None:
    processes, flags = CASES[name]
    found: list[list[dict[str, object]]] = []
    for recipe in ("--fp4-recipe tetrajet", CALM):
        folder = tmp_path / str(len(found))
        launch(processes, f"{recipe} {flags} --save {folder} --fp4-metrics-interval 1")
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        found.append([line for line in lines if line["kind"] in ("operand", "weight", "gradient")])
    assert len(found[0]) > 100 and found[0] == found[1]


FORGOTTEN = {
    "data": "bf16",
    "random_state": "bf16",
    "weights_and_moments": "bf16",
    "moments": "bf16",
    "rate": "bf16",
    "loss_scale": "fp16",
    "buffers": "experts",
}


@pytest.mark.parametrize("forgets", ["data", *map(outside, list(FORGOTTEN)[1:])])
def test_what_is_not_brought_back_is_noticed(forgets: str, tmp_path: Path) -> None:
    name = FORGOTTEN[forgets]
    processes, flags = CASES[name]
    without = undisturbed(name, tmp_path / "without")
    found = launch(processes, f"{CALM} {flags} --save {tmp_path / 'with'}", forgets)
    one, other = (weights(tmp_path / f / "iter_0000008") for f in ("without", "with"))
    assert found.losses[:3] == without.losses[:3]
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.outside
@pytest.mark.parametrize("forgets", ["calibrates", "epoch"])
def test_what_changes_periods_and_sums_is_noticed(forgets: str) -> None:
    """AdamW's own step, and weights that are quantized anew, in a calibration."""
    right, wrong = (launch(1, f"{RAMPING} --bf16", each) for each in ("nothing", forgets))
    assert right.losses[:3] == wrong.losses[:3] and right.losses != wrong.losses


@pytest.mark.outside
def test_a_calibration_right_after_a_start_gathers_the_weights(tmp_path: Path) -> None:
    """Megatron gathers none in the first iteration, even with --overlap-param-gather."""
    flags = f"{RAMPING} {CASES['dp2-overlapped'][1]} --save {tmp_path} --save-interval 3"
    whole = launch(2, flags)
    going = f"{RAMPING} {CASES['dp2-overlapped'][1]} --load {tmp_path} --ckpt-step 3"
    assert launch(2, going).losses == whole.losses[3:]
    assert launch(2, going, "gather").losses != whole.losses[3:]
