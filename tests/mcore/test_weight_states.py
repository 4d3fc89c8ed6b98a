"""State beside weights: the same in every layout, and in every checkpoint that keeps it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from testing.worlds.checkpoint_contents import averages, contents, main_weights, weights
from testing.worlds.checkpoints import (
    EP2,
    MOE,
    PP2,
    SHARDED,
    SMALL,
    TORCH,
    TP2_SP,
    run_in_turn,
    saving,
    told,
)
from testing.worlds.launch import OVERLAP, train

EMA = f"--fp4-recipe {Path(__file__).parent / 'ema.yaml'}"
BF16 = f"{SMALL} --bf16"
OVERLAPPED = " ".join(OVERLAP)
BETA = 0.75


def step(folder: Path, number: int) -> Path:
    return folder / f"iter_{number:07d}"


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


def test_an_evaluation_alone_says_that_it_has_no_average(tmp_path: Path) -> None:
    """Megatron makes no optimizer then, which would keep it."""
    trained = train(1, *f"{EMA} {BF16} {saving(tmp_path)}".split())
    assert "average of each weight in float32" in trained.output
    evaluated = train(1, *f"{EMA} {BF16} --load {tmp_path} --skip-train".split())
    assert "no average under --skip-train" in evaluated.output
    assert "average of each weight in float32" not in evaluated.output


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_data_parallel_layouts_repeat_one_process_bit_for_bit() -> None:
    """The same sums, whoever owns which part of a weight; and the average is read."""
    # With three layers the halves of the parameters divide a linear's weight.
    flags = (*BF16.split(), *EMA.split(), "--num-layers", "3", "--clip-grad", "0")
    one = train(1, *flags).losses
    assert len(one) == 4
    for sharded in ((), ("--use-distributed-optimizer",), OVERLAP):
        assert train(2, *flags, *sharded).losses == one
    nearest = train(1, *flags, "--fp4-recipe", "tetrajet").losses
    # The average starts at the weights themselves, to which nearest rounding rounds too.
    assert nearest[0] == one[0] and nearest[2:] != one[2:]


# --- checkpoints ----------------------------------------------------------------------------------

CASES = {
    "bf16": (1, BF16, ""),
    "fp32": (1, SMALL, ""),
    "fp16": (1, f"{SMALL} --fp16 --loss-scale 128", ""),
    "sgd": (1, f"{BF16} --optimizer sgd", ""),
    "torch": (1, BF16, TORCH),
    "dp2-sharded": (2, BF16, "--use-distributed-optimizer"),
    "dp2-sharded-fp32": (2, SMALL, "--use-distributed-optimizer"),
    "dp2-reshardable": (2, BF16, SHARDED),
    "dp2-overlapped": (2, BF16, OVERLAPPED),
    "tp2": (2, BF16, TP2_SP),
    "pp2": (2, BF16, PP2),
    "ep2-reshardable": (2, BF16, f"{MOE} {EP2} {SHARDED}"),
}


@pytest.mark.parametrize("name", ["bf16", *map(slow, list(CASES)[1:])])
def test_a_resumed_run_repeats_the_whole(name: str, tmp_path: Path) -> None:
    processes, sizes, flags = CASES[name]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    trainings = {
        "whole": f"{EMA} {flags} {saving(whole)}",
        "rest": f"{EMA} {flags} --load {whole} --ckpt-step 2 {saving(rest)}",
    }
    results = run_in_turn(processes, trainings, sizes)
    assert [r.status for r in results.values()] == [0, 0], results["rest"].output[-3000:]
    assert results["rest"].losses == results["whole"].losses[2:]
    one, other = (leaves(contents(step(folder, 4))) for folder in (whole, rest))
    assert one.keys() == other.keys() and any("fp4_average" in key for key in one)
    assert all(torch.equal(one[key], other[key]) for key in one)


def leaves(value: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors in nested containers, without random states and what a launch says of itself."""
    if torch.is_tensor(value):
        return {name: value}
    if not isinstance(value, dict | list | tuple):
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Tensor] = {}
    for key, part in items:
        if not str(key).startswith(("args", "rng_state", "rerun_state")):
            found |= leaves(part, f"{name}/{key}")
    return found


# The layout that saves, and the one that goes on.
CHAINS = {
    "tp2-to-one": ((2, TP2_SP), (1, "")),
    "one-to-tp2": ((1, ""), (2, TP2_SP)),
    "tp2-to-pp2-sharded": ((2, f"{TP2_SP} {SHARDED}"), (2, f"{PP2} {SHARDED}")),
    "dp2-to-tp2-sharded": ((2, SHARDED), (2, f"{TP2_SP} {SHARDED}")),
    "ep2-to-one-sharded": ((2, f"{MOE} {EP2} {SHARDED}"), (1, f"{MOE} {SHARDED}")),
}


