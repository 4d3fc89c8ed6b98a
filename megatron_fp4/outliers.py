"""Outlier handling of activations: clamp, and compensate with a sparse high-precision product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_fp4.errors import ConfigError, check_choices
from megatron_fp4.formats import widen


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
    scope: Literal["token", "channel", "tensor"] = "token"
    compensate: bool = True
    residual_in_wgrad: bool = True

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0.5 < self.alpha <= 1.0:
            raise ConfigError(f"alpha {self.alpha} must lie in (0.5, 1]")

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(clamped, residual), both [tokens, features] in x's dtype; they add up to x exactly
        wherever the difference fits x's dtype."""
        if x.numel() == 0:
            return x, x
        wide = widen(x)
        low, high = self._quantile(wide, 1 - self.alpha), self._quantile(wide, self.alpha)
        clamped = wide.clamp(low, high).to(x.dtype)
        return clamped, x - clamped

    def _quantile(self, x: Tensor, q: float) -> Tensor:
        """The q-quantile with linear interpolation, broadcastable against x. By sorting, since
        torch.quantile refuses more than 16 million elements."""
        along = {"token": x, "channel": x.t(), "tensor": x.reshape(1, -1)}[self.scope]
        ordered = along.sort(dim=-1).values
        position = q * (along.shape[-1] - 1)
        below = int(position)
        above = min(below + 1, along.shape[-1] - 1)
        value = ordered[:, below].lerp(ordered[:, above], position - below)
        return value[:, None] if self.scope == "token" else value[None, :]
