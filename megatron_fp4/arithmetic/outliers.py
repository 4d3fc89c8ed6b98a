"""Outliers of activations: clamps X to quantiles, and keeps what was clamped off as a residual.

docs/numerics.md, Outlier clamp, defines the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.errors import ConfigError, check_choices

Scope = Literal["token", "channel", "tensor"]


@dataclass(frozen=True)
class Residual:
    """X minus the clamped X, stored sparsely: up to k elements of each line are not zero.

    A line is what one quantile is taken over: a token, a channel, or the tensor (`scope`).

    values: [lines, k] in X's dtype. places: [lines, k], the index of each value in its line, in
    `index_dtype` (int64 after a gather over ranks). shape: that of X, [tokens, features].
    """

    values: Tensor
    places: Tensor
    scope: Scope
    shape: torch.Size

    def dense(self) -> Tensor:
        """The residual as a dense matrix [tokens, features], in X's dtype."""
        tokens, features = self.shape
        lines = {"token": (tokens, features), "channel": (features, tokens)}
        whole = self.values.new_zeros(lines.get(self.scope, (1, tokens * features)))
        whole.scatter_(1, self.places.long(), self.values)
        return whole.t() if self.scope == "channel" else whole.view(self.shape)


def _lines(x: Tensor, scope: Scope) -> Tensor:
    """x [tokens, features] as [lines, elements of a line]; see `Residual`."""
    return {"token": x, "channel": x.t(), "tensor": x.reshape(1, -1)}[scope]


@dataclass(frozen=True)
class OutlierClamp:
    """Outlier clamping and compensation (OCC) of "Optimizing LLM Training Using FP4 Quantization"
    (arXiv 2501.17116, section 3.2).

    alpha: X is clamped to its signed quantiles 1 - alpha and alpha; in (0.5, 1].
    scope: what a quantile is taken over: a token's features, a channel's tokens, or the tensor. It
        is taken over the rank's shard, so these bounds depend on the parallel layout.
    compensate: add residual @ W^T in high precision to Y.
    residual_in_wgrad: add dY^T @ residual in high precision to dW. The paper does not specify this;
        it is the gradient of the forward pass with compensation.
    form: what tells it from `hot_channels.HotChannels` in a recipe file.
    Raises ConfigError for another scope or alpha.
    """

    alpha: float = 0.99
    scope: Scope = "token"
    compensate: bool = True
    residual_in_wgrad: bool = True
    form: Literal["quantiles"] = "quantiles"

    reads: ClassVar[int] = 1  # how often a kernel that splits reads X

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0.5 < self.alpha <= 1.0:
            raise ConfigError(f"alpha {self.alpha} must lie in (0.5, 1]")

    def kept(self, length: int) -> int:
        """How many elements of each end of a line of `length` elements the residual stores."""
        # As many as are ranked beyond a quantile, and one more in case the rank is rounded.
        return min(int((1 - self.alpha) * (length - 1)) + 2, length)

    def multiplied(self, columns: int) -> int:
        """The number of features, of so many, that the products of the outliers read: all, since
        each token has its own."""
        return columns

    def nbytes(self, rows: int, columns: int, itemsize: int) -> int:
        """The bytes of the `Residual` of an X of these sizes, with elements of `itemsize` bytes."""
        lines, length = {
            "token": (rows, columns),
            "channel": (columns, rows),
            "tensor": (1, rows * columns),
        }[self.scope]
        return lines * 2 * self.kept(length) * (itemsize + index_dtype(length).itemsize)

    def split(self, x: Tensor) -> tuple[Tensor, Residual]:
        """(clamped X in X's dtype, residual) of x [tokens, features].

        Both add up to x exactly wherever the difference can be represented in x's dtype.
        """
        lines = _lines(widen(x), self.scope)
        length = lines.shape[1]
        if lines.numel() == 0:
            none = x.new_zeros(lines.shape[0], 0)
            return x, Residual(none, none.to(torch.int16), self.scope, x.shape)
        # Sorts, because torch.quantile refuses more than 16 million elements.
        values, order = lines.sort(dim=1)
        low, high = _quantile(values, 1 - self.alpha), _quantile(values, self.alpha)
        raw, clamped = _lines(x, self.scope), lines.clamp(low, high).to(x.dtype)
        clamped = torch.where(clamped == raw, raw, clamped)  # a zero keeps its sign
        count = self.kept(length)
        ends = torch.cat((order[:, :count], order[:, length - count :]), 1)
        taken = raw.gather(1, ends) - clamped.gather(1, ends)
        residual = Residual(
            taken.masked_fill(low.isnan() | high.isnan(), 0),  # NaN lines: the order is undefined
            ends.to(index_dtype(length)),
            self.scope,
            x.shape,
        )
        whole = clamped.t() if self.scope == "channel" else clamped.view(x.shape)
        return whole, residual


def index_dtype(length: int) -> torch.dtype:
    """The dtype of indices into a line of `length` elements: int16 if it suffices, else int32."""
    return torch.int16 if length <= torch.iinfo(torch.int16).max else torch.int32


def ranks(q: float, length: int) -> tuple[int, int, float]:
    """(i, j, weight): the q-quantile of `length` sorted elements lies between elements i and j, at
    this fraction of the way from i to j."""
    position = q * (length - 1)
    below = int(position)
    return below, min(below + 1, length - 1), position - below


def _quantile(ordered: Tensor, q: float) -> Tensor:
    """The q-quantile [lines, 1] of sorted lines [lines, length], interpolated linearly in float64
    and rounded once to their dtype."""
    below, above, weight = ranks(q, ordered.shape[1])
    first, second = (ordered[:, i : i + 1].double() for i in (below, above))
    return (first + (second - first) * weight).to(ordered.dtype)