@pytest.mark.parametrize("name", ["tp2-to-one", *map(slow, list(CHAINS)[1:])])
def test_another_layout_goes_on_with_the_same_averages(name: str, tmp_path: Path) -> None:
    """What the second layout saves after one step is the formula's result of what the first saved
    and of the new weights, element by element; SwiGLU's two halves of fc1 among them."""
    (processes, flags), (others, other_flags) = CHAINS[name]
    first, second = tmp_path / "first", tmp_path / "second"
    saved = run_in_turn(
        processes, {"first": f"{EMA} {flags} {saving(first)} --train-iters 2"}, BF16
    )
    going = f"{EMA} {other_flags} --load {first} {saving(second, 1)} --train-iters 3"
    loaded = run_in_turn(others, {"second": f"{going} --override-opt_param-scheduler"}, BF16)
    assert saved["first"].status == 0
    assert loaded["second"].status == 0, loaded["second"].output[-3000:]
    before, after = averages(step(first, 2)), averages(step(second, 3))
    weights = main_weights(step(second, 3))
    assert before.keys() == after.keys() and any("linear_fc1" in key for key in before)
    for key, average in before.items():
        wanted = average * BETA + weights[key].float() * (1 - BETA)
        assert torch.equal(after[key], wanted), key
        assert not torch.equal(average, after[key])  # the control: it moved


# Of the checkpoint and of the launch that loads it, and what the launch says of the average.
STARTS = "has no average of the weights: it starts at the weights"
CHANGES = {
    "tetrajet-to-ema": ("--fp4-recipe tetrajet", EMA, "it goes on with averages of W"),
    "bf16-to-ema": ("", EMA, STARTS),
    "ema-to-tetrajet": (EMA, "--fp4-recipe tetrajet", "it goes on without averages of W"),
    "ema-to-bf16": (EMA, "", "this launch has none"),
}


@pytest.mark.parametrize("sharded", ["", slow(SHARDED)])
@pytest.mark.parametrize("name", ["tetrajet-to-ema", *map(slow, list(CHANGES)[1:])])
def test_recipes_with_and_without_averages_load_each_other_s_checkpoints(
    name: str, sharded: str, tmp_path: Path
) -> None:
    """An average that a checkpoint lacks starts at its weights; one that it has is left out."""
    saved, launched, says = CHANGES[name]
    first, second = tmp_path / "first", tmp_path / "second"
    results = run_in_turn(
        2 if sharded else 1,
        {
            "first": f"--bf16 {saved} {sharded} {saving(first)} --train-iters 2",
            "second": f"--bf16 {launched} {sharded} --load {first} {saving(second, 1)} "
            "--train-iters 3 --override-opt_param-scheduler",
        },
        BF16,
    )
    assert [r.status for r in results.values()] == [0, 0], results["second"].output[-3000:]
    assert says in results["second"].output
    before, weights = main_weights(step(first, 2)), main_weights(step(second, 3))
    found = averages(step(second, 3))
    assert bool(found) == (launched == EMA)
    assert (STARTS in results["second"].output) == bool(found)
    for key, average in found.items():
        assert torch.equal(average, before[key] * BETA + weights[key] * (1 - BETA))


# --- states of some weights -----------------------------------------------------------------------

HERE = Path(__file__).parent
# Recipes of a run in which only some weights have a state, and of one in which all have: the second
# part of each is a module recipe. By kind of linear, and by layer.
PARTS = {
    "kinds": ("tetrajet --fp4-module-recipe *linear_fc1={0}",
              "{0} --fp4-module-recipe *linear_fc1={0}", 6),
    "layers": ("{0} --fp4-module-recipe decoder.layers.0.*=tetrajet",
               "{0} --fp4-module-recipe decoder.layers.0.*={0}", 4),
}  # fmt: skip
FORMATS = {"whole": (1, ""), "sharded": (2, "--use-distributed-optimizer"), "named": (2, SHARDED)}
STATE = "optimizer.state.fp4_"
PARTIAL = [("kinds", "whole"), *(
    pytest.param(*pair, marks=pytest.mark.outside)
    for pair in product(PARTS, FORMATS) if pair != ("kinds", "whole")
)]  # fmt: skip


def had_in(parts: str, key: str) -> np.ndarray:
    """Which layers of a stacked weight had a state, as a mask [layers, 1, 1]."""
    mask = [True, True] if parts == "kinds" and "linear_fc1" in key else [False, parts == "layers"]
    return np.array(mask).reshape(2, 1, 1)


