"""The weights of a checkpoint's linears as training's forward pass quantized them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_fp4.arithmetic.quantize import quantize
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer, list_quantizers
from megatron_fp4.arithmetic.weight_states import key_of
from megatron_fp4.convert.huggingface.layouts import Entry
from megatron_fp4.convert.torch_dist import Checkpoint
from megatron_fp4.convert.trained_recipes import TrainedRecipes
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe


def is_expert(entry: Entry) -> bool:
    """Whether this is the weight of an expert, other than a shared one."""
    return entry.linear is not None and ".local_experts." in entry.linear


@dataclass(frozen=True)
class WeightQuantizer:
    """How the weight of a linear is quantized.

    w: the quantizer of W. recipe: the recipe whose fprop has it; None if training did not quantize
    the weight so.
    """

    w: Quantizer
    recipe: Recipe | None


class QuantizedWeights:
    """Which weights of a checkpoint are exported in FP4, and their codes and scales.

    entries: of the model. problem: why a format cannot hold what a quantizer makes, in a few words,
    or "" if it can. form: the name of that format. quantize_as: the quantizer for weights that
    training did not quantize, or None. These do not include linears that the run's flags keep in
    BF16.

    Raises ConfigError if the format cannot hold the codes of training, and if there are none.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        entries: Sequence[Entry],
        problem: Callable[[Quantizer], str],
        form: str,
        quantize_as: Quantizer | None,
    ) -> None:
        self._checkpoint, self._problem, self._form = checkpoint, problem, form
        self._recipes, self._quantize_as = TrainedRecipes(checkpoint), quantize_as
        self.linears = [entry for entry in entries if entry.linear is not None]
        found = {entry: self._choice(entry) for entry in self.linears}
        self.choices = {entry: choice for entry, choice in found.items() if choice is not None}
        self._latest: tuple[Entry, QuantizedTensor] | None = None
        if not self.choices:
            raise ConfigError(
                f"{checkpoint.path} was trained without FP4 weights in the forward pass: use "
                f"--format plain, or --quantize-as {self._closest} to quantize the weights now"
            )

    def _choice(self, entry: Entry) -> WeightQuantizer | None:
        assert entry.linear is not None
        recipe = self._recipes.of(entry.linear)
        w = None if recipe is None else recipe.fprop.b
        if recipe is not None and w is not None:
            problem = self._obstacle(recipe, w)
            if not problem:
                return WeightQuantizer(w, recipe)
            if self._quantize_as is None:
                raise ConfigError(
                    f"{entry.linear} follows {recipe.name}, with {problem}, which {self._form} "
                    f"cannot hold: use --format plain, or --quantize-as {self._closest} to "
                    "quantize it anew"
                )
        if self._quantize_as is None or self._recipes.keeps_in_bf16(entry.linear):
            return None
        return WeightQuantizer(self._quantize_as, None)

    def _obstacle(self, recipe: Recipe, w: Quantizer) -> str:
        """Why the codes of training cannot be exported; "" if they can."""
        if recipe.fprop.hadamard is not None:
            return "a Hadamard transform of W"
        if w.draws:
            return "stochastic rounding of W"
        if w.rounding == "ema" and not self._has_averages:
            return (
                "rounding towards an average of W, of which the checkpoint has none by weight (save"
                " the optimizer, and if distributed with --dist-ckpt-optim-fully-reshardable; strip"
                " with --keep-average)"
            )
        return self._problem(w)

    @cached_property
    def _closest(self) -> str:
        """The named quantizer that is closest to how training quantized W: with the formats and
        rule of some linear's W, at the save or else before. MXFP4 if no name has these."""
        named = {
            (q.element, q.scale, q.rule, q.inflate): name
            for name in reversed(list_quantizers())
            if not (q := get_quantizer(name)).stochastic and not self._problem(q)
        }
        for entry in self.linears:
            assert entry.linear is not None
            for recipe in self._recipes.until_the_save(entry.linear):
                w = recipe.fprop.b
                if w and (name := named.get((w.element, w.scale, w.rule, w.inflate))):
                    return name
        return "mxfp4"

    @cached_property
    def _has_averages(self) -> bool:
        return any(self._average_key(linear) is not None for linear in self.linears)

    def _average_key(self, entry: Entry) -> str | None:
        """The key of a weight's average; None if the optimizer kept none, as of a frozen weight."""
        ending = f".{key_of('average')}.{entry.key}"
        keys = (key for key in self._checkpoint.tensors if key.endswith(ending))
        return next(keys, None)

    def shape(self, entry: Entry) -> torch.Size:
        """[out, in] of a linear."""
        return torch.Size(self._checkpoint.tensors[entry.key].shape[len(entry.index) :])

    def quantized(self, entry: Entry) -> QuantizedTensor:
        """Codes and scales of Megatron's weight [out, in] of a linear in `choices`.

        The latest result is kept, since several tensors are made of one. Raises ConfigError for a
        weight with a NaN or an Inf.
        """
        if self._latest is None or self._latest[0] != entry:
            self._latest = entry, self._quantize(entry)
        return self._latest[1]

    def _quantize(self, entry: Entry) -> QuantizedTensor:
        w = self.choices[entry].w
        weight = self._checkpoint.tensor(entry.key, entry.index)
        average = None
        if w.rounding == "ema":  # the average of a frozen weight is the weight
            key = self._average_key(entry)
            average = weight.float() if key is None else self._checkpoint.tensor(key, entry.index)
        try:
            made = quantize(weight, w, average=average)
        except ConfigError as error:
            raise ConfigError(f"{entry.linear}: {error}") from error
        if made.tally()[1]:
            raise ConfigError(f"{entry.linear} has a NaN or an Inf in its weight: export none")
        return made

    def summary(self) -> list[str]:
        """Lines that tell which weights have the codes of training, and which have not."""
        trained: dict[str, int] = {}
        for choice in self.choices.values():
            if choice.recipe is not None:
                trained[choice.recipe.name] = trained.get(choice.recipe.name, 0) + 1
        lines = [
            f"{count} of {len(self.linears)} linears: the codes of recipe {name}'s forward pass"
            for name, count in trained.items()
        ]
        if asked := sum(choice.recipe is None for choice in self.choices.values()):
            lines.append(
                f"{asked} of {len(self.linears)} linears: quantized now by --quantize-as; training "
                "did not have these codes"
            )
        if kept := len(self.linears) - len(self.choices):
            lines.append(
                f"{kept} of {len(self.linears)} linears: in high precision, as in training"
            )
        return lines
