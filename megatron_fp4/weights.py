"""What is made of a weight once a step, for all microbatches of it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from megatron_fp4.backends import Operand, choose
from megatron_fp4.recipe import Recipe

# By "<gemm>" the operand and what is to be folded into dY; by "<gemm> decoded" the operand as the
# backend multiplies it.
Kept = dict[str, tuple[Operand, Tensor | None]]


class WeightCache:
    """W's operands, as long as W is what it was when they were made."""

    def __init__(self) -> None:
        self._stamp: Hashable = None
        self._kept: Kept = {}

    def at(self, stamp: Hashable) -> Kept:
        """What was made of W under this stamp, to be added to; what was made under another is
        forgotten."""
        if stamp != self._stamp:
            self._stamp, self._kept = stamp, {}
        return self._kept


def kept_bytes(weight: Tensor, recipe: Recipe, dtype: torch.dtype, decoded: bool) -> int:
    """What a cache takes for one weight [out, in] of a model that computes in `dtype`."""
    outputs, inputs = weight.shape
    dgrad = recipe.multiplied("dgrad")
    quantizers = ((recipe.fprop.b, (outputs, inputs)), (dgrad.b, (inputs, outputs)))
    total = sum(q.nbytes(*shape) for q, shape in quantizers if q is not None)
    if decoded:
        from_forward = recipe.backward == "forward" and recipe.fprop.b is not None
        held = ["fprop"] * (recipe.fprop.b is not None)
        held += ["dgrad"] * (dgrad.b is not None or from_forward)
        for gemm in held:
            backend = choose(recipe.multiplied(gemm), weight.device, dtype).backend
            total += weight.numel() * backend.decoded_bytes(dtype)
    return total