def goes_on(parts: str, kind: str, recipe: str, steps: int, folder: Path) -> tuple[list[Path], str]:
    """Trains `steps` steps with a recipe's state of some weights, one with that of all, and one of
    some again; returns the checkpoints and what the second launch printed.

    The states in the checkpoints are under the weights' names. With the distributed optimizer's
    default format the launches load others, of the same trainings, which have them in buckets.
    """
    processes, flags = FORMATS[kind]
    named = SHARDED if flags else ""
    some, everything, _ = PARTS[parts]
    path = HERE / f"{recipe}.yaml"
    trainings, source = {}, ""
    for number, recipes in enumerate((some, everything, some)):
        last = steps + number
        each = (
            f"--fp4-recipe {recipes.format(path)} {source} --exit-interval {last} --train-iters 12"
        )
        for name, format_flags in {"named": named, "loaded": flags}.items():
            if name == "named" or flags != named:
                saved = folder / f"{number}-{name}"
                trainings[f"{number}-{name}"] = f"{each} {format_flags} {saving(saved, last)}"
        source = f"--load {folder / list(trainings)[-1]}"
    results = run_in_turn(processes, trainings, BF16)
    for name, result in results.items():
        assert result.status == 0, (name, result.output[-3000:])
    paths = [step(folder / f"{number}-named", steps + number) for number in range(3)]
    return paths, results["1-named"].output


@pytest.mark.parametrize(("parts", "kind"), PARTIAL)
def test_averages_that_only_some_weights_had(parts: str, kind: str, tmp_path: Path) -> None:
    """The others' start at the loaded weights; a launch that wants fewer leaves the rest out."""
    (first, second, third), output = goes_on(parts, kind, "ema", 2, tmp_path)
    assert f"no average of {PARTS[parts][2]} of 8 weights (decoder.layers.0." in output
    assert "they start at the weights that are loaded" in output
    before, after, last = averages(first), averages(second), averages(third)
    mains = [main_weights(path) for path in (first, second, third)]
    assert len(after) == 4 and len(last) == (1 if parts == "kinds" else 4)
    assert before.keys() == last.keys()
    old, new = np.float32(BETA), np.float32(1 - BETA)
    for key, average in after.items():
        had, weight = had_in(parts, key), mains[1][key].numpy()
        was = before[key].numpy() if key in before else np.zeros_like(weight)
        assert not was[~had[:, 0, 0]].any()  # zeros, if anything, are saved for the others
        begins = np.where(had, was, mains[0][key].numpy())
        wanted = old * begins + new * weight
        assert (average.numpy() == wanted).all(), key
        # The controls: zeros would be noticed, and so would an average that starts anew.
        assert had.all() or not (average.numpy() == old * was + new * weight).all()
        anew = old * mains[0][key].numpy() + new * weight
        assert not had.any() or not (average.numpy() == anew).all()
        if key in last:
            going = old * average.numpy() + new * mains[2][key].numpy()
            assert (last[key].numpy() == np.where(had, going, 0)).all()


def ramping_states(path: Path) -> dict[str, np.ndarray]:
    found = weights(path)
    return {key: found[key].numpy() for key in found if key.startswith(f"{STATE}ramping_")}


@pytest.mark.outside
@pytest.mark.parametrize(("parts", "kind"), list(product(PARTS, FORMATS)))
def test_periods_that_only_some_weights_had(parts: str, kind: str, tmp_path: Path) -> None:
    """The others have the period 1, and no sums; four steps with a calibration before the last."""
    (first, second, _), output = goes_on(parts, kind, "ramping", 4, tmp_path)
    assert f"no periods of {PARTS[parts][2]} of 8 weights (decoder.layers.0." in output
    before, after = map(ramping_states, (first, second))
    longer = 0
    periods = [key for key in after if key.startswith(f"{STATE}ramping_period.")]
    assert len(periods) == 4
    for key in periods:
        had, period = had_in(parts, key), after[key]
        was = before.get(key, np.zeros_like(period))
        assert (period == np.where(had, was, 1)).all()
        longer += int((period > 1).sum())
        counting = key.replace("period", "count")
        count = np.where(had, before.get(counting, 0), 0) + 1
        assert (after[counting] == np.where(count % period == 0, 0, count)).all()
        sums = after[key.replace("period", "sum")]
        assert (sums[after[counting] == 0] == 0).all()
    assert longer > 0


WITHOUT = {
    "--no-load-optim": "is loaded without its optimizer: no average of the weights: it starts at",
    "--finetune": "is loaded without its optimizer: no average of the weights: it starts at",
    TORCH: "has no average of the weights: it starts at the weights that are loaded",
}


