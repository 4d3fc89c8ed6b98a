"""Trainings that save and load checkpoints. Each is run once, and used by all tests."""

import functools
import re
import shlex
import shutil
from pathlib import Path

import torch

from megatron_fp4 import list_recipes
from testing.builders.small_recipes import flags_of
from testing.worlds.checkpoint_contents import weights
from testing.worlds.launch import MOCK_DATA, OVERLAP, SCRIPTS, TINY, Result, result_of, spawn

SCRIPT = SCRIPTS / "pretrain_with_faults.py"
SMALL = "--ffn-hidden-size 128 --eval-iters 0"
SIZES = f"{SMALL} --bf16"
TP2_SP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
TETRAJET = "--fp4-recipe tetrajet"
SHARDED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
ENDS = (
    "--train-iters 2 --override-opt_param-scheduler"  # the first steps of a longer run's schedule
)
TRACKER = "latest_checkpointed_iteration.txt"
MOE = "--num-experts 4 --moe-token-dispatcher-type allgather --moe-ffn-hidden-size 128"
EP2 = "--expert-model-parallel-size 2"
GLOBAL = "--non-persistent-ckpt-type global --non-persistent-save-interval 2"
TORCH = "--ckpt-format torch"
STALE = "iter_0000002/mp_rank_01/model_optim_rng.pt"  # as if two ranks had saved there before
OTHERS = [name for name in list_recipes() if name != "tetrajet"]


def run_in_turn(processes: int, trainings: dict[str, str], sizes: str = SIZES) -> dict[str, Result]:
    """Runs trainings one after the other; returns their results by name.

    trainings: the flags of each, by name. They may begin with a fault that pretrain_with_faults.py
    injects. sizes: flags that all of them get. Raises TimeoutError.
    """
    results = {}
    for name, flags in trainings.items():
        first, *rest = shlex.split(flags)
        own = [first] if re.match(r"(dies|spoils|without|freezes|trains)=", first) else []
        words = [*own, *TINY, *MOCK_DATA, *sizes.split(), *([] if own else [first]), *rest]
        fresh = (
            first == "dies=save"
        )  # a rank that dies needs a torchrun of its own, which notices it
        done = spawn(processes, SCRIPT, *words, fresh=fresh)
        results[name] = result_of(done)
    return results


def on_other_numbers_of_ranks(flags: str, folder: Path) -> tuple[list[float], list[float]]:
    """Trains for six steps on two ranks, on one, and on two again, two steps each.

    Each run loads what the one before has saved in `folder`. Returns the losses of the six steps,
    and those of a run that stays on two ranks.
    """
    flags = f"{flags} --train-iters 6"
    two, one, back = (folder / name for name in ("two", "one", "back"))
    first = run_in_turn(2, {"two": f"{flags} {saving(two)} --exit-interval 2"})["two"]
    alone = run_in_turn(1, {"one": f"{flags} {saving(one)} --load {two} --exit-interval 4"})["one"]
    last = run_in_turn(2, {"back": f"{flags} {saving(back)} --load {one}"})["back"]
    assert first.status == 0 and len(good(alone).losses) == len(good(last).losses) == 2
    whole = run_in_turn(2, {"whole": flags})["whole"]
    return [*first.losses, *alone.losses, *last.losses], whole.losses


