"""What a stage of the sweep is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.sweep.axes import Combination
from tools.sweep.tensors import Recorded

Figures = dict[str, float]


@dataclass(frozen=True)
class Stage:
    """One way to judge a combination.

    name: in the command line and in results. what: for the page. evaluate: the figures of a
    combination, from the recorded tensors and a seed. seeds: how many seeds a combination is
    evaluated with. score: the name of the figure by which combinations are ranked; a lower one is
    better. settings: all numbers on which the figures depend. recorded: whether it reads the
    recorded tensors.
    """

    name: str
    what: str
    evaluate: Callable[[Combination, list[Recorded], int], Figures]
    seeds: int
    score: str
    settings: dict[str, Any]
    recorded: bool = False
