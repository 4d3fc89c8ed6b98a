"""Lets Megatron's distributed optimizer save and load the states beside weights.

C stands for megatron/core.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_fp4.mcore.checkpoints.weight_states import CheckpointedStates


def install() -> None:
    """Replaces methods of Megatron's distributed optimizer. Idempotent.

    C/optimizer/distrib_optimizer.py has a fixed list of the tensors in an optimizer's state, such
    as Adam's moments, and requires each of them for every parameter. The patched methods add the
    states to that list. For weights without states they supply zeros where all parameters must have
    the same tensors, and drop them again where a parameter is saved alone. In loading they leave
    out what the checkpoint lacks.
    """
    if hasattr(DistributedOptimizer._get_main_param_and_optimizer_states, "__wrapped__"):
        return
    names = DistributedOptimizer.optimizer_state_keys.fget
    DistributedOptimizer.optimizer_state_keys = property(lambda self: (*names(self), *_keys(self)))
    for name, wrap in (
        ("_get_main_param_and_optimizer_states", _with_zeros),
        ("_set_main_param_and_optimizer_states", _dropping_lacking),
        ("sharded_param_state_fully_reshardable", _leaving_out),
    ):
        setattr(DistributedOptimizer, name, wrap(getattr(DistributedOptimizer, name)))


def _with_zeros(upstream: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    @functools.wraps(upstream)
    def _get_main_param_and_optimizer_states(
        self: DistributedOptimizer, weight: torch.nn.Parameter
    ) -> dict[str, Tensor]:
        found = upstream(self, weight)
        # A bucket is saved as a whole, with all its parameters, in float32.
        for key in _keys(self):
            own = found.get(key)
            like = found["param"]
            found[key] = torch.zeros_like(like).float() if own is None else own.float()
        return found

    return _get_main_param_and_optimizer_states


def _dropping_lacking(upstream: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(upstream)
    def _set_main_param_and_optimizer_states(
        self: DistributedOptimizer, weight: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        states: CheckpointedStates | None = getattr(self, "fp4_weight_states", None)
        if states is not None:
            states.drop_lacking(weight, tensors)
        upstream(self, weight, tensors)

    return _set_main_param_and_optimizer_states


def _leaving_out(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def sharded_param_state_fully_reshardable(
        self: DistributedOptimizer, *args: Any, **kwargs: Any
    ) -> Any:
        saved = upstream(self, *args, **kwargs)
        if saved is not None and (keys := _keys(self)):
            weights = (weight for buffer in self.buffers for weight in buffer.param_index_map)
            for number, weight in enumerate(weights):
                _leave_out(self.fp4_weight_states, saved[number], weight, keys)
        return saved

    return sharded_param_state_fully_reshardable


def _leave_out(
    states: CheckpointedStates, saved: dict[str, Any], weight: Tensor, keys: tuple[str, ...]
) -> None:
    """Removes from the sharded state of a weight the states that it has not, or cannot load."""
    for key in keys:
        if not states.saves(weight, key):
            saved.pop(key, None)
    if states.is_loading:
        states.keep_saved(saved)


def _keys(optimizer: DistributedOptimizer) -> tuple[str, ...]:
    states: CheckpointedStates | None = getattr(optimizer, "fp4_weight_states", None)
    return () if states is None else states.keys_of(optimizer)
