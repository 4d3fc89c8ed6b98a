"""Setting and Sharding: all that a plan depends on beside the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch

from megatron_fp4.target import Target


class Sharding(NamedTuple):
    """How a linear is sharded over the ranks of a tensor-parallel group.

    ranks: the size of the group.
    x, w, dy: the axis along which the operand's features are sharded (X [tokens, in], W [out, in],
        dY [tokens, out]); None where every rank has all features.
    scattered: the operand of which each rank has a part of the tokens, under sequence parallelism:
        "x" in a column-parallel linear, whose dX is reduce-scattered; "dy" in a row-parallel one,
        whose Y is reduce-scattered. None without sequence parallelism.
    sums_dx: whether a rank's dX is a partial sum, which is all-reduced.
    """

    ranks: int = 1
    x: int | None = None
    w: int | None = None
    dy: int | None = None
    scattered: Literal["x", "dy"] | None = None
    sums_dx: bool = False

    def axis(self, letter: str) -> int | None:
        """The sharded axis of operand "x", "w" or "dy"."""
        return {"x": self.x, "w": self.w, "dy": self.dy}[letter]


UNSHARDED = Sharding()

# Where a linear stands beside a SwiGLU (arithmetic/swiglu.py) that it computes itself.
#   ""        nowhere: it takes X and returns Y
#   "before"  its Y goes through a SwiGLU, and the gradient of that arrives in place of dY
#   "after"   what it takes goes through a SwiGLU first, whose result is X
SwigluPlace = Literal["", "before", "after"]


# What is kept of W's operands. The first three are held for all microbatches of a step.
#   "packed"   the codes of fprop and of dgrad
#   "decoded"  also the form that the multiplier reads
#   "fprop"    the codes of fprop alone; each backward pass makes dgrad's operand
#   "remade"   nothing: a backward pass that reads fprop's codes makes them again from W
KeepsW = Literal["packed", "decoded", "fprop", "remade"]


WEIGHT_CACHE = "packed", "decoded", "fprop", "off", "remade"  # values of --fp4-weight-cache


def keeps_w_of(value: str | None) -> KeepsW | None:
    """`Setting.keeps_w` for one of WEIGHT_CACHE. None, of a flag that has no value yet, is off."""
    return None if value == "off" else cast(KeepsW | None, value)


MULTIPLIER = "auto", "bf16"  # values of --fp4-multiplier


def fastest_of(value: str) -> str | None:
    """`Setting.fastest` for one of MULTIPLIER."""
    return None if value == "auto" else value


def holds(keeps_w: KeepsW | None) -> bool:
    """Whether W is quantized once a step, and the result held for all microbatches of the step."""
    return keeps_w not in (None, "remade")


def column_parallel(
    ranks: int, *, sequence_parallel: bool = False, sums_dx: bool = False
) -> Sharding:
    """The sharding of a column-parallel linear: W is sharded along its outputs.

    ranks, sums_dx: see `Sharding`. sums_dx is False under sequence parallelism, where dX is
    reduce-scattered, and where the caller sums dX itself.
    """
    scattered: Literal["x"] | None = "x" if sequence_parallel else None
    return Sharding(ranks, w=0, dy=1, scattered=scattered, sums_dx=sums_dx)


def row_parallel(ranks: int, *, sequence_parallel: bool = False) -> Sharding:
    """The sharding of a row-parallel linear: W and X are sharded along the inputs.

    ranks: see `Sharding`.
    """
    return Sharding(ranks, x=1, w=1, scattered="dy" if sequence_parallel else None)


@dataclass(frozen=True)
class Setting:
    """What a plan depends on beside the recipe: sizes, dtypes, device, layout, and what is asked.

    tokens: the number of tokens on a rank; under sequence parallelism, of its part. A plan may
        serve several numbers of tokens: this is then a common divisor of them, or 0 for no tokens.
    inputs, outputs: W is [outputs, inputs] on this rank.
    dtype: the dtype in which the model computes.
    target: the device.
    weight_dtype: the dtype of dW where W has no main_grad.
    main_grad: the dtype of the main_grad to which dW is added; None where there is none.
    dx, dw: whether the gradients of X and W are asked for.
    has_bias: whether a bias is added before Y is rounded.
    keeps_w: what is kept of W's operands; see KeepsW. None: each call makes them, and saves fprop's
        codes for its backward pass if that reads them.
    packs_x: whether X is saved for backward as wgrad's codes, where wgrad quantizes the original X.
    swiglu: where the linear stands beside a SwiGLU.
    normed: whether what it takes goes through an RMSNorm first, whose result is X.
    kept_y: the dtype in which what goes through the SwiGLU is kept for backward, E4M3; None: dtype.
    sent_w: whether W comes as the codes and scales of fprop, which the ranks that own parts of W
        send (`Site.sent_w`). Only for recipes of which `owned_codes.reader_of_w` is None.
    fastest: the name of the fastest multiplier that may run GEMMs; None: any may.
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
    keeps_w: KeepsW | None = None
    packs_x: bool = True
    swiglu: SwigluPlace = ""
    normed: bool = False
    kept_y: torch.dtype | None = None
    sent_w: bool = False
    fastest: str | None = None

    @property
    def holds_w(self) -> bool:
        """Whether W is quantized once a step, and the result held for all of its microbatches."""
        return holds(self.keeps_w)

    def has_part(self, letter: str) -> bool:
        """Whether this rank holds only a part of the operand's tokens."""
        return self.sharding.scattered == letter

    def shape(self, letter: str, is_part: bool) -> tuple[int, int]:
        """Rows and columns of "x", "w" or "dy" on this rank.

        is_part: count only this rank's part of the tokens, under sequence parallelism.
        """
        if letter == "w":
            return self.outputs, self.inputs
        is_scattered = self.sharding.scattered is not None
        tokens = self.tokens * (self.sharding.ranks if is_scattered and not is_part else 1)
        return tokens, self.inputs if letter == "x" else self.outputs