def told(result: Result) -> str:
    """The error line of a launch that was refused; asserts that there is one, and no training."""
    lines = [line for line in result.output.splitlines() if "megatron-fp4: error:" in line]
    assert result.status == 1 and len(lines) == 1 and not result.has_traceback, result.output[
        -4000:
    ]
    assert (
        "megatron-fp4: Megatron's arguments and" not in result.output
    )  # printed at the first step
    return lines[0]


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same weights and optimizer state, bit for bit."""
    a, b = weights(one), weights(other)
    assert any("exp_avg_sq" in name for name in a)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def saving(folder: Path, step: int = 2) -> str:
    return f"--save {folder} --save-interval {step}"


def again(folder: Path, step: int = 2) -> str:
    """Flags that load the iteration `step` from `folder`.

    If no step is left to train, the training saves the checkpoint as it was loaded.
    """
    return f"--load {folder} --ckpt-step {step} --save-interval 1000"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


LAYOUTS = {
    "pp2": f"{TETRAJET} {PP2}",
    "dp2-overlapped": f"--fp4-recipe mxfp4-rht-sr {shlex.join(OVERLAP)}",
    "ep2": f"{TETRAJET} {MOE} {EP2}",
    "ep2-sharded": f"{TETRAJET} {MOE} {EP2} {SHARDED}",
}


@functools.cache
def on_two(folder: Path) -> dict[str, Result]:
    whole, sharded = folder / "whole", folder / "sharded"
    tp2, ends = f"{TETRAJET} {TP2_SP}", ENDS
    moe, sharded_moe = f"{TETRAJET} {MOE}", f"{TETRAJET} {MOE} {SHARDED}"
    resumed = {}  # in their own layouts
    for name, flags in LAYOUTS.items():
        resumed[f"{name} saves"] = f"{flags} {saving(folder / name)}"
        resumed[name] = f"{flags} {again(folder / name)} {saving(folder / f'{name}-resumed')}"
    results = run_in_turn(
        2,
        {
            **resumed,
            "ep1": f"{moe} {ends} {saving(folder / 'ep1')}",
            "ep1 ep2": f"{moe} {EP2} {ends} {again(folder / 'ep1')} --save {folder / 'ep1-ep2'}",
            "sharded ep1": f"{sharded_moe} {ends} {saving(folder / 'sharded-ep1')}",
            "sharded ep1 ep2": f"{sharded_moe} {EP2} {ends} {again(folder / 'sharded-ep1')} "
            f"--save {folder / 'sharded-ep1-ep2'}",
            "dp ep1": f"{moe} --use-distributed-optimizer {ends} {saving(folder / 'dp-ep1')}",
            "dp ep2": f"{moe} {EP2} --use-distributed-optimizer --load {folder / 'dp-ep1'}",
            "global": f"{tp2} {GLOBAL} --train-iters 6 {saving(folder / 'global', 4)}",
            "torch": f"{TETRAJET} {TORCH} {ends} {saving(folder / 'torch')}",
            "whole": f"{tp2} {saving(whole)}",
            "resumed": f"{tp2} {saving(folder / 'resumed')} --load {whole} --ckpt-step 2",
            "tp2 pp2": f"{TETRAJET} {PP2} {ends} {again(whole)} --save {folder / 'tp2-pp2'}",
            "sharded": f"{TETRAJET} {SHARDED} {ends} {saving(sharded)}",
            "sharded pp2": f"{TETRAJET} {SHARDED} {PP2} {ends} {again(sharded)} "
            f"--save {folder / 'sharded-pp2'}",
            "dp": f"{TETRAJET} --use-distributed-optimizer {ends} {saving(folder / 'dp')}",
            "dp pp2": f"{TETRAJET} --use-distributed-optimizer {PP2} --load {folder / 'dp'}",
            "other seed": f"{tp2} --fp4-seed 7 {again(whole)}",
            "killed": f"dies=step {tp2} {saving(folder / 'killed')} --load {folder / 'killed'}",
        },
    )
    # As if killed after the sixth step, before its persistent checkpoint.
    shutil.rmtree(folder / "global" / "iter_0000006")
    (folder / "global" / TRACKER).write_text("4")
    return results


@functools.cache
def on_one(folder: Path) -> dict[str, Result]:
    on_two(folder)
    whole, ends = folder / "whole", ENDS
    for name in ("torn", "untold"):
        shutil.copytree(whole, folder / name)
    for saved in ("torch", "global"):
        shutil.copytree(folder / saved, folder / f"{saved}-torn")
    truncate(folder / "torch-torn" / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt")
    truncate(folder / "global-torn" / "non_persistent" / "iter_0000006" / "__0_0.distcp")
    truncate(folder / "torn" / "iter_0000004" / "__1_0.distcp")
    (folder / "torch-over" / STALE).parent.mkdir(parents=True)
    shutil.copy(folder / "torch" / STALE.replace("01", "00"), folder / "torch-over" / STALE)
    (folder / "untold" / TRACKER).write_text("")
    trainings = {
        "alone": f"{TETRAJET} {ends} {again(whole)} --save {folder / 'alone'}",
        "sharded": f"{TETRAJET} {SHARDED} {ends} {again(folder / 'sharded')} "
        f"--save {folder / 'sharded-alone'}",
        "ep2 alone": f"{TETRAJET} {MOE} {ends} {again(folder / 'ep2')} "
        f"--save {folder / 'ep2-alone'}",
        "sharded ep2 alone": f"{TETRAJET} {MOE} {SHARDED} {ends} {again(folder / 'ep2-sharded')} "
        f"--save {folder / 'ep2-sharded-alone'}",
        "torch torn": f"{TETRAJET} {TORCH} --load {folder / 'torch-torn'} --no-verify-integrity",
        "torch torn at parsing": f"{TETRAJET} {TORCH} --use-checkpoint-args "
        f"--load {folder / 'torch-torn'}",
        "torch over": f"{TETRAJET} {TORCH} {ends} {again(folder / 'torch')} "
        f"--save {folder / 'torch-over'}",
        "brought": f"{TETRAJET} --use-checkpoint-args --load {whole} --rampup-batch-size 2 2 8",
        "late demand": f"{TETRAJET} --optimizer muon",
        "nothing": f"{TETRAJET} --load {folder / 'nothing'} --exit-on-missing-checkpoint",
        "global": f"{TETRAJET} {GLOBAL} --train-iters 6 --load {folder / 'global'}",
        "global torn": f"{TETRAJET} {GLOBAL} --train-iters 6 --load {folder / 'global-torn'}",
        "to bf16": f"{ends} {again(whole)} --save {folder / 'bf16'}",
        "from bf16": f"{TETRAJET} {ends} {again(folder / 'bf16')} --save {folder / 'from-bf16'}",
        "torn": f"{TETRAJET} --load {folder / 'torn'}",
        "untold": f"{TETRAJET} --load {folder / 'untold'}",
        "other model": f"{TETRAJET} --load {whole} --hidden-size 128",
        "stock Adam": f"without=distributed_adam {TETRAJET} {SHARDED} {ends} "
        f"--load {folder / 'sharded'}",
    }
    for name in OTHERS:
        kept, recipe = folder / name, shlex.join(flags_of(name))
        trainings[name] = f"{recipe} {saving(kept)}"
        trainings[f"{name} resumed"] = (
            f"{recipe} {again(kept)} {saving(folder / f'{name}-resumed')}"
        )
    # The control: with other random bits the resumed run must not end where the whole one did.
    trainings["anyway"] = f"{recipe} {again(kept)} {saving(folder / 'anyway')} --fp4-seed 7"
    trainings["anyway"] += " --fp4-load-anyway"
    return run_in_turn(1, trainings)


def good(result: Result) -> Result:
    assert result.status == 0 and "successfully loaded checkpoint" in result.output, result.output[
        -4000:
    ]
    return result
