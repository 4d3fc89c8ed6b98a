"""Follower: the interface of what records the passes of a linear while they run in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from megatron_fp4.execution.call import Site
from megatron_fp4.execution.weights import HeldWeight


class Follower(Protocol):
    """Runs a pass and records what it does; cpp/following.py has one."""

    def forward(
        self, run: Callable[[Site], Any], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Any:
        """Calls `run` with a Site of the follower's own, and returns what it returns: (Y, a
        `ForwardContext`, the tensors that are saved for backward).

        x: [tokens, in]. weight: [out, in]. bias: [out] or None.
        """
        ...

    def backward(
        self,
        run: Callable[[Site], Any],
        held: HeldWeight | None,
        dy: Tensor,
        main_grad: Tensor | None,
        saved: Sequence[Tensor | None],
    ) -> Any:
        """Calls `run` with a Site of the follower's own, and returns what it returns: the gradients
        of X, W and the bias.

        held: W's operands, as in the forward pass. dy: [tokens, out]. main_grad: [out, in], where
        dW is added, or None. saved: what the forward pass saved.
        """
        ...
