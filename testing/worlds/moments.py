"""What the ranks of a training hold of Adam's moments in few bits, written to files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.arithmetic.low_bit import Owned


class Held(NamedTuple):
    """What a rank holds of a parameter: where it lies, the weight and the state as it is stored."""

    owned: Owned
    weight: Tensor
    state: dict[str, Tensor]


def write(folder: Path, rank: int, held: list[Held]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(held, folder / f"{rank}.pt")


def written(folder: Path) -> list[list[Held]]:
    """What each rank has written."""
    paths = sorted(folder.glob("*.pt"), key=lambda path: int(path.stem))
    return [torch.load(path, weights_only=False) for path in paths]
