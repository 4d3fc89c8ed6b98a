"""A norm and a column-parallel linear in one module, for Transformer Engine's fused module."""

from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear

_OURS, _ENGINES = "layer_norm.", "layer_norm_"  # how the norm's keys start in a state dict


class Fp4NormColumnParallelLinear(Fp4ColumnParallelLinear):
    """Y = norm(X) W^T, for Megatron's TELayerNormColumnParallelLinear.

    The norm is Transformer Engine's, in high precision, and runs on its own. In checkpoints its
    parameters have the names that the fused module gives them: layer_norm_weight, layer_norm_bias.

    The arguments are those of the linear. input_size is the norm's size too.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **others: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        self.layer_norm = transformer_engine.TENorm(
            config=config, hidden_size=input_size, eps=config.layernorm_epsilon
        )
        self.register_state_dict_post_hook(_as_transformer_engine_names_them)
        self.register_load_state_dict_pre_hook(_as_the_norm_names_them)

    def forward(self, input_: Tensor, *others: Any, **named: Any) -> Any:
        """(Y, bias), as the linear's forward. input_: X before the norm."""
        return super().forward(self.layer_norm(input_), *others, **named)


def _as_transformer_engine_names_them(
    module: Any, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for name in [name for name in state if name.startswith(prefix + _OURS)]:
        value = state.pop(name)
        if not name.endswith("_extra_state"):  # of FP8, which the norm does not have
            state[prefix + _ENGINES + name.removeprefix(prefix + _OURS)] = value


def _as_the_norm_names_them(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in module.layer_norm.state_dict():
        saved = prefix + _ENGINES + name
        if saved in state:
            state[prefix + _OURS + name] = state.pop(saved)
