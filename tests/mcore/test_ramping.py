"""Q-Ramping in Megatron's loop: its periods, its steps, and its state in checkpoints.

test_calibrations.py shows that a calibration leaves everything else as it was.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.mcore.model.run import CALIBRATION
from megatron_fp4.mcore.model.start_lines import calibrations
from testing.worlds.checkpoint_contents import main_weights, weights
from testing.worlds.checkpoints import (
    EP2,
    MOE,
    PP2,
    SHARDED,
    SMALL,
    TP2_SP,
    run_in_turn,
    saving,
    told,
)
from testing.worlds.launch import OVERLAP, ROOT, SCRIPTS, result_of, spawn, tiny_on_mock_data, train

HERE = Path(__file__).parent
RAMPING, NEAREST = (f"--fp4-recipe {HERE / name}.yaml" for name in ("ramping", "ramping-nearest"))
BF16 = f"{SMALL} --bf16 --train-iters 8"
OVERLAPPED = " ".join(OVERLAP)
K1, K2, MOST = 0.5, 2, 4  # of both recipes
OF = "optimizer.state."


def outside(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.outside)


def step(folder: Path, number: int) -> Path:
    return folder / f"iter_{number:07d}"


def of(found: dict[str, torch.Tensor], prefix: str) -> dict[str, np.ndarray]:
    """The tensors whose keys begin with `prefix`, by the names of their weights."""
    return {k.removeprefix(prefix): t.numpy() for k, t in found.items() if k.startswith(prefix)}


def mains(folder: Path, number: int) -> dict[str, np.ndarray]:
    return {name: w.numpy() for name, w in main_weights(step(folder, number)).items()}


def quantized(w: np.ndarray) -> np.ndarray:
    """MXFP4's values of W in BF16, with OCP's scales, in numpy."""
    rounded = torch.from_numpy(w).bfloat16().double().numpy().reshape(-1, 32)
    scale = 2.0 ** (np.frexp(abs(rounded).max(1, keepdims=True))[1] - 1 - 2)
    x = np.clip(rounded / scale, -6, 6)
    spacing = np.select([abs(x) < 2, abs(x) < 4], [0.5, 1], 2)
    # Even multiples of the spacing are even codes, so numpy's ties to even are those of codes.
    return (np.rint(x / spacing) * spacing * scale).reshape(w.shape)


# --- the periods ----------------------------------------------------------------------------------

# With two layers the ranks' shares of the sharded optimizer end between two weights, with three
# within one.
THREE = "--num-layers 3"
LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, TP2_SP),
    "pp2": (2, PP2),
    "dp2-sharded": (2, f"{SHARDED} --overlap-param-gather --overlap-grad-reduce {THREE}"),
    "ep2-sharded": (2, f"{MOE} {EP2} {SHARDED}"),
}


@pytest.mark.parametrize("name", ["one", *map(outside, list(LAYOUTS)[1:])])
def test_periods_are_those_of_the_steps_that_follow(name: str, tmp_path: Path) -> None:
    """Without random bits, the steps of a calibration are those of a run without Q-Ramping."""
    processes, flags = LAYOUTS[name]
    plain, ramped = tmp_path / "plain", tmp_path / "ramped"
    runs = {
        "plain": f"--fp4-recipe mxfp4 {flags} {saving(plain, 1)} --train-iters 5",
        "ramped": f"{NEAREST} {flags} {saving(ramped, 1)} --train-iters 5",
    }
    results = run_in_turn(processes, runs, f"{SMALL} --bf16")
    assert [r.status for r in results.values()] == [0, 0], results["ramped"].output[-3000:]
    assert results["ramped"].losses[:4] == results["plain"].losses[:4]
    after = [mains(plain, number) for number in (3, 4, 5)]
    saved = [weights(step(ramped, number)) for number in (3, 4, 5)]
    assert not any((p > 1).any() for p in of(saved[0], f"{OF}fp4_ramping_period.").values())
    periods = of(saved[1], f"{OF}fp4_ramping_period.")
    assert any("fc1" in key for key in periods) and not any("embedding" in key for key in periods)
    for key, found in periods.items():
        ws = [of_step[key].astype(np.float64) for of_step in after]
        qs = [quantized(of_step[key]) for of_step in after]
        moved = abs(ws[1] - ws[0]) + abs(ws[2] - ws[1])
        ratio = (abs(qs[1] - qs[0]) + abs(qs[2] - qs[1])) / (moved + 1e-8) / K1
        clear = abs(ratio - ratio.round()) > 1e-4 * ratio  # sums are in float32
        wanted = np.minimum(K2 * np.floor(ratio) + 1, MOST)
        assert (found == wanted)[clear | (ratio == 0)].all(), key
        assert (found > 1).mean() > 0.02 and clear.mean() > 0.02
        ended = abs(qs[2] - qs[0]) / (abs(ws[2] - ws[0]) + 1e-8) / K1  # the control: no sums
        assert (found != np.minimum(K2 * np.floor(ended) + 1, MOST)).any()
    check_steps(mains(ramped, 4), mains(ramped, 5), saved[1], saved[2])


def check_steps(
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
    saved: dict[str, torch.Tensor],
    last: dict[str, torch.Tensor],
) -> None:
    """The two steps after the calibration: elements with a period of 2 or more were not due."""
    rate = 1e-4 + 9e-4 * 0.5 * (1 + np.cos(np.pi * 4 / 10))  # of TINY in the fifth step
    for key, period in of(saved, f"{OF}fp4_ramping_period.").items():
        count, summed = (of(last, f"{OF}fp4_ramping_{what}.")[key] for what in ("count", "sum"))
        waits = period > 2
        assert (count[waits] == 2).all() and (summed[waits] != 0).mean() > 0.5
        assert not count[period == 1].any() and not summed[period == 1].any()
        decayed = before[key] * np.float32(1 - rate * 0.01)
        np.testing.assert_allclose(after[key][waits], decayed[waits], rtol=2e-7)
        assert (abs(after[key] - decayed) > 1e-6)[period == 1].mean() > 0.5


@pytest.mark.slow
def test_data_parallel_layouts_repeat_one_process_bit_for_bit() -> None:
    # The norm by which gradients are clipped is a sum in the order of the shards.
    flags = (*BF16.split(), *RAMPING.split(), *THREE.split(), "--clip-grad", "0")
    one = train(1, *flags)
    assert one.output.count("calibrated over 2 steps") == 2 and len(one.losses) == 8
    assert "% of the weights' elements have periods above 1" in one.output
    for sharded in ((), OVERLAP):
        assert train(2, *flags, *sharded).losses == one.losses
    assert train(1, *flags, "--fp4-offload-calibration").losses == one.losses
    plain = train(1, *flags, "--fp4-recipe", "tetrajet").losses
    assert plain[:4] == one.losses[:4] and plain[4:] != one.losses[4:]


@pytest.mark.outside
def test_movements_of_another_part_of_a_weight_are_noticed(tmp_path: Path) -> None:
    """The control: Q(W) is cut as if each rank's part began where the weight does."""
    processes, flags = LAYOUTS["dp2-sharded"]
    periods = []
    for forgets in ("nothing", "place"):
        folder = tmp_path / forgets
        words = f"{SMALL} --bf16 {NEAREST} {flags} {saving(folder, 4)} --train-iters 5"
        given = forgets, *tiny_on_mock_data(*words.split())
        assert not spawn(processes, SCRIPTS / "pretrain_forgetting.py", *given).returncode
        periods.append(of(weights(step(folder, 4)), f"{OF}fp4_ramping_period."))
    right, wrong = periods
    assert any((right[key] != wrong[key]).any() for key in right)


