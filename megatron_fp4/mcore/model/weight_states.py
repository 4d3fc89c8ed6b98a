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

checkpoints/weight_states.py saves and loads the states. C stands for megatron/core.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.ramping import STATES
from megatron_fp4.arithmetic.ramping_adamw import RampingAdamW
from megatron_fp4.arithmetic.weight_states import Blend, OptimizerStep, WeightState, blend, key_of
from megatron_fp4.mcore.model.optimizers import parts_of
from megatron_fp4.recipe import Recipe


@dataclass(eq=False)
class Kept:
    """The states beside one weight, by name.

    layer: the layer that has the weight.
    dtypes: the dtype of each state.
    states: how the states that the layer reads start and are updated.
    copies: what the layer reads of each state: float32, of the weight's shape on this rank.
    inner, main: the torch optimizer that updates the weight, and the FP32 main weight in it, or
        this rank's part of that; None where this rank owns no part.
    start, end: the range of that part in the flattened weight.
    owners: (global rank, start, end) of all parts; empty where every rank owns the whole.
    group: the process group of the ranks that own parts; None where every rank owns the whole.
    """

    layer: Any
    dtypes: dict[str, torch.dtype]
    states: dict[str, WeightState]
    copies: dict[str, Tensor]
    inner: torch.optim.Optimizer | None = None
    main: Tensor | None = None
    start: int = 0
    end: int = 0
    owners: list[tuple[int, int, int]] = field(default_factory=list)
    group: Any = None

    def own(self, name: str) -> Tensor | None:
        """This rank's part of the state `name`, from the optimizer.

        None if the rank owns no part, or if the optimizer does not have the state yet.
        """
        if self.inner is None or self.main is None:
            return None
        found: Tensor | None = self.inner.state[self.main].get(key_of(name))
        return found

    @property
    def ramps(self) -> bool:
        """Whether elements of the weight have periods (Q-Ramping)."""
        return STATES.keys() <= self.dtypes.keys()


