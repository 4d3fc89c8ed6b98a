"""A fork whose specification has linears and an MLP of its own, which derive from Megatron's.

Its linears multiply their output by --own-scale.
"""

from functools import partial
from typing import Any

from layers import block
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.training import get_args
from provider import main


class ScaledColumnParallelLinear(ColumnParallelLinear):
    def forward(self, *given: Any, **named: Any) -> Any:
        output, bias = super().forward(*given, **named)
        return output * get_args().own_scale, bias


class PlainRowParallelLinear(RowParallelLinear):
    """As upstream's, with room for a fork's state."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.calls = 0


class ForkMLP(MLP):
    def forward(self, hidden_states: Any, *given: Any, **named: Any) -> Any:
        self.linear_fc2.calls += 1
        return super().forward(hidden_states, *given, **named)


if __name__ == "__main__":
    main(
        partial(
            block,
            linear_qkv=ScaledColumnParallelLinear,
            linear_fc1=ScaledColumnParallelLinear,
            linear_fc2=PlainRowParallelLinear,
            mlp=ForkMLP,
        )
    )
