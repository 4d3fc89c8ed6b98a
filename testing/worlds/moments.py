"""Trainings with Adam's moments in few bits, and what their ranks hold at the end."""

from __future__ import annotations

import shlex
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.low_bit import LowBit, Owned
from megatron_fp4.arithmetic.moments import DEFAULT, Moments
from testing.worlds.checkpoint_contents import contents, flat
from testing.worlds.checkpoints import SMALL
from testing.worlds.launch import OVERLAP, SCRIPTS, Result, result_of, spawn, tiny_on_mock_data

SCRIPT = SCRIPTS / "pretrain_with_wrong_moments.py"
DP, UNTIED = "--use-distributed-optimizer", "--untie-embeddings-and-output-weights"
TORCH, DIVIDED = "--ckpt-format torch", "--num-layers 3"  # borders of halves cut weights
OVERLAPPED = f"{shlex.join(OVERLAP)} {DIVIDED}"
FP16 = "--fp16 --initial-loss-scale 65536 --loss-scale-window 2"


class Held(NamedTuple):
    """What a rank holds of a parameter: where it lies, the weight and the state as it is stored."""

    owned: Owned
    weight: Tensor
    state: dict[str, Tensor]


def write(folder: Path, rank: int, held: list[Held]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(held, folder / f"{rank}.pt")


def launch(
    folder: Path,
    flags: str,
    processes: int = 1,
    moments: Moments | None = DEFAULT,
    mistake: str = "none",
    leaves_out: str = "",
) -> Result:
    """A training of four steps, whose ranks write what they hold; see `written`.

    moments: None for a launch without the flag. mistake: of pretrain_with_wrong_moments.py.
    leaves_out: a flag of TINY.
    """
    low = "" if moments is None else f"--fp4-optimizer-state {moments}"
    words = tiny_on_mock_data(*shlex.split(f"{SMALL} --fp4-recipe tetrajet {low} {flags}"))
    words = [mistake, str(folder / "held"), *(word for word in words if word != leaves_out)]
    result = result_of(spawn(processes, SCRIPT, *words))
    assert result.status == 0, result.output[-4000:]
    return result


def written(folder: Path) -> list[list[Held]]:
    """What each rank of the launch with this folder holds."""
    paths = sorted((folder / "held").glob("*.pt"), key=lambda path: int(path.stem))
    return [torch.load(path, weights_only=False) for path in paths]


def dtypes(folder: Path) -> set[tuple[torch.dtype, torch.dtype]]:
    """Those of both moments, as the ranks hold them."""
    held = [each for rank in written(folder) for each in rank]
    return {(each.state["exp_avg"].dtype, each.state["exp_avg_sq"].dtype) for each in held}


def shared(folder: Path) -> tuple[int, bool]:
    """(how many parameters or parts of them several ranks hold, whether they hold them alike)."""
    found: dict[tuple[Owned, int], list[Held]] = defaultdict(list)
    for rank in written(folder):
        for each in rank:
            found[each.owned, each.weight.numel()].append(each)
    several = [each for each in found.values() if len(each) > 1]
    alike = all(
        torch.equal(first.weight, one.weight)
        and all(torch.equal(first.state[key], one.state[key]) for key in first.state)
        for first, *others in several
        for one in others
    )
    return len(several), alike


def decoded(folder: Path, moments: Moments = DEFAULT) -> dict[tuple[str, str], Tensor]:
    """Both moments of every parameter, by its name and their keys, without tensor parallelism."""
    parts: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
    for rank in written(folder):
        for weight in rank:
            of = LowBit(weight.weight, weight.state, moments, weight.owned)
            for key in moments.forms:
                part = weight.owned.start, of.decoded(key).flatten()
                parts[weight.owned.name, key].append(part)
    return {
        name: torch.cat([part for _, part in sorted(found, key=lambda each: each[0])])
        for name, found in parts.items()
    }


# --- checkpoints ----------------------------------------------------------------------------------


def step(folder: Path, number: int) -> Path:
    return folder / f"iter_{number:07d}"


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in flat(contents(path)) if torch.is_tensor(leaf)}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert any("exp_avg_sq" in key for key in one)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
