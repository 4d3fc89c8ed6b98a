"""Which weights have states beside them in a checkpoint."""

import argparse
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader

from megatron_fp4.arithmetic.weight_states import key_of
from megatron_fp4.mcore.checkpoints import folders
from megatron_fp4.mcore.runtime.ranks import on_first
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import content
from megatron_fp4.recipes.assignment import Modules, recipe_for

# How the keys of tensors in the distributed optimizer's default format begin. It saves a bucket of
# many weights as one tensor.
_BUCKETS = "optimizer.distributed.dp_group_idx_"


@dataclass(frozen=True)
class SavedStates:
    """Which states beside weights (such as averages) a checkpoint has.

    keys: the names of the checkpoint's tensors that contain states; empty if there are none, or if
        the launch loads no optimizer state.
    names: the states that the launch looked for.
    args: Megatron's arguments of the run that saved the checkpoint.
    """

    keys: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    args: argparse.Namespace = field(default_factory=argparse.Namespace)

    def names_of(self, linear: str, number: int | None) -> frozenset[str]:
        """The states that the checkpoint has of the weight of a linear.

        A tensor may have zeros for a weight that had no state, so the recipes of the run that saved
        decide. linear: its global module name. number: of its decoder layer, from 1.
        Raises ConfigError for a recipe that is of another version.
        """
        if not self._found or not hasattr(self.args, "fp4_recipe_content"):
            return self._found
        recipe = recipe_for(linear, number, *self._recipes, self.args)
        return self._found & recipe.kept_dtypes.keys() if recipe else frozenset()

    def names_for(self, group: int) -> set[str]:
        """The states in the tensors that an optimizer of the model would load.

        group: its number in Megatron's keys; an optimizer for experts has one of its own.
        """
        keys = [
            key for key in self.keys if key.startswith((f"{_BUCKETS}{group}.", "optimizer.state."))
        ]
        return {name for name in self.names if any(_is_of(key, name) for key in keys)}

    def has_tensor(self, key: str) -> bool:
        """Whether the checkpoint has a tensor of this key, or its parts, of longer keys."""
        return key in self.keys or any(saved.startswith(key) for saved in self.keys)

    @cached_property
    def _found(self) -> frozenset[str]:
        return frozenset(name for name in self.names if any(_is_of(k, name) for k in self.keys))

    @cached_property
    def _recipes(self) -> tuple[Recipe | None, Modules]:
        return content.recorded(self.args)


def saved_states(names: list[str], args: argparse.Namespace) -> SavedStates:
    """Which of the states `names` are in the checkpoint that the launch will load.

    The result is empty if no optimizer state is loaded, and for the format torch, where an
    optimizer takes whatever state the file has. Every rank must call it. args: Megatron's.
    """
    if not args.load or args.no_load_optim or args.finetune or args.ckpt_format == "torch":
        return SavedStates()
    found = on_first(lambda: _read(names, args))
    return SavedStates() if found is None else SavedStates(found[0], frozenset(names), found[1])


def loaded_folder(args: argparse.Namespace) -> Path | None:
    """The folder of the checkpoint that Megatron loads or has loaded from --load; None: none.

    Every rank must call it. args: Megatron's.
    """
    if not args.load:
        return None
    return on_first(lambda: folders.chosen(*folders.load_places(args, Path(args.load))))


def _read(
    names: list[str], args: argparse.Namespace
) -> tuple[frozenset[str], argparse.Namespace] | None:
    """(keys of tensors, arguments of the run that saved); None without a complete checkpoint.

    Loading tells what is wrong with one that is not complete.
    """
    places = folders.load_places(args, Path(args.load))
    if folders.problem_in(*places) or (path := folders.chosen(*places)) is None:
        return None
    if not (path / ".metadata").exists():
        return None  # the format torch: the optimizer's own state has these tensors
    # Megatron's load_tensors_metadata fails with the properties of tensors that torch 2.15 saves.
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    states = frozenset(key for key in keys if any(_is_of(key, name) for name in names))
    # Most checkpoints have none, and their arguments need not be read twice.
    saved = dist_checkpointing.load_common_state_dict(str(path)).get("args") if states else None
    return states, saved or argparse.Namespace()


def _is_of(key: str, name: str) -> bool:
    """Whether a tensor of a checkpoint, by its key, contains the state `name`."""
    return f".{key_of(name)}." in f"{key}."
