"""Recipe and GemmRecipe: how each operand of the three GEMMs of a linear is made.

X is [tokens, in], W [out, in], dY [tokens, out].
  fprop  Y  = X W^T   contracts in
  dgrad  dX = dY W    contracts out
  wgrad  dW = dY^T X  contracts tokens
A recipe is data. A method that combines existing quantizers and options needs no new code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal
from zlib import crc32

import torch

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantizer import Quantizer
from megatron_fp4.arithmetic.ramping import STATES, Ramping
from megatron_fp4.arithmetic.weight_states import WeightAverage, WeightState
from megatron_fp4.errors import ConfigError
from megatron_fp4.gemms import GEMMS, OPERANDS
from megatron_fp4.recipe_fields import check_fields


@dataclass(frozen=True)
class GemmRecipe:
    """How the operands of one GEMM are made, and what multiplies its product.

    a, b: the quantizers of its operands, in the order of OPERANDS. None quantizes nothing: the
        operand stays in high precision, or in a backward GEMM under `Recipe.backward` "forward"
        stays as fprop multiplied it.
    hadamard: the Hadamard transform of both operands along the contracted axis; None is none.
    correction: multiplies the product in float32. It must undo the prescales of both quantizers:
        16/9 for two prescales of 3/4.
    """

    a: Quantizer | None = None
    b: Quantizer | None = None
    hadamard: Hadamard | None = None
    correction: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in (("a", Quantizer), ("b", Quantizer), ("hadamard", Hadamard)):
            if not isinstance(given := getattr(self, name), kind | None):
                raise ConfigError(f"{name} is a {kind.__name__} or None, not {given!r}")

    def __hash__(self) -> int:  # cheap, since every call of a linear hashes it to find its plan
        return hash((self.a, self.b))

    @property
    def quantized(self) -> bool:
        return self.a is not None or self.b is not None


HIGH_PRECISION = GemmRecipe()


def _check_recipe(given: object) -> None:
    if not isinstance(given, Recipe):
        raise ConfigError(f"recipe is a Recipe, not {given!r}: give get_recipe(name)")


@dataclass(frozen=True)
class Phase:
    """A later part of training, which follows another recipe than the first part.

    after: the share of training, in [0, 1], after which it begins.
    recipe: what holds from then on; it has no phases of its own.
    """

    after: float
    recipe: Recipe

    def __post_init__(self) -> None:
        _check_recipe(self.recipe)


@dataclass(frozen=True)
class Layers:
    """Linears that follow another recipe than the rest of the model, by their place in it.

    recipe: what they follow; one that quantizes nothing keeps them in high precision. It has no
        layers of its own.
    first, last: the first or the last so many layers of the decoder. modules: a glob for global
        module names. One of the three is given. Raises ConfigError otherwise.
    """

    recipe: Recipe
    first: int = 0
    last: int = 0
    modules: str = ""

    def __post_init__(self) -> None:
        _check_recipe(self.recipe)
        counts = [self.first, self.last]
        given = [bool(each) for each in (*counts, self.modules)]
        if sum(given) != 1 or not all(type(each) is int and each >= 0 for each in counts):
            raise ConfigError(
                "layers are the first: N or the last: N of the decoder, or modules: a glob of "
                "names; give one of the three"
            )

    def globs(self, count: int | None) -> list[str]:
        """Globs for the names of the linears, of a decoder with `count` layers. Raises ConfigError
        for more layers than it has, and for any where the number is not known (None)."""
        if self.modules:
            return [self.modules]
        if count is None or self.first + self.last > count:
            has = "an unknown number of" if count is None else count
            raise ConfigError(
                f"layers: {'first' if self.first else 'last'}: {self.first or self.last} of a "
                f"decoder with {has} layers: "
                f"{'give --num-layers' if count is None else 'name fewer'}"
            )
        numbers = range(self.first) if self.first else range(count - self.last, count)
        return [f"decoder.layers.{number}.*" for number in numbers]


@dataclass(frozen=True)
class Recipe:
    """An FP4 training method: a published one, or a user's own.

    `description.describe` describes one in words.

    paper: where the method was published; "" if it was not.
    fprop, dgrad, wgrad: the three GEMMs; the default is high precision.
    backward: "forward": dgrad and wgrad read W and X as fprop multiplied them, from fprop's codes
        (with quantizers of their own this is TetraJet's double quantization). "raw": they read the
        unquantized W and X.
    estimator: the gradient through fprop's quantizer of W; None is straight-through.
    x_estimator: the same of X.
    outliers: what is split off X before fprop quantizes it, and multiplied in high precision: by
        quantiles, or hot channels; None splits nothing off.
    x_mean: "subtracted": the mean of X over the tokens of a microbatch is subtracted before X is
        quantized, and multiplied in high precision; `in_evaluation` is "kept". The mean has a part
        of later tokens, so that a model is no longer causal in training.
    bias_gradient: the sum over tokens of dY as it came ("raw"), or of dY as dgrad's quantizer left
        it ("quantized").
    weight_average: the moving average that is kept of each weight, for quantizers of W with
        rounding ema; None keeps none.
    ramping: at which periods the optimizer updates elements of W that oscillate (Q-Ramping); None:
        all in each step.
    phases: later parts of training with recipes of their own, in their order; () for none.
    layers: linears with recipes of their own, of which the last that names a linear decides; () for
        none. Megatron's models follow them; a linear by itself does not know its place.
    Raises ConfigError for fields that contradict each other.
    """

    name: str
    paper: str = ""
    fprop: GemmRecipe = HIGH_PRECISION
    dgrad: GemmRecipe = HIGH_PRECISION
    wgrad: GemmRecipe = HIGH_PRECISION
    backward: Literal["forward", "raw"] = "raw"
    estimator: Estimator | None = None
    x_estimator: Estimator | None = None
    outliers: OutlierClamp | HotChannels | None = None
    x_mean: Literal["kept", "subtracted"] = "kept"
    bias_gradient: Literal["raw", "quantized"] = "raw"
    weight_average: WeightAverage | None = None
    ramping: Ramping | None = None
    phases: tuple[Phase, ...] = ()
    layers: tuple[Layers, ...] = ()

    def __hash__(self) -> int:  # cheap, since every call of a linear hashes it to find its plan
        return self._hash

    @cached_property
    def _hash(self) -> int:
        words = self.name, self.backward, self.x_mean  # hash(str) is another in each process
        return hash((crc32(repr(words).encode()), *self._gemms.values()))

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all linears follow this recipe from the first step to the last: it has neither
        phases nor layers."""
        return not (self.phases or self.layers)

    @property
    def weight_states(self) -> dict[str, WeightState]:
        """The state beside each weight that linears read, by name."""
        return {} if self.weight_average is None else {"average": self.weight_average}

    @property
    def kept_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of all that optimizers keep beside each weight for the recipe, by name.

        Each has the weight's shape.
        """
        states = dict.fromkeys(self.weight_states, torch.float32)
        return states if self.ramping is None else states | STATES

    def gemm(self, name: str) -> GemmRecipe:
        """The GemmRecipe of the GEMM called "fprop", "dgrad" or "wgrad"."""
        return self._gemms[name]

    @cached_property
    def _gemms(self) -> dict[str, GemmRecipe]:
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    def quantizer(self, gemm: str, operand: str) -> Quantizer | None:
        """The quantizer of operand "x", "w" or "dy" of a GEMM; None where it has none."""
        recipe = self.gemm(gemm)
        return recipe.a if OPERANDS[gemm][0] == operand else recipe.b

    @cached_property
    def draws(self) -> bool:
        """Whether the recipe draws random bits, for stochastic rounding or for Hadamard signs."""
        transforms = [gemm.hadamard for gemm in self._gemms.values() if gemm.hadamard is not None]
        return any(transform.signs == "random" for transform in transforms) or any(
            quantizer.draws for quantizer in self.quantizers
        )

    @property
    def quantizers(self) -> list[Quantizer]:
        """The quantizers of the operands of the three GEMMs; an operand in high precision has
        none. Those of `phases` and `layers` are not included."""
        operands = [operand for gemm in self._gemms.values() for operand in (gemm.a, gemm.b)]
        return [quantizer for quantizer in operands if quantizer is not None]

    @property
    def quantized(self) -> bool:
        """Whether any of the three GEMMs quantizes an operand. The recipes of `phases`, which take
        its place later in training, are not looked at."""
        return any(gemm.quantized for gemm in self._gemms.values())

    @cached_property
    def in_turn(self) -> tuple[Recipe, ...]:
        """The recipes that hold in the course of training: this one and those of its phases."""
        return (self, *(phase.recipe for phase in self.phases))

    def phases_begun(self, progress: float) -> int:
        """How many phases have begun at `progress`, the share of training that is done."""
        return sum(progress >= phase.after for phase in self.phases)

    @cached_property
    def ever_quantized(self) -> bool:
        """Whether this recipe, or that of a phase, quantizes an operand of any GEMM."""
        return any(each.quantized for each in self.in_turn)

    @property
    def alone(self) -> tuple[Recipe, ...]:
        """The recipes of `in_turn`, each as if it held for the whole training: without phases."""
        return tuple(replace(each, phases=()) for each in self.in_turn)

    @property
    def shares(self) -> list[float]:
        """For each recipe of `in_turn`, in this order, the share of training for which it holds:
        numbers from 0 to 1, whose sum is 1."""
        begins = [0.0, *(phase.after for phase in self.phases), 1.0]
        return [end - begin for begin, end in pairwise(begins)]

    @property
    def followed(self) -> tuple[Recipe, ...]:
        """This recipe and those of its layers: what its linears follow, each with its phases."""
        return (self, *(layers.recipe for layers in self.layers))

    @cached_property
    def parts(self) -> tuple[Recipe, ...]:
        """All that its linears follow in the course of training, each once: this recipe and those
        of its phases and layers, which may have phases too."""
        return tuple(dict.fromkeys(late for each in self.followed for late in each.in_turn))

    def at(self, progress: float) -> Recipe:
        """The recipe that holds at `progress`, the share of training that is done, in [0, 1]."""
        return self.in_turn[self.phases_begun(progress)]

    @cached_property
    def in_evaluation(self) -> Recipe:
        """The recipe of forward passes that are not of training, in which X keeps its mean."""
        return self if self.x_mean == "kept" else replace(self, x_mean="kept")

    def without(self, gemms: Collection[str]) -> Recipe:
        """The recipe with these GEMMs in high precision, and no phases or layers. Its name tells
        them, and is "bf16" if they are all three.

        Estimators, outliers, mean and average go where nothing is left that they belong to. Raises
        ConfigError for no GEMM, for an unknown one, and for fprop of a recipe with ramping.
        """
        if unknown := [gemm for gemm in gemms if gemm not in GEMMS]:
            raise ConfigError(f"no GEMM is called {unknown[0]!r}; known: {', '.join(GEMMS)}")
        if not gemms:
            raise ConfigError(f"no GEMM is named: name some of {', '.join(GEMMS)}")
        if self.ramping is not None and "fprop" in gemms:
            raise ConfigError(
                f"recipe {self.name} has ramping, which follows the codes of W in fprop: keep "
                "fprop, and return dgrad and wgrad alone"
            )
        kept = [gemm for gemm in GEMMS if gemm not in gemms]
        has_fprop, gone = "fprop" in kept, ", ".join(gemm for gemm in GEMMS if gemm in gemms)
        averages = any((b := self.gemm(gemm).b) and b.rounding == "ema" for gemm in kept)
        quantizes_x = any(self.quantizer(g, "x") for g in kept if "x" in OPERANDS[g])
        return replace(
            self,
            name=f"{self.name} with {gone} in BF16" if kept else "bf16",
            phases=(),
            layers=(),
            **dict.fromkeys(gemms, HIGH_PRECISION),  # type: ignore[arg-type]
            estimator=self.estimator if has_fprop else None,
            x_estimator=self.x_estimator if has_fprop else None,
            outliers=self.outliers if has_fprop else None,
            x_mean=self.x_mean if quantizes_x else "kept",
            bias_gradient=self.bias_gradient if "dgrad" in kept else "raw",
            weight_average=self.weight_average if averages else None,
        )
