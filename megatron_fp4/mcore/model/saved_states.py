"""Which weights have states beside them in a checkpoint."""

import argparse
import re
from dataclasses import dataclass, field
from functools import cached_property

from megatron_fp4.arithmetic.weight_states import key_of
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


def stack_of(linear: str) -> str:
    """The name of a linear without the numbers of its layer and expert.

    Megatron may save the weights of linears of the same such name in one tensor.
    """
    return re.sub(r"\.\d+(?=\.|$)", "", linear)


def is_of_any(key: str, names: list[str]) -> bool:
    """Whether a tensor of a checkpoint, by its key, contains one of the states `names`."""
    return any(_is_of(key, name) for name in names)


def _is_of(key: str, name: str) -> bool:
    return f".{key_of(name)}." in f"{key}."
