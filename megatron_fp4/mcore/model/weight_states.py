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

checkpoints/weight_states.py saves and loads the states; saved_states.py knows which weights have
them in a checkpoint. A weight without a state is saved with zeros where Megatron saves it in one
tensor with weights that have it. C stands for megatron/core.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.ramping_adamw import RampingAdamW
from megatron_fp4.arithmetic.weight_states import Blend, OptimizerStep, blend, key_of
from megatron_fp4.mcore.model.kept_states import KeptStates
from megatron_fp4.mcore.model.optimizers import main_part_of, stepping_optimizers
from megatron_fp4.mcore.model.saved_states import SavedStates, stack_of
from megatron_fp4.mcore.runtime.ranks import of_all
from megatron_fp4.recipe import Recipe


class WeightStates:
    """The states beside all weights of this process."""

    def __init__(self) -> None:
        self._all: list[KeptStates] = []
        self._of_weight: dict[Tensor, KeptStates] = {}
        self._is_stale = True
        self._in_optimizers = False  # whether optimizers have the states; the same on all ranks
        self._saved = SavedStates()  # of the checkpoint to be loaded
        self._is_loading = False  # whether optimizers are being loaded with them
        self._args = argparse.Namespace()  # Megatron's
        self._started: dict[tuple[KeptStates, str], Tensor] = {}  # states that no optimizer has yet

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
    def names(self) -> list[str]:
        """The states of this rank's weights, in memory or in a checkpoint."""
        return sorted({name for kept in self._all for name in kept.dtypes | kept.padded})

    @property
    def ramped(self) -> list[KeptStates]:
        """The weights of which this rank updates a part at periods of their own."""
        return [kept for kept in self._all if kept.ramps and kept.main is not None]

    # --- owners -----------------------------------------------------------------------------------

    def follow(
        self, optimizer: MegatronOptimizer, saved: SavedStates, args: argparse.Namespace
    ) -> None:
        """Makes `optimizer` keep the states from now on.

        Every rank must call it, before a checkpoint is loaded. optimizer: has a RampingAdamW where
        weights have periods. saved: which states the checkpoint has. args: Megatron's, from which
        updates read the current step.
        """
        self._args, self._saved = args, saved
        mine = {(stack_of(kept.name), *one) for kept in self._all for one in kept.dtypes.items()}
        everywhere = set().union(*of_all(mine))
        for kept in self._all:
            kept.saved = saved.names_of(kept.name, kept.number)
            of_stack = {name: d for stack, name, d in everywhere if stack == stack_of(kept.name)}
            kept.padded = {n: d for n, d in of_stack.items() if n not in kept.dtypes}
        for each in stepping_optimizers(optimizer):
            self._find_own(each)
            if isinstance(each, DistributedOptimizer):
                self._find_owners(each)
            each.optimizer.register_step_post_hook(self._update)
            each.fp4_weight_states = self
            each.sharded_state_dict = self._with_states(each, each.sharded_state_dict)
        for kept in self.ramped:
            assert isinstance(kept.inner, RampingAdamW) and kept.main is not None
            kept.inner.ramp(kept.main)

    def _find_own(self, optimizer: MegatronOptimizer) -> None:
        """Notes which parts of the weights one of `chained_optimizers` updates on this rank."""
        for kept in self._all:
            if (own := main_part_of(optimizer, kept.layer.weight)) is not None:
                kept.inner, (kept.main, kept.start) = optimizer.optimizer, own
                kept.end = kept.start + kept.main.numel()

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
    ) -> Iterator[tuple[KeptStates, str, Tensor | None]]:
        """Yields (KeptStates of a weight, name of a state, this rank's part of the state) for each
        state that layers read, of the weights that this rank updates at least in part.

        The part is None as long as the optimizer has no such state. inner: only of the weights that
        this torch optimizer updates.
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

    def part(self, weight: Tensor, name: str) -> tuple[int, Tensor]:
        """(start, part): the part of the state `name` of a weight that this rank owns, float32 [n],
        which begins at element `start` of the flattened weight."""
        kept = self._of_weight[weight]
        own = self._own(kept, name)
        assert own is not None
        return kept.start, own.view(-1)

    def _own(self, kept: KeptStates, name: str) -> Tensor | None:
        """This rank's part of a state, started if no optimizer has it yet; None if it has none."""
        own = kept.own(name)
        if own is None and kept.main is not None:
            own = self._started.setdefault((kept, name), kept.start_of(name))
        return own

    def _gather_one(self, kept: KeptStates, name: str, copy: Tensor) -> list[dist.Work]:
        own = self._own(kept, name)
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

    def _share(self, kept: KeptStates, name: str, own: Tensor, copy: Tensor) -> None:
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
            if is_loading and self._saved.keys:
                self._allocate(optimizer)
            if isinstance(optimizer, DistributedOptimizer) or not self._in_optimizers:
                return upstream(model, is_loading, *args, **kw)
            with self._padded(optimizer):
                found = upstream(model, is_loading, *args, **kw)
            if is_loading:
                for state in found.get("optimizer", found)["state"].values():
                    if isinstance(state, dict):  # and not the count of steps
                        self.keep_saved(state)
            return found

        return sharded_state_dict

    @contextmanager
    def _padded(self, optimizer: MegatronOptimizer) -> Iterator[None]:
        """With the zeros in torch's optimizer that weights without a state are saved with."""
        zeros = [
            (kept.inner.state[kept.main], key_of(name), torch.zeros_like(kept.main, dtype=dtype))
            for kept in self._of(optimizer)
            for name, dtype in kept.padded.items()
        ]
        for state, key, padding in zeros:
            state[key] = padding
        try:
            yield
        finally:
            for state, key, _ in zeros:
                del state[key]

    def _of(self, optimizer: MegatronOptimizer) -> list[Any]:
        """The weights of which `optimizer` updates a part on this rank, with or without states."""
        return [
            kept
            for kept in self._all
            if kept.main is not None and kept.inner is optimizer.optimizer
        ]

    def _allocate(self, optimizer: MegatronOptimizer) -> None:
        """Allocates zeros for the states in torch's optimizer, for a checkpoint to load into."""
        if optimizer.init_state_fn is not None:
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for kept in self._of(optimizer):
            for name, dtype in kept.dtypes.items():
                if kept.own(name) is None:
                    empty = torch.zeros_like(kept.main, dtype=dtype)
                    kept.inner.state[kept.main][key_of(name)] = empty
        self._in_optimizers = self._is_loading = True

    def keep_saved(self, state: dict[str, Any]) -> None:
        """Removes from the sharded state of one weight, to be loaded, what the checkpoint lacks."""
        for key in set(map(key_of, self.names)) & state.keys():
            if not self._saved.has_tensor(state[key].key):
                del state[key]

    def drop_lacking(self, weight: Tensor, loaded: dict[str, Any]) -> None:
        """Removes from the optimizer those states of a weight whose keys are not in `loaded`."""
        for kept in self._all:
            if kept.layer.weight is weight and kept.inner is not None and kept.main is not None:
                for key in map(key_of, kept.dtypes):
                    if key not in loaded:
                        kept.inner.state[kept.main].pop(key, None)

    def complete(self) -> dict[str, dict[str, bool]]:
        """Starts the states that a loaded checkpoint lacks, from the weights that were loaded.

        Every rank must call it after loading. Returns {state: {linear: loaded}} for the whole
        model: the name of the state, such as "average"; the global name of each linear that has it;
        and whether it was loaded, or else started. Optimizers that were not loaded start their
        states themselves, in their first step.
        """
        mine = []
        for kept in self._all:
            if kept.inner is None or kept.main is None:
                continue
            state = kept.inner.state.get(kept.main, {})
            for name in kept.padded:
                state.pop(key_of(name), None)  # what was loaded as padding
            for name in kept.dtypes:
                is_loaded = key_of(name) in state and not (
                    self._is_loading and name not in kept.saved
                )
                mine.append((name, kept.name, is_loaded))
                if state and not is_loaded:
                    state[key_of(name)] = kept.start_of(name)
        self._is_loading, self._is_stale = False, True
        found: dict[str, dict[str, bool]] = {}
        for name, linear, is_loaded in sorted(one for part in of_all(mine) for one in part):
            of_name = found.setdefault(name, {})
            of_name[linear] = is_loaded and of_name.get(linear, True)
        return found

    def keys_of(self, optimizer: DistributedOptimizer) -> tuple[str, ...]:
        """The keys of the states in `optimizer` and in its checkpoints; () while it has none."""
        if not self._in_optimizers:
            return ()
        names = self.names
        if self._is_loading:
            saved = self._saved.names_for(optimizer.data_parallel_group_idx)
            names = [name for name in names if name in saved]
        return tuple(map(key_of, names))

    @property
    def is_loading(self) -> bool:
        """Whether optimizers are being loaded from a checkpoint that has states."""
        return self._is_loading

    def saves(self, weight: Tensor, key: str) -> bool:
        """Whether this weight is saved with the state of this key."""
        return any(
            kept.layer.weight is weight and key in map(key_of, kept.dtypes | kept.padded)
            for kept in self._all
        )


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
