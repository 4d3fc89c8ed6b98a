"""Megatron's MLP, whose gated activation can be one kernel, or a part of its linears."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.nn import functional as F

from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4RowParallelLinear


def has_swiglu(config: TransformerConfig) -> bool:
    """Whether the activation of MLPs is SwiGLU, which may be clamped or shifted."""
    return bool(config.gated_linear_unit and config.activation_func is F.silu)


def changes_swiglu(config: TransformerConfig) -> bool:
    """Whether SwiGLU is clamped or shifted, so that it is not silu(gate) * up."""
    return config.activation_func_clamp_value is not None or bool(config.glu_linear_offset)


class GatedMLP(MLP):
    """An MLP whose activation is computed by upstream, by one kernel, or by its linears.

    If both linears follow recipes and the activation is SwiGLU, fc2 computes it as it quantizes its
    X, and fc1 its gradient as it quantizes its dY (`operands.Activated`). Neither is then in
    memory. With --activation-func-fp8-input-store fc1 keeps its Y in E4M3. Otherwise the module
    calls `activation`.

    activation: [..., 2 n] -> [..., n], as `liger.swiglu`; None: upstream's activation. It may
        overwrite its input in backward: fc1's output is this module's own, and fc1 does not keep
        it. `fused_kernels.attach` sets it for SwiGLU without a bias.

    Parameters and checkpoints are upstream's.
    """

    activation: Callable[[Tensor], Tensor] | None = None

    @property
    def is_joined(self) -> bool:
        """Whether the linears compute the activation; see `join`."""
        state = getattr(self.linear_fc1, "fp4", None)
        return state is not None and state.swiglu == "before"

    def join(self) -> None:
        """Makes the linears compute the activation, if it is a SwiGLU and both follow recipes.

        Call it when recipes have been attached to the linears.
        """
        first, second = self.linear_fc1, self.linear_fc2
        if not (isinstance(first, Fp4ColumnParallelLinear) and first.may_join):
            return
        if not (isinstance(second, Fp4RowParallelLinear) and second.may_join):
            return
        if not self._has_plain_swiglu():
            return
        # A GPU has kernels for BF16 alone; Megatron's are faster than PyTorch's operators.
        if first.weight.is_cuda and self.config.params_dtype is not torch.bfloat16:
            return
        if first.fp4 is None or second.fp4 is None or first.bias is not None:
            return
        first.fp4.swiglu, second.fp4.swiglu = "before", "after"
        if self.config.activation_func_fp8_input_store:
            for state in (first.fp4, second.fp4):
                state.site = replace(state.site, kept_y=torch.float8_e4m3fn)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(output, bias that the caller adds), as upstream's forward."""
        joins = self.is_joined and self.linear_fc1.follows()  # evaluation may run in BF16
        if per_token_scale is not None or (self.activation is None and not joins):
            return super().forward(hidden_states, per_token_scale, **others)
        if joins:
            with self.linear_fc1.fp4.before_swiglu():
                activated, _ = self.linear_fc1(hidden_states)
            return self.linear_fc2(activated)
        assert self.activation is not None
        y, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(self.activation(y))

    def _has_plain_swiglu(self) -> bool:
        """Whether the activation is silu(gate) * up: not clamped or shifted, nor of an expert,
        where the router weights it."""
        config, is_expert = self.config, self.linear_fc1.is_expert
        is_plain = has_swiglu(config) and not changes_swiglu(config)
        return bool(is_plain and not is_expert and not config.use_te_activation_func)
