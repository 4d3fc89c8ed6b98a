"""Saves and loads the state beside weights (model/weight_states.py) with Megatron's checkpoints.

C stands for megatron/core.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import print_rank_0
from torch import Tensor

from megatron_fp4.arithmetic.weight_states import key_of
from megatron_fp4.mcore.checkpoints import folders
from megatron_fp4.mcore.model.weight_states import WeightStates
from megatron_fp4.mcore.runtime.ranks import on_first

# What is said of a checkpoint that lacks a state.
_STARTS = {
    "average": "no average of the weights: it starts at the weights that are loaded",
    "ramping_period": "no periods of the weights: they start at 1",
}


def are_saved(names: list[str], args: argparse.Namespace) -> bool:
    """Whether the checkpoint that the launch will load has the states `names` beside weights.

    False too if nothing is loaded, or no optimizer state. Prints a line if there is a checkpoint
    without the states. Every rank must call it. args: Megatron's.
    """
    if not args.load or args.no_load_optim or args.finetune or args.ckpt_format == "torch":
        return False
    path = on_first(lambda: folders.chosen(Path(args.load), args.ckpt_step))
    if path is None:
        return False
    keys = tuple(f".{key_of(name)}" for name in names)
    saved = bool(on_first(lambda: _has_keys(path, keys)))
    if not saved:
        for name in _STARTS.keys() & set(names):
            print_rank_0(f"megatron-fp4: {path} has {_STARTS[name]}")
    return saved


def _has_keys(path: Path, keys: tuple[str, ...]) -> bool:
    found = dist_checkpointing.load_tensors_metadata(str(path))
    return any(key in name for name in found for key in keys)


# --- the distributed optimizer --------------------------------------------------------------------


def install() -> None:
    """Lets Megatron's distributed optimizer save and load the states beside weights. Idempotent.

    C/optimizer/distrib_optimizer.py has a fixed list of the tensors in an optimizer's state, such
    as Adam's moments, and requires each of them for every parameter. The patched methods add the
    states to that list. For weights without states they supply zeros where all parameters must have
    the same tensors, and drop them again where a parameter is saved alone.
    """
    if hasattr(DistributedOptimizer._get_main_param_and_optimizer_states, "__wrapped__"):
        return
    names = DistributedOptimizer.optimizer_state_keys.fget
    states_of = DistributedOptimizer._get_main_param_and_optimizer_states
    fully_reshardable = DistributedOptimizer.sharded_param_state_fully_reshardable

    def optimizer_state_keys(self: DistributedOptimizer) -> tuple[str, ...]:
        return (*names(self), *_keys(self))

    @functools.wraps(states_of)
    def _get_main_param_and_optimizer_states(
        self: DistributedOptimizer, weight: torch.nn.Parameter
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = states_of(self, weight)
        # A bucket is saved as a whole, with all its parameters, in float32.
        for key in _keys(self):
            own = found.get(key)
            like = found["param"]
            found[key] = torch.zeros_like(like).float() if own is None else own.float()
        return found

    @functools.wraps(fully_reshardable)
    def sharded_param_state_fully_reshardable(
        self: DistributedOptimizer, *args: Any, **kwargs: Any
    ) -> Any:
        saved = fully_reshardable(self, *args, **kwargs)
        if saved is not None and (keys := _keys(self)):
            weights = (weight for buffer in self.buffers for weight in buffer.param_index_map)
            for number, weight in enumerate(weights):
                if not self.fp4_weight_states.has(weight):
                    for key in keys:
                        saved[number].pop(key, None)
        return saved

    DistributedOptimizer.optimizer_state_keys = property(optimizer_state_keys)
    DistributedOptimizer._get_main_param_and_optimizer_states = _get_main_param_and_optimizer_states
    DistributedOptimizer.sharded_param_state_fully_reshardable = (
        sharded_param_state_fully_reshardable
    )


def _keys(optimizer: DistributedOptimizer) -> tuple[str, ...]:
    states: WeightStates | None = getattr(optimizer, "fp4_weight_states", None)
    return () if states is None else states.keys