@pytest.mark.parametrize(
    "flags", ["--no-load-optim", *(pytest.param(f, marks=pytest.mark.outside) for f in WITHOUT
                                   if f != "--no-load-optim")]
)  # fmt: skip
def test_a_launch_says_that_its_average_starts_anew(flags: str, tmp_path: Path) -> None:
    saved, of_format = ("--fp4-recipe tetrajet", TORCH) if flags == TORCH else (EMA, "")
    results = run_in_turn(
        1,
        {
            "first": f"{saved} {of_format} {saving(tmp_path)} --exit-interval 2",
            "second": f"{EMA} {flags} --load {tmp_path}",
            "nothing": f"{EMA} {flags} --load {tmp_path / 'nothing'}",
        },
        BF16,
    )
    assert [r.status for r in results.values()] == [0, 0, 0], results["second"].output[-3000:]
    assert WITHOUT[flags] in results["second"].output
    assert "no average" not in results["nothing"].output + results["first"].output


def test_a_checkpoint_of_the_format_torch_is_found_by_the_default_format(tmp_path: Path) -> None:
    flags = f"{EMA} --train-iters 5"
    results = run_in_turn(
        1,
        {"first": f"{flags} {saving(tmp_path, 3)} --ckpt-format torch",
         "second": f"{flags} --load {tmp_path} --ckpt-step 3",
         "without": f"{flags} --load {tmp_path} --ckpt-step 3 --no-load-optim"},
        BF16,
    )  # fmt: skip
    first, second, without = results.values()
    assert (first.status, second.status) == (0, 0), second.output[-3000:]
    assert second.losses == first.losses[3:] and "no average" not in second.output
    # Negative control: an average that begins at the weights.
    assert without.losses != second.losses


# --- updates --------------------------------------------------------------------------------------


def test_beta_follows_the_steps_the_learning_rate_and_a_resume(tmp_path: Path) -> None:
    """Against the formula of docs/numerics.md in numpy, with TINY's cosine schedule by hand."""
    options = "ema_share=0.4 ema_follows_lr=true ema_warmup=3 ema_delay=1".split()
    recipe = " ".join(f"--fp4-recipe-option {option}" for option in options)
    going = f"--fp4-recipe tetrajet-ema {recipe} {saving(tmp_path, 1)}"
    results = run_in_turn(
        1,
        {"first": f"{going} --train-iters 5 --exit-interval 3",
         "second": f"{going} --train-iters 5 --load {tmp_path}",
         "shorter": f"{going} --train-iters 4 --load {tmp_path} --ckpt-step 3"},
        BF16,
    )  # fmt: skip
    assert [r.status for r in results.values()] == [0, 0, 1]
    assert "--train-iters was 5 and is 4" in told(results["shorter"])
    found = [averages(step(tmp_path, number)) for number in range(1, 6)]
    mains = [main_weights(step(tmp_path, number)) for number in range(1, 6)]
    for key in found[0]:
        assert torch.equal(found[0][key], mains[0][key])  # the delay
        wanted = mains[0][key].numpy()
        for number in range(2, 6):
            rate = 0.1 + 0.9 * 0.5 * (np.cos(np.pi * (number - 1) / 10) + 1)
            window = 1 / (1 - 2 ** (-1 / (0.4 * 5))) / rate
            if number - 1 < 3:
                window = 1 + (window - 1) * (number - 1) / 3
            beta = np.float32(1 - 1 / window), np.float32(1 / window)
            wanted = beta[0] * wanted + beta[1] * mains[number - 1][key].numpy()
            assert np.allclose(found[number - 1][key].numpy(), wanted, rtol=1e-6, atol=1e-9), number
            constant = found[number - 2][key] * 0.998 + mains[number - 1][key] * 0.002
            assert not torch.allclose(found[number - 1][key], constant, rtol=1e-6)  # the control


def test_a_skipped_step_leaves_the_average(tmp_path: Path) -> None:
    """The loss scale is too large for the first steps: the optimizer skips them."""
    folder = tmp_path / "saved"
    flags = f"{EMA} {saving(folder, 1)} --train-iters 5"
    [result] = run_in_turn(
        1, {"run": flags}, f"{SMALL} --fp16 --initial-loss-scale 8388608 --hysteresis 1"
    ).values()
    assert result.status == 0
    found = [averages(step(folder, number)) for number in range(1, 6)]
    taken = [len(steps) > 0 for steps in found]  # before a step there is no optimizer state
    assert taken == sorted(taken) and not taken[0] and taken[-1]
    first = taken.index(True)
    moved = [any(not torch.equal(a[key], b[key]) for key in a)
             for a, b in zip(found[first:], found[first + 1:], strict=False)]  # fmt: skip
    assert moved and all(moved)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [("--ckpt-format torch --use-distributed-optimizer", "--ckpt-format torch and --use-dist")],
)
def test_what_cannot_keep_it_is_refused(flags: str, says: str) -> None:
    [result] = run_in_turn(1, {"run": f"{EMA} {flags}"}, BF16).values()
    assert says in told(result) and "recipe ema keeps an average beside the weights" in told(result)
