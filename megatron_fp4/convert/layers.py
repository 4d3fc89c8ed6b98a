"""The ranges of a checkpoint's weights, layer by layer, and what quantizing them in FP4 loses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS, Quantizer
from megatron_fp4.convert import keys
from megatron_fp4.convert.blocks import ELEMENTS, blocks
from megatron_fp4.convert.keys import Address, address
from megatron_fp4.convert.torch_dist import Checkpoint
from megatron_fp4.convert.trained_recipes import TrainedRecipes

_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class Ranges:
    """What the elements of a weight are; of an expert layer, those of all its experts.

    nonfinite: how many are NaN or Inf; these are left out of the other numbers.
    quantized: how many the recipe's quantizer of W in fprop takes. clipped: those of them whose
    scaled value exceeds the format's largest. zeroed: those not zero that are rounded to zero.
    """

    elements: int = 0
    nonfinite: int = 0
    min: float = math.inf
    max: float = -math.inf
    squares: float = field(default=0.0, repr=False)
    quantized: int = 0
    clipped: int = 0
    zeroed: int = 0

    def add(self, x: Tensor) -> None:
        """Counts the elements of `x`."""
        for (block,) in blocks(x):
            finite = block[block.isfinite()].double()
            self.elements += block.numel()
            self.nonfinite += block.numel() - finite.numel()
            if finite.numel():
                self.min = min(self.min, finite.min().item())
                self.max = max(self.max, finite.max().item())
                self.squares += finite.square().sum().item()

    def quantize(self, w: Tensor, quantizer: Quantizer) -> None:
        """Counts what quantizing W [out, in] to the nearest codes loses."""
        for rows in _row_blocks(w, quantizer):
            codes = quantize_matrix(rows, replace(quantizer, rounding="nearest"), axis=1)
            scaled = codes.grid_coordinates(rows).abs()
            self.quantized += rows.numel()
            self.clipped += int((scaled > quantizer.format.max).sum())
            elements = codes.elements().view(rows.shape)
            self.zeroed += int(((elements == 0) & (rows != 0)).sum())

    def data(self) -> dict[str, Any]:
        """These numbers as JSON data."""
        found = asdict(self)
        squares, finite = found.pop("squares"), self.elements - self.nonfinite
        if not finite:
            found |= {"min": None, "max": None}
        found["absmax"] = max(abs(self.min), abs(self.max)) if finite else None
        found["rms"] = math.sqrt(squares / finite) if finite else None
        if not self.quantized:
            del found["quantized"], found["clipped"], found["zeroed"]
        return found


def ranges(checkpoint: Checkpoint) -> Iterator[tuple[str, Ranges]]:
    """(name with the layer's number, ranges) of each weight."""
    recipes = TrainedRecipes(checkpoint)
    for key in sorted(key for key in checkpoint.tensors if keys.kind(key) == "weights"):
        at, shape = address(key), checkpoint.tensors[key].shape
        layers = range(shape[0]) if at.is_stacked else [at.layer]
        experts = range(shape[at.leading - 1]) if at.has_experts else [None]
        for layer in layers:
            found = Ranges()
            for expert in experts:
                index = (layer if at.is_stacked else None, expert)
                weight = checkpoint.tensor(key, tuple(i for i in index if i is not None))
                found.add(weight)
                quantizer = quantizer_of(recipes, at, layer, expert)
                if quantizer is not None and weight.dim() == 2:
                    found.quantize(weight, quantizer)
            yield _numbered(at.name, layer), found


def quantizer_of(
    recipes: TrainedRecipes, at: Address, layer: int | None, expert: int | None
) -> Quantizer | None:
    """The quantizer of W in fprop of the linear at an address; None if it is not quantized.

    recipes: of the run that saved.
    """
    module, _, parameter = at.name.rpartition(".")
    if layer is None or parameter != "weight" or module.rpartition(".")[2] not in _LINEARS:
        return None
    recipe = recipes.of(_numbered(module, layer, expert))
    return None if recipe is None else recipe.fprop.b


def _numbered(name: str, layer: int | None, expert: int | None = None) -> str:
    """The name of a weight or module with the numbers of its layer and expert."""
    if layer is not None:
        name = re.sub(r"\blayers\.", f"layers.{layer}.", name, count=1)
    if expert is not None:
        name = name.replace(".experts.experts.", f".experts.local_experts.{expert}.")
    return name


def _row_blocks(w: Tensor, quantizer: Quantizer) -> Iterator[Tensor]:
    """Rows of W that are quantized without the others."""
    across = quantizer.block[0]
    if quantizer.tensor_max or across == WHOLE_AXIS:
        yield w
        return
    yield from w.split(max(ELEMENTS // w.shape[1] // across, 1) * across)
