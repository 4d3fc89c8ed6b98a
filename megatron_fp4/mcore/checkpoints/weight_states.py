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
from torch.distributed.checkpoint import FileSystemReader

from megatron_fp4.mcore.checkpoints import folders
from megatron_fp4.mcore.model.saved_states import SavedStates, is_of_any
from megatron_fp4.mcore.model.weight_states import WeightStates
from megatron_fp4.mcore.runtime.ranks import on_first

# What is said of a checkpoint that lacks a state: of all weights, and of some.
_STARTS = {
    "average": ("average", "it starts at the weights that are loaded",
                "they start at the weights that are loaded"),
    "ramping_period": ("periods", "they start at 1", "theirs start at 1"),
}  # fmt: skip
_SHOWN = 3  # how many linears a line names


def saved_states(names: list[str], args: argparse.Namespace) -> SavedStates:
    """Which of the states `names` are in the checkpoint that the launch will load.

    The result is empty if no optimizer state is loaded, and for the format torch, where an
    optimizer takes whatever state the file has. Every rank must call it. args: Megatron's.
    """
    if not args.load or args.no_load_optim or args.finetune or args.ckpt_format == "torch":
        return SavedStates()
    found = on_first(lambda: _read(names, args))
    return SavedStates() if found is None else SavedStates(found[0], frozenset(names), found[1])


def _read(
    names: list[str], args: argparse.Namespace
) -> tuple[frozenset[str], argparse.Namespace] | None:
    """(keys of tensors, arguments of the run that saved); None without a complete checkpoint.

    Loading tells what is wrong with one that is not complete.
    """
    if folders.problem_in(*_places(args)) or (path := folders.chosen(*_places(args))) is None:
        return None
    if not (path / ".metadata").exists():
        return None  # the format torch: the optimizer's own state has these tensors
    # Megatron's load_tensors_metadata fails with the properties of tensors that torch 2.15 saves.
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    states = frozenset(key for key in keys if is_of_any(key, names))
    # Most checkpoints have none, and their arguments need not be read twice.
    saved = dist_checkpointing.load_common_state_dict(str(path)).get("args") if states else None
    return states, saved or argparse.Namespace()


def _places(args: argparse.Namespace) -> tuple[Path, int | None, Path | None]:
    """The arguments of `folders.chosen`."""
    folder, beside = Path(args.load), None
    if args.non_persistent_ckpt_type is not None:
        beside = folders.non_persistent_folder(args, folder)
    return folder, args.ckpt_step, beside


def complete(states: WeightStates, args: argparse.Namespace) -> None:
    """Starts the states that the loaded checkpoint lacks, and prints a line that says so.

    Every rank must call it, after Megatron has looked for a checkpoint. args: Megatron's.
    """
    found = states.complete()
    path = on_first(lambda: folders.chosen(*_places(args))) if args.load else None
    source = path or args.pretrained_checkpoint
    if source is None:
        return
    without = args.no_load_optim or args.finetune
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


# --- the distributed optimizer --------------------------------------------------------------------


def install() -> None:
    """Lets Megatron's distributed optimizer save and load the states beside weights. Idempotent.

    C/optimizer/distrib_optimizer.py has a fixed list of the tensors in an optimizer's state, such
    as Adam's moments, and requires each of them for every parameter. The patched methods add the
    states to that list. For weights without states they supply zeros where all parameters must have
    the same tensors, and drop them again where a parameter is saved alone. In loading they leave
    out what the checkpoint lacks.
    """
    if hasattr(DistributedOptimizer._get_main_param_and_optimizer_states, "__wrapped__"):
        return
    names = DistributedOptimizer.optimizer_state_keys.fget
    states_of = DistributedOptimizer._get_main_param_and_optimizer_states
    set_states_of = DistributedOptimizer._set_main_param_and_optimizer_states
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

    @functools.wraps(set_states_of)
    def _set_main_param_and_optimizer_states(
        self: DistributedOptimizer, weight: torch.nn.Parameter, tensors: dict[str, Any]
    ) -> None:
        states: WeightStates | None = getattr(self, "fp4_weight_states", None)
        if states is not None:
            states.drop_lacking(weight, tensors)
        set_states_of(self, weight, tensors)

    @functools.wraps(fully_reshardable)
    def sharded_param_state_fully_reshardable(
        self: DistributedOptimizer, *args: Any, **kwargs: Any
    ) -> Any:
        saved = fully_reshardable(self, *args, **kwargs)
        if saved is not None and (keys := _keys(self)):
            weights = (weight for buffer in self.buffers for weight in buffer.param_index_map)
            for number, weight in enumerate(weights):
                _leave_out(self.fp4_weight_states, saved[number], weight, keys)
        return saved

    DistributedOptimizer.optimizer_state_keys = property(optimizer_state_keys)
    DistributedOptimizer._get_main_param_and_optimizer_states = _get_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states
    DistributedOptimizer.sharded_param_state_fully_reshardable = (
        sharded_param_state_fully_reshardable
    )


def _leave_out(
    states: WeightStates, saved: dict[str, Any], weight: Tensor, keys: tuple[str, ...]
) -> None:
    """Removes from the sharded state of a weight the states that it has not, or cannot load."""
    for key in keys:
        if not states.saves(weight, key):
            saved.pop(key, None)
    if states.is_loading:
        states.keep_saved(saved)


def _keys(optimizer: DistributedOptimizer) -> tuple[str, ...]:
    states: WeightStates | None = getattr(optimizer, "fp4_weight_states", None)
    return () if states is None else states.keys_of(optimizer)