def test_a_calibration_draws_bits_that_no_step_draws() -> None:
    """Of the steps before it, of the calibration before it, of its own other steps."""
    interval, calibration = 40, 30
    drawn = [s for s in range(0, 400)]
    drawn += [CALIBRATION + s + k for s in range(interval, 400, interval)
              for k in range(calibration)]  # fmt: skip
    assert len({number & 0xFFFFFFFF for number in drawn}) == len(drawn)


# --- checkpoints ----------------------------------------------------------------------------------

CASES = {
    "bf16": (1, BF16, ""),
    "phases": (1, BF16, f"--fp4-recipe {HERE / 'ramping-phases.yaml'}"),
    "fp32": (1, f"{SMALL} --train-iters 8", ""),
    "fp16": (1, f"{SMALL} --train-iters 8 --fp16 --loss-scale 128", ""),
    "torch": (1, BF16, "--ckpt-format torch"),
    "dp2-sharded": (2, BF16, "--use-distributed-optimizer"),
    "dp2-sharded-fp32": (2, f"{SMALL} --train-iters 8", "--use-distributed-optimizer"),
    "dp2-reshardable": (2, BF16, SHARDED),
    "dp2-overlapped": (2, BF16, OVERLAPPED),
    "tp2": (2, BF16, TP2_SP),
    "pp2": (2, BF16, PP2),
    "ep2-reshardable": (2, BF16, f"{MOE} {EP2} {SHARDED}"),
}


