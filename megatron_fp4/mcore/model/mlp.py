"""Megatron's MLP whose gated activation can be one kernel."""

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.mlp import MLP
from torch import Tensor


class GatedMLP(MLP):
    """An MLP that calls `activation` between its two linears, if that is set.

    activation: [..., 2 n] -> [..., n], as `liger.swiglu`; None: upstream's activation. It may
        overwrite its input in backward: fc1's output is this module's own, and fc1 does not keep
        it. `fused_kernels.attach` sets it for SwiGLU without a bias.

    Parameters and checkpoints are upstream's.
    """

    activation: Callable[[Tensor], Tensor] | None = None

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(output, bias that the caller adds), as upstream's forward."""
        if self.activation is None or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **others)
        gate_and_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(self.activation(gate_and_up))
