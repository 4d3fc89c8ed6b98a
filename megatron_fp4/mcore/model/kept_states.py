"""The states beside one weight (weight_states.py)."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.ramping import FIRST, STATES
from megatron_fp4.arithmetic.weight_states import WeightState, key_of


@dataclass(eq=False)
class KeptStates:
    """The states beside one weight, by name.

    layer: the layer that has the weight.
    name, number: the layer's global module name, and the number of its decoder layer, from 1.
    dtypes: the dtype of each state; empty for a linear without states.
    states: how the states that the layer reads start and are updated.
    copies: what the layer reads of each state: float32, of the weight's shape on this rank.
    inner, main: the torch optimizer that updates the weight, and the FP32 main weight in it, or
        this rank's part of that; None where this rank owns no part.
    start, end: the range of that part in the flattened weight.
    owners: (global rank, start, end) of all parts; empty where every rank owns the whole.
    group: the process group of the ranks that own parts; None where every rank owns the whole.
    saved: the names of the states that the checkpoint to be loaded has of this weight.
    padded: the dtype of each state that the weight does not have, but is saved with, as zeros.
    """

    layer: Any
    name: str
    number: int | None
    dtypes: dict[str, torch.dtype]
    states: dict[str, WeightState]
    copies: dict[str, Tensor]
    inner: torch.optim.Optimizer | None = None
    main: Tensor | None = None
    start: int = 0
    end: int = 0
    owners: list[tuple[int, int, int]] = field(default_factory=list)
    group: Any = None
    saved: frozenset[str] = frozenset()
    padded: dict[str, torch.dtype] = field(default_factory=dict)

    def own(self, name: str) -> Tensor | None:
        """This rank's part of the state `name`, from the optimizer.

        None if the rank owns no part, or if the optimizer does not have the state yet.
        """
        if self.inner is None or self.main is None:
            return None
        found: Tensor | None = self.inner.state[self.main].get(key_of(name))
        return found

    def start_of(self, name: str) -> Tensor:
        """The state `name` of this rank's part before its first update."""
        assert self.main is not None
        if name in self.states:
            return self.states[name].start(self.main)
        return torch.full_like(self.main, FIRST[name], dtype=self.dtypes[name])

    @property
    def ramps(self) -> bool:
        """Whether elements of the weight have periods (Q-Ramping)."""
        return STATES.keys() <= self.dtypes.keys()