QUICKER = ["bf16", "phases", "dp2-overlapped"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICKER, *(outside(n) for n in CASES if n not in QUICKER)])
def test_a_resumed_run_repeats_the_whole(name: str, tmp_path: Path) -> None:
    """From between two updates of elements with long periods, over the next calibration; with
    phases from right before it, when the run has taken no step yet that says which phase it is."""
    processes, sizes, flags = CASES[name]
    at = 6 if name == "phases" else 5
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    runs = {
        "whole": f"{RAMPING} {flags} {saving(whole, at)}",
        "rest": f"{RAMPING} {flags} --load {whole} --ckpt-step {at} {saving(rest, at)}",
    }
    results = run_in_turn(processes, runs, sizes)
    assert [r.status for r in results.values()] == [0, 0], results["rest"].output[-3000:]
    assert results["rest"].losses == results["whole"].losses[at:]
    if "torch" in flags:
        return
    one, other = weights(step(whole, 8)), weights(step(rest, 8))
    assert one.keys() == other.keys() and any("fp4_ramping_count" in key for key in one)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.outside
@pytest.mark.parametrize("sharding", ["--use-distributed-optimizer", SHARDED])
def test_a_run_resumes_where_transformer_engine_is_installed(sharding: str, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    losses = []
    for flags in (saving(whole, 5), f"--load {whole} --ckpt-step 5 {saving(rest, 5)}"):
        words = tiny_on_mock_data(*f"{BF16} {RAMPING} {sharding} {flags}".split())
        done = result_of(spawn(2, SCRIPTS / "pretrain_as_with_fused_adam.py", *words))
        assert done.status == 0, done.output[-3000:]
        losses.append(done.losses)
    assert losses[1] == losses[0][5:]
    one, other = weights(step(whole, 8)), weights(step(rest, 8))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_calibration_repeats_the_whole(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = f"{RAMPING} {OVERLAPPED} --micro-batch-size 1"  # two microbatches a step on a rank
    runs = {
        "whole": f"{flags} {saving(whole, 2)}",
        "killed": f"dies=calibration {flags} {saving(killed, 2)}",
        "rest": f"{flags} --load {killed} {saving(killed, 2)}",
    }
    results = run_in_turn(2, runs, BF16)
    assert results["killed"].status and len(results["killed"].losses) == 3
    assert results["rest"].losses == results["whole"].losses[2:]
    one, other = weights(step(whole, 8)), weights(step(killed, 8))
    assert all(torch.equal(one[key], other[key]) for key in one)


CHANGES = {
    "tetrajet-to-ramping": ("--fp4-recipe tetrajet", RAMPING, "it goes on with periods of W"),
    "bf16-to-ramping": ("", RAMPING, "has no periods of the weights: they start at 1"),
    "ramping-to-tetrajet": (RAMPING, "--fp4-recipe tetrajet", "it goes on without periods of W"),
    "ema-to-ramping": (f"--fp4-recipe {HERE / 'ema.yaml'}", RAMPING, "without averages of W"),
    "ramping-to-bf16": (RAMPING, "", "this launch has none"),
}


@pytest.mark.outside
@pytest.mark.parametrize("sharded", ["", SHARDED])
@pytest.mark.parametrize("name", list(CHANGES))
def test_other_recipes_load_and_are_loaded(name: str, sharded: str, tmp_path: Path) -> None:
    saved, launched, says = CHANGES[name]
    first, second = tmp_path / "first", tmp_path / "second"
    runs = {
        "first": f"--bf16 {saved} {sharded} {saving(first)} --train-iters 4",
        "second": f"--bf16 {launched} {sharded} --load {first} {saving(second, 1)} "
        "--train-iters 8 --override-opt_param-scheduler",
    }
    results = run_in_turn(2 if sharded else 1, runs, SMALL)
    assert [r.status for r in results.values()] == [0, 0], results["second"].output[-3000:]
    assert says in results["second"].output
    periods = of(weights(step(second, 8)), f"{OF}fp4_ramping_period.")
    assert bool(periods) == (launched == RAMPING)
    assert all((period > 1).any() for period in periods.values())


CHAINS = {
    "tp2-to-one": ((2, TP2_SP), (1, "")),
    "tp2-to-pp2-sharded": ((2, f"{TP2_SP} {SHARDED}"), (2, f"{PP2} {SHARDED}")),
    "dp2-to-tp2-sharded": ((2, SHARDED), (2, f"{TP2_SP} {SHARDED}")),
    "ep2-to-one-sharded": ((2, f"{MOE} {EP2} {SHARDED}"), (1, f"{MOE} {SHARDED}")),
}


@pytest.mark.outside
@pytest.mark.parametrize("name", list(CHAINS))
def test_another_layout_goes_on_with_the_same_periods(name: str, tmp_path: Path) -> None:
    """It loads and, without a step left to train, saves them again."""
    (processes, flags), (others, other_flags) = CHAINS[name]
    first, second = tmp_path / "first", tmp_path / "second"
    sizes = f"{SMALL} --bf16 --train-iters 5"
    run_in_turn(processes, {"first": f"{RAMPING} {flags} {saving(first, 5)}"}, sizes)
    going = f"{RAMPING} {other_flags} --load {first} --save {second} --save-interval 1000"
    [result] = run_in_turn(others, {"second": going}, sizes).values()
    assert result.status == 0, result.output[-3000:]
    one, other = weights(step(first, 5)), weights(step(second, 5))
    keys = [key for key in one if "fp4_ramping" in key]
    assert keys and any(one[key].any() for key in keys if "sum" in key)
    assert all(torch.equal(one[key].float(), other[key].float()) for key in keys)


# --- what is said and refused ---------------------------------------------------------------------


def test_the_start_table_says_what_calibrations_take() -> None:
    args = Namespace(train_iters=1000, train_samples=None, step_batch_size_schedule=None,
                     global_batch_size=4, fp4_offload_calibration=False)  # fmt: skip
    ramping, elements = Ramping(interval=100), (2**20, 3 * 2**20)
    line = calibrations(ramping, args, *elements)
    assert "sums, counts and periods of 8.0 MiB on a rank" in line
    assert "9 calibrations of 30 steps, each with 52.0 MiB more, sharded" in line
    args.train_iters, args.train_samples, args.fp4_offload_calibration = None, 2000, True
    line = calibrations(ramping, args, *elements)
    assert "4 calibrations of 30 steps, each with 52.0 MiB more on the host" in line
    args.step_batch_size_schedule = "0:2 100:4"  # Megatron counts its steps later
    assert "like it; calibrations of 30 steps" in calibrations(ramping, args, *elements)


def test_a_training_without_a_calibration_says_so() -> None:
    flags = f"{RAMPING} --train-samples 4 --lr-decay-samples 40"
    sizes = f"{SMALL} --bf16"
    words = [w for w in tiny_on_mock_data(*f"{flags} {sizes}".split())]
    for name in ("--train-iters", "--lr-decay-iters"):
        del words[words.index(name) : words.index(name) + 2]
    result = result_of(spawn(1, ROOT / "pretrain_gpt.py", *words))
    assert "Q-Ramping does nothing: 1 steps end before a calibration after 3" in result.output
    assert result.status == 0, result.output[-2000:]


REFUSED = {
    "--optimizer sgd": "which --optimizer sgd does not support",
    "--use-precision-aware-optimizer --use-distributed-optimizer": "keeps periods beside the",
    "--dataloader-type external": "which --dataloader-type external does not support",
    "--fp4-module-recipe *fc1=tetrajet-ema": "the average of recipe tetrajet-ema does not support",
    "--fp4-module-recipe *fc1=tetrajet-ramping": "calibrate in different ways",
}


@pytest.mark.parametrize("flags", list(REFUSED))
def test_what_is_refused(flags: str) -> None:
    [result] = run_in_turn(1, {"run": f"{RAMPING} {flags}"}, BF16).values()
    assert REFUSED[flags] in told(result)


def test_a_flag_without_a_calibration_is_refused() -> None:
    flags = "--fp4-recipe tetrajet --fp4-offload-calibration"
    [result] = run_in_turn(1, {"run": flags}, BF16).values()
    assert "needs a recipe with ramping: leave it out" in told(result)
