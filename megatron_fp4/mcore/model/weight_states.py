"""State beside weights, which Megatron's optimizers keep.

A recipe declares its states (`Recipe.kept_dtypes`). The rank that owns a part of the FP32 main
weight owns the same part of the state. With the distributed optimizer the part is a range of the
flattened weight, whose ends may lie inside a block. Otherwise every rank owns the whole state. The
owner keeps its part in the state of torch's optimizer, so Megatron saves and reshards it like the
moments of Adam.

There are two kinds. Linears read the states of `Recipe.weight_states`, such as a moving average of
W: the owner updates its part after each optimizer step that was not skipped, and once a step the
parts are gathered to a copy in each layer. The copy keeps its address, so that CUDA graphs can read
it. Where every rank owns the whole state, the optimizer's tensor is a view of the copy. The states
of `Recipe.ramping` are the optimizer's alone, a `RampingAdamW`, which updates them in its own step.

kept_states.py has what is done for one weight. checkpoints/weight_states.py saves and loads the
states.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.ramping_adamw import RampingAdamW
from megatron_fp4.arithmetic.weight_states import OptimizerStep
from megatron_fp4.mcore.model.kept_states import KeptStates
from megatron_fp4.mcore.model.optimizers import stepping_optimizers
from megatron_fp4.recipe import Recipe


class WeightStates:
    """The states beside all weights of this process; yields those of each weight.

    in_optimizers: whether optimizers have the states; the same on all ranks.
    """

    def __init__(self) -> None:
        self.in_optimizers = False
        self._all: list[KeptStates] = []
        self._of_weight: dict[Tensor, KeptStates] = {}
        self._is_stale = True
        self._args = argparse.Namespace()  # Megatron's

    def __iter__(self) -> Iterator[KeptStates]:
        return iter(self._all)

    def add(
        self,
        layer: Any,
        name: str,
        number: int | None,
        recipe: Recipe | None,
        is_read: bool = True,
    ) -> Tensor | None:
        """Adds the states that `recipe` declares to the weight of `layer`.

        Call it for linears without states too, since they may be saved in one tensor with others.
        name, number: the layer's global module name, and the number of its decoder layer, from 1.
        recipe: None for BF16. is_read: whether the layer reads the states; else their owners alone
        do. Returns the copy of the state "average", float32 of the weight's shape, which the layer
        reads; None if it reads none.
        """
        states = {} if recipe is None else recipe.weight_states
        dtypes = {} if recipe is None else recipe.kept_dtypes
        copies = {
            state: torch.zeros(layer.weight.shape, dtype=torch.float32, device=layer.weight.device)
            for state in (states if is_read else ())
        }
        kept = KeptStates(layer, name, number, dtypes, states, copies)
        self._all.append(kept)
        self._of_weight[layer.weight] = kept
        return copies.get("average")

    @property
    def bytes_of_copies(self) -> int:
        """The bytes of all layers' copies on this rank."""
        return sum(4 * copy.numel() for kept in self._all for copy in kept.copies.values())

    @property
    def ramped_elements(self) -> int:
        """The elements of all weights of this rank that have periods."""
        return sum(kept.layer.weight.numel() for kept in self._all if kept.ramps)

    @property
    def ramped(self) -> list[KeptStates]:
        """The weights of which this rank updates a part at periods of their own."""
        return [kept for kept in self._all if kept.ramps and kept.main is not None]

    # --- owners -----------------------------------------------------------------------------------

    def follow(self, optimizer: MegatronOptimizer, args: argparse.Namespace) -> None:
        """Has `optimizer` keep the states, and update them after each of its steps.

        Every rank must call it, before a checkpoint is loaded.

        optimizer: Megatron's. In the place of torch's AdamW it has a RampingAdamW if a recipe has
        Q-Ramping. args: Megatron's arguments; each update reads the current step from them.
        """
        self._args = args
        for each in stepping_optimizers(optimizer):
            for kept in self._all:
                kept.follow(each)
            if isinstance(each, DistributedOptimizer):
                self._find_owners(each)
            each.optimizer.register_step_post_hook(self._update)
        for kept in self.ramped:
            assert isinstance(kept.inner, RampingAdamW) and kept.main is not None
            kept.inner.ramp(kept.main)

    def _find_owners(self, optimizer: DistributedOptimizer) -> None:
        """Notes which ranks own which parts of the weights. All ranks of the group have to call
        it, those without a part too."""
        of_it = [
            kept
            for kept in self._all
            if any(kept.layer.weight in buffer.param_index_map for buffer in optimizer.buffers)
        ]
        for kept in of_it:
            kept.group = optimizer.data_parallel_group
        mine = [(dist.get_rank(), kept.start, kept.end) for kept in of_it]
        everyone: list[Any] = [None] * optimizer.data_parallel_group.size()
        dist.all_gather_object(everyone, mine, group=optimizer.data_parallel_group)
        for i, kept in enumerate(of_it):
            kept.owners = [parts[i] for parts in everyone if parts[i][2] > parts[i][1]]

    # --- once a step ------------------------------------------------------------------------------

    def _update(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """Updates this rank's parts of the states; torch calls it after each step of `inner`."""
        if not any(kept.states for kept in self._all):
            self.in_optimizers = True
            return
        rates = {id(main): _rate(group) for group in inner.param_groups for main in group["params"]}
        number = int(getattr(self._args, "curr_iteration", self._args.iteration)) + 1  # from 1
        for kept in self._all:
            if kept.inner is inner and kept.states:
                kept.update(OptimizerStep(number, self._args.train_iters, rates[id(kept.main)]))
        self._is_stale, self.in_optimizers = True, True

    @torch.no_grad()
    def gather(self) -> None:
        """Gathers the parts to the layers' copies, if optimizers stepped since the last call.

        Every rank must call it, before the first forward pass of a step.
        """
        if not self._is_stale:
            return
        works = []
        for kept in self._all:
            for name in kept.copies:
                works += kept.gather(name)
        for work in works:
            work.wait()
        self._is_stale = False

    def expire(self) -> None:
        """Has the next `gather` gather the parts."""
        self._is_stale = True

    def part(self, weight: Tensor, name: str) -> tuple[int, Tensor]:
        """(start, part): the part of the state `name` of a weight that this rank owns, float32 [n],
        which begins at element `start` of the flattened weight."""
        kept = self._of_weight[weight]
        own = kept.part(name)
        assert own is not None
        return kept.start, own.view(-1)


def _rate(group: dict[str, Any]) -> float:
    """The learning rate of a group of parameters as a share of its schedule's largest."""
    largest = group.get("max_lr") or group["lr"]
    return float(group["lr"] / largest) if largest else 1.0
