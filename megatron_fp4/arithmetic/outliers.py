"""Outlier handling of activations: clamp, and compensate with a sparse high-precision product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_fp4.arithmetic.formats import widen
from megatron_fp4.errors import ConfigError, check_choices

Scope = Literal["token", "channel", "tensor"]


@dataclass(frozen=True)
class Residual:
    """What the clamp took off: a few elements of each line of the scope, the rest zero.

    values: [lines, k] in X's dtype; places: [lines, k], where in its line each lies (int16 where
    that holds them). A line is a token, a channel, or the tensor. shape: X's.
    """

    values: Tensor
    places: Tensor
    scope: Scope
    shape: torch.Size

    def dense(self) -> Tensor:
        """[tokens, features]."""
        tokens, features = self.shape
        lines = {"token": (tokens, features), "channel": (features, tokens)}
        whole = self.values.new_zeros(lines.get(self.scope, (1, tokens * features)))
        whole.scatter_(1, self.places.long(), self.values)
        return whole.t() if self.scope == "channel" else whole.view(self.shape)


def _lines(x: Tensor, scope: Scope) -> Tensor:
    """[tokens, features] with what a quantile is taken over last."""
    return {"token": x, "channel": x.t(), "tensor": x.reshape(1, -1)}[scope]


@dataclass(frozen=True)
class OutlierClamp:
    """OCC of "Optimizing LLM Training Using FP4 Quantization" (arXiv 2501.17116, section 3.2).

    alpha: activations are clamped to their signed quantiles [1 - alpha, alpha].
    scope: what a quantile is taken over: a token's features, a channel's tokens, the tensor.
        Always over the local shard: the one place where the layout shows in the numbers.
    compensate: add residual @ W^T in high precision to the output.
    residual_in_wgrad: the residual reaches the weight gradient too (the paper does not say; it
        is the gradient of the forward pass that ran).
    """

    alpha: float = 0.99
    scope: Scope = "token"
    compensate: bool = True
    residual_in_wgrad: bool = True

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0.5 < self.alpha <= 1.0:
            raise ConfigError(f"alpha {self.alpha} must lie in (0.5, 1]")

    def kept(self, length: int) -> int:
        """How many elements of either end of a line of that length the residual has room for."""
        # Beyond a quantile are those ranked beyond it; one more, should its rank be rounded.
        return min(int((1 - self.alpha) * (length - 1)) + 2, length)

    def split(self, x: Tensor) -> tuple[Tensor, Residual]:
        """X [tokens, features] as (what is clamped, in X's dtype; the residual). They add up to x
        exactly wherever the difference fits x's dtype."""
        lines = _lines(widen(x), self.scope)
        length = lines.shape[1]
        if lines.numel() == 0:
            none = x.new_zeros(lines.shape[0], 0)
            return x, Residual(none, none.to(torch.int16), self.scope, x.shape)
        # By sorting: torch.quantile refuses more than 16 million elements.
        values, order = lines.sort(dim=1)
        low, high = _quantile(values, 1 - self.alpha), _quantile(values, self.alpha)
        raw, clamped = _lines(x, self.scope), lines.clamp(low, high).to(x.dtype)
        clamped = torch.where(clamped == raw, raw, clamped)  # a zero keeps its sign
        count = self.kept(length)
        ends = torch.cat((order[:, :count], order[:, length - count :]), 1)
        taken = raw.gather(1, ends) - clamped.gather(1, ends)
        residual = Residual(
            taken.masked_fill(low.isnan() | high.isnan(), 0),  # which ends NaN has is the sort's
            ends.to(index_dtype(length)),
            self.scope,
            x.shape,
        )
        whole = clamped.t() if self.scope == "channel" else clamped.view(x.shape)
        return whole, residual


def index_dtype(length: int) -> torch.dtype:
    """Of places in a line of that length."""
    return torch.int16 if length <= torch.iinfo(torch.int16).max else torch.int32


def ranks(q: float, length: int) -> tuple[int, int, float]:
    """The order statistics between which the q-quantile of `length` elements lies, and the weight
    of the second."""
    position = q * (length - 1)
    below = int(position)
    return below, min(below + 1, length - 1), position - below


def _quantile(ordered: Tensor, q: float) -> Tensor:
    """The q-quantile [lines, 1] of sorted lines, with linear interpolation in float64."""
    below, above, weight = ranks(q, ordered.shape[1])
    first, second = (ordered[:, i : i + 1].double() for i in (below, above))
    return (first + (second - first) * weight).to(ordered.dtype)