class WeightStates:
    """The states beside all weights of this process."""

    def __init__(self) -> None:
        self._all: list[Kept] = []
        self._is_stale = True
        self._in_optimizers = False  # whether optimizers have the states; the same on all ranks
        self._in_checkpoint = False  # whether the checkpoint to be loaded has them
        self._args = argparse.Namespace()  # Megatron's
        self._started: dict[tuple[Kept, str], Tensor] = {}  # states that no optimizer has yet

    def add(self, layer: Any, recipe: Recipe) -> Tensor | None:
        """Adds the states that `recipe` declares to the weight of `layer`.

        Returns the copy of the state "average", float32 of the weight's shape, which the layer
        reads; None if the recipe does not declare one.
        """
        if not recipe.kept_dtypes:
            return None
        copies = {
            name: torch.zeros(layer.weight.shape, dtype=torch.float32, device=layer.weight.device)
            for name in recipe.weight_states
        }
        self._all.append(Kept(layer, recipe.kept_dtypes, recipe.weight_states, copies))
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
    def names(self) -> list[str]:
        return sorted({name for kept in self._all for name in kept.dtypes})

    @property
    def ramped(self) -> list[Kept]:
        """The weights of which this rank updates a part at periods of their own."""
        return [kept for kept in self._all if kept.ramps and kept.main is not None]

    # --- owners -----------------------------------------------------------------------------------

    def follow(
        self, optimizer: MegatronOptimizer, in_checkpoint: bool, args: argparse.Namespace
    ) -> None:
        """Makes `optimizer` keep the states from now on.

        Every rank must call it, before a checkpoint is loaded. optimizer: with a RampingAdamW where
        weights have periods. in_checkpoint: whether the checkpoint has the states. args:
        Megatron's, from which updates read the current step.
        """
        self._args = args
        for each in parts_of(optimizer):
            if isinstance(each, DistributedOptimizer):
                self._own_parts(each)
            elif not each.is_stub_optimizer:
                self._own_whole(each)
            if not each.is_stub_optimizer:
                each.optimizer.register_step_post_hook(self._update)
                each.fp4_weight_states = self
                each.sharded_state_dict = self._with_states(each, each.sharded_state_dict)
        for kept in self.ramped:
            assert isinstance(kept.inner, RampingAdamW) and kept.main is not None
            kept.inner.ramp(kept.main)
        self._in_checkpoint = in_checkpoint

    def _own_whole(self, optimizer: MegatronOptimizer) -> None:
        inner = optimizer.optimizer
        mains = {id(main) for group in inner.param_groups for main in group["params"]}
        for kept in self._all:
            main = getattr(kept.layer.weight, "main_param", kept.layer.weight)
            if id(main) in mains:
                kept.inner, kept.main, kept.end = inner, main, main.numel()

    def _own_parts(self, optimizer: DistributedOptimizer) -> None:
        of_it = [
            kept
            for kept in self._all
            if any(kept.layer.weight in buffer.param_index_map for buffer in optimizer.buffers)
        ]
        for kept in of_it:
            place = optimizer.model_param_group_index_map.get(kept.layer.weight)
            if place is not None:
                group, order = place
                owned = optimizer._get_model_param_range_map(kept.layer.weight)["param"]
                kept.inner = optimizer.optimizer
                kept.main = optimizer.optimizer.param_groups[group]["params"][order]
                kept.start, kept.end = owned.start, owned.end
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
            self._in_optimizers = True
            return
        rates = {id(main): _rate(group) for group in inner.param_groups for main in group["params"]}
        for kept, name, state in self._parts(inner):
            assert kept.main is not None
            if state is None:
                state = self._started.pop((kept, name), None)
                # C/optimizer/distrib_optimizer.py also steps to allocate its state before loading.
                if state is None:
                    continue
                inner.state[kept.main][key_of(name)] = state
            step = OptimizerStep(self._number(), self._args.train_iters, rates[id(kept.main)])
            kept.states[name].update(state, kept.main, step, _blend_on(state.device))
        self._is_stale, self._in_optimizers = True, True

    def _number(self) -> int:
        """The number of the current step, from 1."""
        return int(getattr(self._args, "curr_iteration", self._args.iteration)) + 1

    def _parts(
        self, inner: torch.optim.Optimizer | None = None
    ) -> Iterator[tuple[Kept, str, Tensor | None]]:
        """(Kept, name, state) for each part that this rank owns of a state that layers read.

        The state is None before the optimizer has it. inner: restricts the result to the weights
        that this torch optimizer updates.
        """
        for kept in self._all:
            if kept.inner is not None and inner in (None, kept.inner):
                for name in kept.states:
                    yield kept, name, kept.own(name)

    @torch.no_grad()
    def gather(self) -> None:
        """Gathers the parts to the layers' copies, if optimizers stepped since the last call.

        Every rank must call it, before the first forward pass of a step.
        """
        if not self._is_stale:
            return
        works = []
        for kept in self._all:
            for name, copy in kept.copies.items():
                works += self._gather_one(kept, name, copy)
        for work in works:
            work.wait()
        self._is_stale = False

    def _gather_one(self, kept: Kept, name: str, copy: Tensor) -> list[dist.Work]:
        own = kept.own(name)
        if own is None and kept.main is not None:
            own = self._started.setdefault((kept, name), kept.states[name].start(kept.main))
        if own is not None:
            if kept.owners:
                copy.view(-1)[kept.start : kept.end].copy_(own.view(-1))
            else:
                self._share(kept, name, own, copy)
        elif not kept.owners:  # a weight that no optimizer updates
            copy.copy_(kept.states[name].start(kept.layer.weight))
        return [
            dist.broadcast(copy.view(-1)[start:end], owner, group=kept.group, async_op=True)
            for owner, start, end in kept.owners
        ]

    def _share(self, kept: Kept, name: str, own: Tensor, copy: Tensor) -> None:
        """Makes the optimizer's state `own` a view of `copy`, with its values.

        It is one from the first call on, until a checkpoint is loaded: the optimizer then has a
        tensor of its own again.
        """
        if own.data_ptr() == copy.data_ptr():
            return
        copy.view(-1).copy_(own.view(-1))
        if kept.own(name) is None:
            self._started[kept, name] = copy.view(own.shape)
        else:
            assert kept.inner is not None and kept.main is not None
            kept.inner.state[kept.main][key_of(name)] = copy.view(own.shape)

    # --- checkpoints ------------------------------------------------------------------------------

    def _with_states(
        self, optimizer: MegatronOptimizer, upstream: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def sharded_state_dict(model: Any, is_loading: bool = False, *args: Any, **kw: Any) -> Any:
            if is_loading and self._in_checkpoint:
                self._allocate(optimizer)
            return upstream(model, is_loading, *args, **kw)

        return sharded_state_dict

    def _allocate(self, optimizer: MegatronOptimizer) -> None:
        """Allocates zeros for the states in torch's optimizer, for a checkpoint to load into."""
        if optimizer.init_state_fn is not None:
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for kept in self._all:
            if kept.main is not None and kept.inner is optimizer.optimizer:
                for name, dtype in kept.dtypes.items():
                    if kept.own(name) is None:
                        empty = torch.zeros_like(kept.main, dtype=dtype)
                        kept.inner.state[kept.main][key_of(name)] = empty
        self._in_optimizers = True

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the states in optimizers and checkpoints; () while optimizers have none."""
        return tuple(map(key_of, self.names)) if self._in_optimizers else ()

    def has(self, weight: Tensor) -> bool:
        """Whether states are kept beside this weight."""
        return any(kept.layer.weight is weight for kept in self._all)


def _rate(group: dict[str, Any]) -> float:
    """The learning rate of a group of parameters as a share of its schedule's largest."""
    largest = group.get("max_lr") or group["lr"]
    return float(group["lr"] / largest) if largest else 1.0


def _blend_on(device: torch.device) -> Blend:
    """The function `blend`, or the kernel with its bits."""
    if device.type != "cuda":
        return blend
    from megatron_fp4.kernels import averages  # imports Triton

    return averages.blend
