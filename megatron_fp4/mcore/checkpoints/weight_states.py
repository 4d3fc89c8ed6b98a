"""Saves and loads the state beside weights (model/weight_states.py) with Megatron's checkpoints.

The states are in the state of torch's optimizers, which Megatron saves and loads. A weight without
a state is saved with zeros where Megatron saves it in one tensor with weights that have it. What a
checkpoint lacks is left out in loading, and starts anew after it. saved_states.py knows what a
checkpoint has; distributed_states.py changes Megatron's distributed optimizer.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training import print_rank_0
from torch import Tensor

from megatron_fp4.arithmetic.weight_states import key_of
from megatron_fp4.mcore.checkpoints.saved_states import loaded_folder, saved_states
from megatron_fp4.mcore.model.kept_states import KeptStates
from megatron_fp4.mcore.model.optimizers import stepping_optimizers
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.mcore.runtime.ranks import of_all

# What is said of a checkpoint that lacks a state: of all weights, and of some.
_STARTS = {
    "average": ("average", "it starts at the weights that are loaded",
                "they start at the weights that are loaded"),
    "ramping_period": ("periods", "they start at 1", "theirs start at 1"),
}  # fmt: skip
_SHOWN = 3  # how many linears a line names


class CheckpointedStates:
    """The states beside all weights of this process, as an optimizer saves and loads them.

    is_loading: whether the optimizer is being loaded from a checkpoint that has states.
    """

    def __init__(self, optimizer: MegatronOptimizer, run: Run) -> None:
        """optimizer: Megatron's, which `run.weight_states` follows. Every rank must call it, before
        a checkpoint is loaded."""
        self.is_loading = False
        self._states, self._args = run.weight_states, run.args
        self._saved = saved_states(run.kept, run.args)
        self._loadable = {
            kept: self._saved.names_of(kept.name, kept.number) for kept in self._states
        }
        self._padded = _padded([*self._states])
        for each in stepping_optimizers(optimizer):
            each.fp4_weight_states = self
            each.sharded_state_dict = self._with_states(each, each.sharded_state_dict)

    # --- saving -----------------------------------------------------------------------------------

    def keys_of(self, optimizer: DistributedOptimizer) -> tuple[str, ...]:
        """The keys of the states in `optimizer` and in its checkpoints; () while it has none."""
        if not self._states.in_optimizers:
            return ()
        names = self._names
        if self.is_loading:
            saved = self._saved.names_for(optimizer.data_parallel_group_idx)
            names = [name for name in names if name in saved]
        return tuple(map(key_of, names))

    def saves(self, weight: Tensor, key: str) -> bool:
        """Whether this weight is saved with the state of this key."""
        return any(
            kept.layer.weight is weight and key in map(key_of, kept.dtypes | self._padded[kept])
            for kept in self._states
        )

    @property
    def _names(self) -> list[str]:
        """The states of this rank's weights, in memory or in a checkpoint."""
        return sorted({name for kept in self._states for name in kept.dtypes | self._padded[kept]})

    def _with_states(
        self, optimizer: MegatronOptimizer, upstream: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def sharded_state_dict(model: Any, is_loading: bool = False, *args: Any, **kw: Any) -> Any:
            if is_loading and self._saved.keys:
                self._allocate(optimizer)
            is_distributed = isinstance(optimizer, DistributedOptimizer)
            if is_distributed or not self._states.in_optimizers:
                return upstream(model, is_loading, *args, **kw)
            with self._padding(optimizer):
                found = upstream(model, is_loading, *args, **kw)
            if is_loading:
                for state in found.get("optimizer", found)["state"].values():
                    if isinstance(state, dict):  # and not the count of steps
                        self.keep_saved(state)
            return found

        return sharded_state_dict

    @contextmanager
    def _padding(self, optimizer: MegatronOptimizer) -> Iterator[None]:
        """With the zeros in torch's optimizer that weights without a state are saved with."""
        zeros = [
            (optimizer.optimizer.state[main], key_of(name), torch.zeros_like(main, dtype=dtype))
            for kept, main in self._of(optimizer)
            for name, dtype in self._padded[kept].items()
        ]
        for state, key, padding in zeros:
            state[key] = padding
        try:
            yield
        finally:
            for state, key, _ in zeros:
                del state[key]

    def _of(self, optimizer: MegatronOptimizer) -> Iterator[tuple[KeptStates, Tensor]]:
        """Yields (KeptStates, main weight) of each weight of which `optimizer` updates a part on
        this rank, with or without states."""
        for kept in self._states:
            if kept.main is not None and kept.inner is optimizer.optimizer:
                yield kept, kept.main

    # --- loading ----------------------------------------------------------------------------------

    def _allocate(self, optimizer: MegatronOptimizer) -> None:
        """Allocates zeros for the states in torch's optimizer, for a checkpoint to load into."""
        if optimizer.init_state_fn is not None:
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for kept, main in self._of(optimizer):
            for name, dtype in kept.dtypes.items():
                if kept.own(name) is None:
                    kept.put(name, torch.zeros_like(main, dtype=dtype))
        self._states.in_optimizers = self.is_loading = True

    def keep_saved(self, state: dict[str, Any]) -> None:
        """Removes from the sharded state of one weight, to be loaded, what the checkpoint lacks."""
        for key in set(map(key_of, self._names)) & state.keys():
            if not self._saved.has_tensor(state[key].key):
                del state[key]

    def drop_lacking(self, weight: Tensor, loaded: dict[str, Any]) -> None:
        """Removes from the optimizer those states of a weight whose keys are not in `loaded`."""
        for kept in self._states:
            if kept.layer.weight is weight and kept.inner is not None and kept.main is not None:
                for key in map(key_of, kept.dtypes):
                    if key not in loaded:
                        kept.inner.state[kept.main].pop(key, None)

    def complete(self) -> None:
        """Starts the states that the loaded checkpoint lacks, and prints a line that says so.

        Every rank must call it, after Megatron has looked for a checkpoint.
        """
        found = self._start_lacking()
        source = loaded_folder(self._args) or self._args.pretrained_checkpoint
        if source is None:
            return
        without = self._args.no_load_optim or self._args.finetune
        source = f"{source} is loaded without its optimizer:" if without else f"{source} has"
        for name, (what, all_start, some_start) in _STARTS.items():
            of_name = found.get(name, {})
            lacking = [linear for linear, is_loaded in of_name.items() if not is_loaded]
            if lacking and len(lacking) == len(of_name):
                print_rank_0(f"megatron-fp4: {source} no {what} of the weights: {all_start}")
            elif lacking:
                shown = ", ".join(lacking[:_SHOWN] + ["..."] * (len(lacking) > _SHOWN))
                print_rank_0(
                    f"megatron-fp4: {source} no {what} of {len(lacking)} of {len(of_name)} weights "
                    f"({shown}): {some_start}"
                )

    def _start_lacking(self) -> dict[str, dict[str, bool]]:
        """Starts the states that the checkpoint lacks, from the weights that were loaded.

        Returns {state: {linear: loaded}} for the whole model: the name of the state, such as
        "average"; the global name of each linear that has it; and whether it was loaded, or else
        started. Optimizers that were not loaded start their states themselves, in their first step.
        """
        mine = []
        for kept in self._states:
            if kept.inner is None or kept.main is None:
                continue
            state = kept.inner.state.get(kept.main, {})
            for name in self._padded[kept]:
                state.pop(key_of(name), None)  # what was loaded as padding
            for name in kept.dtypes:
                lacks = self.is_loading and name not in self._loadable[kept]
                is_loaded = key_of(name) in state and not lacks
                mine.append((name, kept.name, is_loaded))
                if state and not is_loaded:
                    kept.put(name, kept.start_of(name))
        self.is_loading = False
        found: dict[str, dict[str, bool]] = {}
        for name, linear, is_loaded in sorted(one for part in of_all(mine) for one in part):
            of_name = found.setdefault(name, {})
            of_name[linear] = is_loaded and of_name.get(linear, True)
        return found


def _padded(states: list[KeptStates]) -> dict[KeptStates, dict[str, torch.dtype]]:
    """Finds the weights that are saved with zeros in place of a state that they do not have.

    Megatron may save a weight in one tensor with the same weights of other layers, and all of them
    then need the same states. states: those of all weights of this rank. Every rank must call it.
    Returns for each weight the dtypes of such states, by name.
    """
    mine = {(_stack_of(kept.name), *one) for kept in states for one in kept.dtypes.items()}
    everywhere = set().union(*of_all(mine))
    found = {}
    for kept in states:
        of_stack = {name: d for stack, name, d in everywhere if stack == _stack_of(kept.name)}
        found[kept] = {name: d for name, d in of_stack.items() if name not in kept.dtypes}
    return found


def _stack_of(linear: str) -> str:
    """The name of a linear without the numbers of its layer and expert.

    Megatron may save the weights of linears of the same such name in one tensor.
    """
    return re.sub(r"\.\d+(?=\.|$)", "", linear)
