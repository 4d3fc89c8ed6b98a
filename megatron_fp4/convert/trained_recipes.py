"""Which recipe each linear of a checkpoint followed when it was saved."""

from __future__ import annotations

import re

from megatron_fp4.convert.torch_dist import Checkpoint
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import content
from megatron_fp4.recipes.assignment import recipe_for


class TrainedRecipes:
    """Tells which recipe each linear followed when its run saved a checkpoint.

    It reads the arguments of the launch, which the checkpoint records.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._args = checkpoint.args()
        self._recipe, self._modules = content.recorded(self._args)
        steps = getattr(self._args, "train_iters", None) or 1
        self._progress = max(checkpoint.common().get("iteration", 0) - 1, 0) / steps

    def of(self, linear: str) -> Recipe | None:
        """The recipe that was in force in the last step before the save; None for BF16.

        linear: a global module name, such as "decoder.layers.3.mlp.linear_fc1".
        """
        return next(iter(self.until_the_save(linear)), None)

    def until_the_save(self, linear: str) -> tuple[Recipe, ...]:
        """The recipes that a linear followed from the first step to the save, the last one first;
        () for BF16 throughout. linear: as for `of`."""
        if self._recipe is None:
            return ()
        number = int(re.findall(r"\.layers\.(\d+)\.", linear)[0]) + 1
        found = recipe_for(linear, number, self._recipe, self._modules, self._args)
        return () if found is None else found.in_turn[found.phases_begun(self._progress) :: -1]

    def keeps_in_bf16(self, linear: str) -> bool:
        """Whether flags of an FP4 run keep this linear in BF16."""
        return self._recipe is not None and self.of(linear) is None
