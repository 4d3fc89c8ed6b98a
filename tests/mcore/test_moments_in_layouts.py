"""Adam's moments in few bits in several processes.

Copies stay alike, draws and blocks do not depend on the layout, and checkpoints go from one layout,
or from one format of the moments, to another.
"""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.moments import DEFAULT, Moments
from testing.low_bit import through
from testing.worlds.checkpoint_contents import weights
from testing.worlds.checkpoints import ENDS, EP2, MOE, PP2, SHARDED, SMALL, TP2_SP, saving
from testing.worlds.launch import SCRIPTS, result_of, spawn, tiny_on_mock_data
from testing.worlds.moments import (
    DIVIDED,
    DP,
    UNTIED,
    are_equal,
    decoded,
    dtypes,
    launch,
    shared,
    step,
    tensors,
    written,
)  # fmt: skip

pytestmark = pytest.mark.outside
BF16 = Moments("bf16", "bf16")
TP2_DP2 = f"--bf16 {TP2_SP} {DP} {DIVIDED}"
SENT = "--fp4-grad-comm fp8"  # norms are rounded apart, and summed over tensor-parallel ranks then
INSTANCES = f"--bf16 {DP} --num-distributed-optimizer-instances 2 --micro-batch-size 1"


# --- copies ---------------------------------------------------------------------------------------

# Processes and flags; a mistake that shows; a flag that is left out.
COPIES = {
    "dp2": (2, "--bf16", "bits of the rank", ""),
    "tp2": (2, f"--bf16 {TP2_SP}", "norms apart", ""),
    "tp2-dp2": (4, TP2_DP2, "norms apart", ""),
    "tp2-dp2, gradients in FP8": (4, f"{TP2_DP2} {SENT}", "norms unsummed", ""),
    "tp2-dp2, whole, gradients in FP8": (4, f"--bf16 {TP2_SP} {SENT}", "norms unsummed", ""),
    "tied-pp2": (2, f"--bf16 {PP2}", "tied apart", UNTIED),
    "tied-pp2-dp2": (4, f"--bf16 {PP2} {DP}", "tied apart", UNTIED),
    "ep2": (2, f"--bf16 {MOE} {EP2}", "local experts", ""),
    "instances": (4, INSTANCES, "bits of the rank", ""),
}


if importlib.util.find_spec("einops") is None:  # which Megatron needs for several instances
    del COPIES["instances"]


@pytest.mark.parametrize("name", COPIES)
def test_what_several_ranks_hold_stays_alike(name: str, tmp_path: Path) -> None:
    processes, flags, mistake, leaves_out = COPIES[name]
    number, alike = {}, {}
    for each in ("none", mistake):
        folder = tmp_path / each
        launch(folder, flags, processes, mistake=each, leaves_out=leaves_out)
        number[each], alike[each] = shared(folder)
    assert number["none"] > 0 and alike["none"]
    # Copies of other names are not compared: there are fewer of them.
    assert number[mistake] < number["none"] or not alike[mistake]


# --- layouts --------------------------------------------------------------------------------------

ONE = "--bf16 --clip-grad 0"  # a norm of gradients would be summed in another order


@pytest.mark.parametrize("processes", [1, 2])
def test_bits_that_round_do_not_depend_on_the_ranks(processes: int, tmp_path: Path) -> None:
    """Moments in BF16, which have no blocks, are those of one process with the whole weights."""
    one, two, wrong = (tmp_path / name for name in ("one", "two", "wrong"))
    flags = f"{ONE} {SHARDED} {DIVIDED}"
    launch(one, f"{ONE} {DIVIDED}", moments=BF16)
    launch(two, flags, processes, BF16)
    mine, theirs = decoded(one, BF16), decoded(two, BF16)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    if processes == 2:
        launch(wrong, flags, processes, BF16, "blocks of the range")
        theirs = decoded(wrong, BF16)
        assert any(not torch.equal(mine[key], theirs[key]) for key in mine)


# The largest element that a new block can change, as a share of the block's largest: a subnormal
# of the format, above which all numbers have as many bits as in the old block.
SUBNORMAL = {"exp_avg": 2.0**-13, "exp_avg_sq": 2.0**-29}


