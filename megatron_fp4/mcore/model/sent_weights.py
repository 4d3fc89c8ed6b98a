"""Weights that data-parallel ranks send as fprop's codes and scales (--fp4-param-gather).

The linear reads the codes and scales from buffers that keep their addresses, so that CUDA graphs
can read them. gather/buckets.py fills the buffers after each optimizer step. The model's weight
then has the right values in this rank's own shard alone, until all ranks are told to gather the
weights themselves. In phases of training whose recipe reads more of W than these codes, the ranks
gather the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fp4 import makers
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.makers.base import Given, Maker, OperandPlan
from megatron_fp4.plan.compiler import operand_plan
from megatron_fp4.plan.owned_codes import codes_recipe
from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import Setting
from megatron_fp4.target import target_of

_COLUMNS = 1024  # of the matrix as which a part of a weight is quantized, at most


@dataclass(eq=False)
class SentWeight:
    """A weight that its owners send as codes and scales.

    recipe: of the linear, in the phases in which it reads codes. codes: what it reads.
    """

    weight: torch.nn.Parameter
    recipe: Recipe
    codes: QuantizedTensor

    @property
    def block(self) -> int:
        """The elements of a block."""
        return self.codes.quantizer.block[1]

    @property
    def rounds_to_average(self) -> bool:
        """Whether fprop's W is rounded towards a moving average."""
        return self.codes.quantizer.rounding == "ema"

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        return self.codes.codes.nbytes + self.codes.scales.nbytes

    def quantized(self, elements: Tensor, average: Tensor | None) -> QuantizedTensor:
        """The codes and scales of some elements of the weight, [n], in whole blocks.

        average: of these elements, where the rounding reads one. The result is a matrix with the
        codes and scales in the order of the elements.
        """
        columns = math.gcd(len(elements), _COLUMNS)
        shape = (len(elements) // columns, columns)
        maker, operand = _maker(self.recipe, shape, elements.dtype, elements.device)
        matrix = elements.view(shape)
        given = Given(average=None if average is None else average.view(shape))
        made = maker.make(matrix, [operand], [given])[0].operand
        assert isinstance(made, QuantizedTensor)
        return made


@cache
def _maker(
    recipe: Recipe, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Maker, OperandPlan]:
    """(maker, plan) of fprop's W of this shape."""
    setting = Setting(0, shape[1], shape[0], dtype, target_of(device), dtype)
    operand = operand_plan(recipe, "fprop", "w", setting)
    return makers.choose(operand, setting.target).maker, operand


class Group(Protocol):
    """A group of buckets; see gather/buckets.py."""

    def gather_codes(self) -> None:
        """Gathers the codes of all sent weights in it from their owners, and waits."""
        ...

    def turn_to(self, codes: bool) -> None:
        """From now on gathers codes, or the weights themselves; gathers these now, and waits."""
        ...


class SentWeights:
    """All weights of this process that are sent as codes and scales."""

    def __init__(self) -> None:
        self.by_parameter: dict[torch.nn.Parameter, SentWeight] = {}
        self._groups: list[Group] = []
        self._are_codes = True  # what the groups gather
        self._versions = -1  # of the weights that the codes are of

    def add(self, weight: Any, recipe: Recipe) -> QuantizedTensor:
        """The codes and scales that a linear with this weight and recipe will read, in the phases
        of `owned_codes.codes_in_turn`, of which there is one.

        They are undefined until the first `refresh`.
        """
        own, found = codes_recipe(recipe), self.by_parameter.get(weight)
        assert own is not None
        if found is None or found.recipe != own:
            found = self.by_parameter[weight] = SentWeight(weight, own, _empty(weight, own))
        return found.codes

    def follow(self, groups: Iterable[Group]) -> None:
        """Lets `groups`, which have all these weights, gather the codes."""
        self._groups = list(groups)

    def refresh(self, codes: bool) -> None:
        """Gathers what linears read where the last optimizer step did not.

        That is the codes, if weights were written otherwise than by an optimizer step since the
        last call, such as by loading a checkpoint; and the codes or the weights themselves, if
        linears have read the other ones so far. Every rank must call it, before the first forward
        pass of a step. codes: whether linears read codes in this step.
        """
        if codes != self._are_codes:
            for group in self._groups:
                group.turn_to(codes)
            self._are_codes = codes
        elif codes:
            self._gather_if_written()

    def _gather_if_written(self) -> None:
        # An optimizer step writes to the buffers of the weights, which raises no version.
        versions = sum(weight._version for weight in self.by_parameter)
        if versions != self._versions:
            for group in self._groups:
                group.gather_codes()
            self._versions = versions

    def expire(self) -> None:
        """Has the next `refresh` gather the codes."""
        self._versions = -1


def _empty(weight: Tensor, recipe: Recipe) -> QuantizedTensor:
    quantizer = recipe.fprop.b
    assert quantizer is not None
    rows, columns = weight.shape
    return QuantizedTensor(
        codes=weight.new_empty((rows, columns // 2), dtype=torch.uint8),
        scales=weight.new_empty((rows, columns // quantizer.block[1]), dtype=torch.uint8),
        tensor_scale=None,
        quantizer=quantizer,
        shape=weight.shape,
        axis=1,
    )
