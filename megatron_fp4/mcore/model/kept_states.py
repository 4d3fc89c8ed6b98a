"""The states that a recipe keeps for one weight, such as its moving average.

For each state this module has the part that this rank's optimizer updates, and the copy that the
layer reads. weight_states.py has the states of all weights. C stands for megatron/core.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.ramping import FIRST, STATES
from megatron_fp4.arithmetic.weight_states import Blend, OptimizerStep, WeightState, blend, key_of
from megatron_fp4.mcore.model.optimizers import main_part_of


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
    started: this rank's parts of the states that are not in the optimizer yet.
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
    started: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ramps(self) -> bool:
        """Whether elements of the weight have periods (Q-Ramping)."""
        return STATES.keys() <= self.dtypes.keys()

    def follow(self, optimizer: MegatronOptimizer) -> None:
        """Notes which part of the weight `optimizer` updates on this rank, if any.

        optimizer: one of `stepping_optimizers`.
        """
        if (own := main_part_of(optimizer, self.layer.weight)) is not None:
            self.inner, (self.main, self.start) = optimizer.optimizer, own
            self.end = self.start + self.main.numel()

    # --- this rank's part -------------------------------------------------------------------------

    def own(self, name: str) -> Tensor | None:
        """This rank's part of the state `name`, from the optimizer.

        None if the rank owns no part, or if the optimizer does not have the state yet.
        """
        if self.inner is None or self.main is None:
            return None
        found: Tensor | None = self.inner.state[self.main].get(key_of(name))
        return found

    def part(self, name: str) -> Tensor | None:
        """This rank's part of a state, started if the optimizer does not have it yet; None if the
        rank owns no part."""
        own = self.own(name)
        if own is None and self.main is not None:
            own = self.started.setdefault(name, self.start_of(name))
        return own

    def start_of(self, name: str) -> Tensor:
        """The state `name` of this rank's part before its first update."""
        assert self.main is not None
        if name in self.states:
            return self.states[name].start(self.main)
        return torch.full_like(self.main, FIRST[name], dtype=self.dtypes[name])

    def put(self, name: str, state: Tensor) -> None:
        """Makes `state` this rank's part of the state `name`, in the optimizer's own state."""
        assert self.inner is not None and self.main is not None
        self.inner.state[self.main][key_of(name)] = state

    def update(self, step: OptimizerStep) -> None:
        """Updates this rank's parts of the states that the layer reads, after an optimizer step."""
        assert self.main is not None
        for name, how in self.states.items():
            state = self.own(name)
            if state is None:
                # C/optimizer/distrib_optimizer.py also steps to allocate its state before loading.
                if name not in self.started:
                    continue
                state = self.started.pop(name)
                self.put(name, state)
            how.update(state, self.main, step, _blend_on(state.device))

    # --- the copy ---------------------------------------------------------------------------------

    def gather(self, name: str) -> list[dist.Work]:
        """Starts to gather the parts of a state to its copy; returns what to wait for.

        Every rank of the group must call it.
        """
        own, copy = self.part(name), self.copies[name]
        if own is not None:
            if self.owners:
                copy.view(-1)[self.start : self.end].copy_(own.view(-1))
            else:
                self._share(name, own, copy)
        elif not self.owners:  # a weight that no optimizer updates
            copy.copy_(self.states[name].start(self.layer.weight))
        return [
            dist.broadcast(copy.view(-1)[start:end], owner, group=self.group, async_op=True)
            for owner, start, end in self.owners
        ]

    def _share(self, name: str, own: Tensor, copy: Tensor) -> None:
        """Makes the optimizer's state `own` a view of `copy`, with its values.

        It is one from the first call on, until a checkpoint is loaded: the optimizer then has a
        tensor of its own again.
        """
        if own.data_ptr() == copy.data_ptr():
            return
        copy.view(-1).copy_(own.view(-1))
        if self.own(name) is None:
            self.started[name] = copy.view(own.shape)
        else:
            self.put(name, copy.view(own.shape))


def _blend_on(device: torch.device) -> Blend:
    """What updates averages on `device`: `blend`, or on a GPU a kernel with the same bits."""
    if device.type != "cuda":
        return blend
    from megatron_fp4.kernels import averages  # imports Triton

    return averages.blend