def changes(folder: Path, before: dict[tuple[str, str], Tensor]) -> tuple[int, bool]:
    """(how many moments differ from those before, whether these may differ)."""
    number, allowed = 0, True
    for (name, key), found in decoded(folder).items():
        old = before[name, key]
        assert old.shape == found.shape
        largest = torch.nn.functional.pad(old.abs(), (0, -len(old) % 128)).view(-1, 128).amax(1)
        tiny = old.abs() <= SUBNORMAL[key] * largest.repeat_interleave(128)[: len(old)]
        number += int((old != found).sum())
        allowed &= bool((tiny | (old == found)).all())
    return number, allowed


def loaded(folder: Path, source: Path, flags: str, processes: int) -> None:
    """Saves the second step of `source` as it is loaded."""
    again = f"--load {source} --ckpt-step 2 --save {folder} --save-interval 1000"
    launch(folder, f"{flags} {ENDS} {again}", processes)


@pytest.mark.parametrize("optimizer", [DP, SHARDED])
def test_another_number_of_ranks_changes_what_is_tiny_alone(optimizer: str, tmp_path: Path) -> None:
    """DP 2 to 1 to 2, and 1 to 2: weights that the border of two ranks cuts are joined and cut."""
    flags = f"--bf16 {optimizer} {DIVIDED}"
    two, one = tmp_path / "two", tmp_path / "one"
    launch(two, f"{flags} {ENDS} {saving(two)}", 2)
    launch(one, f"{flags} {ENDS} {saving(one)}", 1)
    assert any(held.owned.start % 128 for rank in written(two) for held in rank)
    loaded(tmp_path / "two-one", two, flags, 1)
    loaded(tmp_path / "two-one-two", tmp_path / "two-one", flags, 2)
    loaded(tmp_path / "one-two", one, flags, 2)
    for to, source in (("two-one", "two"), ("two-one-two", "two-one"), ("one-two", "one")):
        before = decoded(tmp_path / source)
        number, allowed = changes(tmp_path / to, before)
        everything = sum(map(len, before.values()))
        print(f"{to}: {number} of {everything} moments change")
        assert allowed and number < 1e-3 * everything
        assert {held.state["step"].item() for rank in written(tmp_path / to) for held in rank} == {
            2.0
        }
    # The control: the ranges' elements in another order.
    before = {key: moment.roll(1) for key, moment in decoded(two).items()}
    number, allowed = changes(tmp_path / "two-one", before)
    assert number > everything / 10 and not allowed


@pytest.mark.parametrize("layout", [TP2_SP, PP2])
def test_other_model_parallel_ranks_load_the_moments_of_whole_weights(
    layout: str, tmp_path: Path
) -> None:
    """Two tensor- or pipeline-parallel ranks to one: the float32 moments of the checkpoint, rounded
    to nearest in the blocks of the whole weights. What this changes is tiny in its block."""
    two, exact, low = (tmp_path / name for name in ("two", "exact", "low"))
    launch(two, f"--bf16 {layout} {ENDS} {saving(two)}", 2)
    saved = tensors(step(two, 2))
    for folder, moments in ((exact, None), (low, DEFAULT)):
        again = f"--load {two} --ckpt-step 2 --save {folder} --save-interval 1000"
        launch(folder, f"--bf16 {ENDS} {again}", moments=moments)
    whole, found = tensors(step(exact, 2)), tensors(step(low, 2))
    keys = {key for key in whole if ".exp_avg" in key}
    assert keys and whole.keys() == found.keys()
    changed = 0
    for key in keys:
        assert torch.equal(whole[key], saved[key])
        name = "exp_avg_sq" if "exp_avg_sq" in key else "exp_avg"
        flat = whole[key].reshape(-1)
        nearest = through(DEFAULT.forms[name], flat, None)
        assert torch.equal(found[key].reshape(-1), nearest)
        largest = torch.nn.functional.pad(flat.abs(), (0, -len(flat) % 128)).view(-1, 128).amax(1)
        tiny = SUBNORMAL[name] * largest.repeat_interleave(128)[: len(flat)]
        assert ((nearest - flat).abs() <= tiny).all()
        changed += int((nearest != flat).sum())
    print(f"{changed} of {sum(whole[key].numel() for key in keys)} moments change")


