"""Hot channels of activations: features of X that fprop multiplies in high precision.

docs/numerics.md, Hot channels, defines the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.errors import ConfigError, check_choices


@dataclass(frozen=True)
class Columns:
    """Some columns of X [tokens, features]: what hot channels split off.

    values: [tokens, k] in X's dtype. channels: int64 [k], their features, in ascending order.
    """

    values: Tensor
    channels: Tensor


Outliers = Residual | Columns  # what is split off X


@dataclass(frozen=True)
class HotChannels:
    """The channels of X with the largest norms, after the hot channels of "Dissecting Outlier
    Dynamics in LLM NVFP4 Pretraining" (arXiv 2602.02047).

    Of each `group` successive channels the `count` with the largest sums of squares over the tokens
    of a microbatch are hot. The quantized X has zeros there, so that they widen no block's scale.
    Y gets their product with W, and dW that of dY with them, in high precision. The paper patches
    the rounding errors of hot channels of X and W, and takes the hottest of all channels. A group
    never spans ranks, so that the choice is the same in every layout.

    Raises ConfigError for a count that leaves no channel of a group, or none of them hot.
    """

    group: int = 32
    count: int = 1
    form: Literal["channels"] = "channels"

    compensate: ClassVar[bool] = True
    residual_in_wgrad: ClassVar[bool] = True
    reads: ClassVar[int] = 2  # how often `split` reads x

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 < self.count < self.group:
            raise ConfigError(
                f"count {self.count} must lie between 0 and the group of {self.group} channels"
            )

    def split(
        self, x: Tensor, total: Callable[[Tensor], Tensor] = lambda own: own
    ) -> tuple[Tensor, Columns]:
        """Splits the hot channels off x [tokens, features].

        Returns (a copy of x with zeros in its hot channels, the values of these channels).
        total: called with a tensor, returns its sum over the ranks that share the tokens; by
        default the tensor itself, for one rank.
        """
        hot = self._hottest(total(x.double().square().sum(0)))
        return x.index_fill(1, hot, 0), Columns(x.index_select(1, hot), hot)

    def _hottest(self, scores: Tensor) -> Tensor:
        """The indices of the hot channels, int64 [k] in ascending order: in each group those with
        the highest scores.

        scores: of all channels, [features]. Of channels with equal scores the first is taken. A NaN
        is higher than every number.
        """
        by_group = scores.view(-1, self.group)
        ranked = by_group.argsort(stable=True, dim=1, descending=True)[:, : self.count]
        first = torch.arange(0, scores.numel(), self.group, device=scores.device)
        return (ranked.sort(1).values + first[:, None]).flatten()

    def multiplied(self, columns: int) -> int:
        """The number of features, of so many, that the products of the outliers read."""
        return columns // self.group * self.count

    def nbytes(self, rows: int, columns: int, itemsize: int) -> int:
        """The bytes of the `Columns` of an X of these sizes, with elements of `itemsize` bytes."""
        return self.multiplied(columns) * (rows * itemsize + torch.int64.itemsize)
