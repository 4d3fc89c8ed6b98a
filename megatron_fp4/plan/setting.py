"""Setting: all that a plan is compiled from beside the recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from megatron_fp4.target import Target


class Sharding(NamedTuple):
    """How a linear is sharded over the ranks of a tensor-parallel group.

    x, w, dy: the axis along which the operand's features are sharded (X [tokens, in], W [out, in],
        dY [tokens, out]); None where every rank has all of them.
    tokens: the operand of which sequence parallelism leaves each rank a part of the tokens: "x" in
        a column-parallel linear, whose dX is scattered likewise; "dy" in a row-parallel one, whose
        Y is; None without sequence parallelism.
    sums_dx: dX is a partial sum, and every rank takes the sum over the ranks.
    """

    ranks: int = 1
    x: int | None = None
    w: int | None = None
    dy: int | None = None
    tokens: Literal["x", "dy"] | None = None
    sums_dx: bool = False

    def axis(self, letter: str) -> int | None:
        """The sharded axis of operand "x", "w" or "dy"."""
        return {"x": self.x, "w": self.w, "dy": self.dy}[letter]


UNSHARDED = Sharding()


def column_parallel(
    ranks: int, *, sequence_parallel: bool = False, sums_dx: bool = False
) -> Sharding:
    """W sharded along its outputs."""
    tokens: Literal["x"] | None = "x" if sequence_parallel else None
    return Sharding(ranks, w=0, dy=1, tokens=tokens, sums_dx=sums_dx)


def row_parallel(ranks: int, *, sequence_parallel: bool = False) -> Sharding:
    """W sharded along its inputs."""
    return Sharding(ranks, x=1, w=1, tokens="dy" if sequence_parallel else None)


@dataclass(frozen=True)
class Setting:
    """Where a linear runs, and what is asked of it.

    tokens: how many tokens a rank holds; under sequence parallelism its part of them. A plan may
        serve several numbers of tokens: then this is a common divisor of them, or 0 for no tokens.
    inputs, outputs: W is [outputs, inputs] on this rank.
    dtype: what the model computes in. weight_dtype: of W's gradient where it has no main_grad.
    main_grad: the dtype of the main_grad that dW is added to; None where there is none.
    dx, dw: which gradients are asked for. has_bias: a bias is added before Y is rounded.
    keeps_w: W's operands are kept for all microbatches of a step, as codes ("packed") or in the
        form in which they are multiplied ("decoded"); None: they are made in every call.
    packs_x: X is kept for backward as wgrad's codes, where wgrad quantizes X itself.
    """

    tokens: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    target: Target
    weight_dtype: torch.dtype
    sharding: Sharding = UNSHARDED
    main_grad: torch.dtype | None = None
    dx: bool = True
    dw: bool = True
    has_bias: bool = False
    keeps_w: Literal["packed", "decoded"] | None = None
    packs_x: bool = True

    def has_part(self, letter: str) -> bool:
        """Whether this rank holds only a part of the operand's tokens."""
        return self.sharding.tokens == letter

    def shape(self, letter: str, is_part: bool) -> tuple[int, int]:
        """Rows and columns of X, W or dY; is_part: of this rank's tokens alone."""
        if letter == "w":
            return self.outputs, self.inputs
        scattered = self.sharding.tokens is not None
        tokens = self.tokens * (self.sharding.ranks if scattered and not is_part else 1)
        return tokens, self.inputs if letter == "x" else self.outputs


def divisor(tokens: int, multiple: int) -> int:
    """The `Setting.tokens` that stands for `tokens` and all numbers of tokens that have the same
    common divisor with `multiple`; 0 for 0."""
    return math.gcd(tokens, multiple) if tokens else 0