# --- formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["--bf16", f"--bf16 {DP}", f"--bf16 {SHARDED}", ""])
def test_a_run_begins_and_ends_in_float32(flags: str, tmp_path: Path) -> None:
    plain, low, after = (tmp_path / name for name in ("plain", "low", "after"))
    launch(plain, f"{flags} {ENDS} {saving(plain)}", moments=None)
    again = f"{flags} {ENDS} --ckpt-step 2 --save-interval 1000"
    begins = launch(low, f"{again} --load {plain} --save {low}")
    assert "moments stored as float32, this launch stores them as m=fp8,v=fp16" in begins.output
    assert dtypes(low) == {(torch.uint8, torch.float16)}
    if flags == "--bf16":  # its checkpoint has a tensor for each weight
        exact, found = tensors(step(plain, 2)), tensors(step(low, 2))
        keys = {key for key in exact if ".exp_avg" in key}
        assert keys and exact.keys() == found.keys()
        for key in exact:
            form = DEFAULT.forms["exp_avg_sq" if "exp_avg_sq" in key else "exp_avg"]
            nearest = exact[key]
            if key in keys:
                nearest = through(form, nearest.reshape(-1), None).view(nearest.shape)
            assert torch.equal(found[key], nearest)
            assert key not in keys or not torch.equal(found[key], exact[key]) or "norm" in key
    ends = launch(after, f"{again} --load {low} --save {after}", moments=None)
    assert "moments stored as m=fp8,v=fp16, this launch stores them as float32" in ends.output
    assert are_equal(tensors(step(low, 2)), tensors(step(after, 2)))
    on = f"{flags} --load {low} --ckpt-step 2 --override-opt_param-scheduler"
    goes_on = launch(tmp_path / "on", on, moments=None)
    assert len(goes_on.losses) == 2


@pytest.mark.parametrize("flags", ["--bf16", f"--bf16 {SHARDED}", ""])
def test_a_run_begins_and_ends_in_float32_in_the_format_torch(flags: str, tmp_path: Path) -> None:
    """A checkpoint in few bits trains on in float32 as what a launch in float32 saves of it."""
    plain, low, after = (tmp_path / name for name in ("plain", "low", "after"))
    flags = f"{flags} --ckpt-format torch"
    launch(plain, f"{flags} {ENDS} {saving(plain)}", moments=None)
    again = f"{flags} {ENDS} --ckpt-step 2 --save-interval 1000"
    begins = launch(low, f"{again} --load {plain} --save {low}")
    assert "moments stored as float32, this launch stores them as m=fp8,v=fp16" in begins.output
    ends = launch(after, f"{again} --load {low} --save {after}", moments=None)
    assert "moments stored as m=fp8,v=fp16, this launch stores them as float32" in ends.output
    on = f"{flags} --ckpt-step 2 --override-opt_param-scheduler --load"
    losses = [
        launch(tmp_path / f"on-{folder.name}", f"{on} {folder}", moments=None).losses
        for folder in (low, after, plain)
    ]
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert losses[0] != losses[2]  # Negative control: the moments before they were rounded.


def test_skipped_steps_change_no_moment(tmp_path: Path) -> None:
    """The loss scale doubles after every step until gradients overflow."""
    scale = "--initial-loss-scale 524288 --loss-scale-window 1 --hysteresis 1"
    flags = f"--fp16 {scale} --train-iters 6 --clip-grad 0 {DP} {saving(tmp_path, 1)}"
    output = launch(tmp_path, flags).output
    skipped = [
        "number of skipped iterations:   1" in line
        for line in output.splitlines()
        if "number of skipped iterations" in line
    ]
    assert len(skipped) == 6 and any(skipped) and not all(skipped)
    [rank] = written(tmp_path)
    assert {held.state["step"].item() for held in rank} == {float(6 - sum(skipped))}
    states = [optimizer_of(step(tmp_path, n)) for n in range(1, 7)]
    for n in range(1, 6):
        assert are_equal(states[n - 1], states[n]) == skipped[n]


def optimizer_of(path: Path) -> dict[str, Tensor]:
    """The main weights and moments of a checkpoint."""
    return {key: tensor for key, tensor in tensors(path).items() if ".bucket_idx" in key}


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    flags = shlex.split(f"{SMALL} --fp4-recipe tetrajet --bf16 {DP} {DIVIDED}")
    flags += ["--fp4-optimizer-state", str(DEFAULT), "--global-batch-size", "8"]
    faults = SCRIPTS / "pretrain_with_faults.py"
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def run(folder: Path, *fault: str) -> int:
        own = f"{saving(folder)} --load {folder}".split()
        words = tiny_on_mock_data(*flags, *own)
        return result_of(spawn(2, faults, *fault, *words)).status

    assert run(whole) == 0 and run(killed, "dies=step") != 0
    assert not step(killed, 4).exists()
    assert run(killed) == 0
    assert are_equal(weights(step(whole, 4)), weights(step(killed, 4)))
