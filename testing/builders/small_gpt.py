"""A LLaMA-like model of this package's linears, built by Megatron's own builder."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from torch import Tensor

from megatron_fp4.mcore.model.spec import layer_spec

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}


def config(**options: Any) -> TransformerConfig:
    """The TransformerConfig of a LLaMA with this package's linears. options: fields to replace."""
    common = {
        "fp4_recipe": "a recipe",  # any name: the linears follow the run's recipe
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "transformer_impl": "local",
    }
    return TransformerConfig(**LLAMA | common | options)


def build(
    transformer: TransformerConfig,
    vocabulary: int,
    sequence: int,
    vp_stage: int | None = None,
    **options: Any,
) -> MegatronModule:
    """The part of a model that belongs to one pipeline stage, built by Megatron.

    vocabulary: the number of tokens. sequence: the largest number of positions. vp_stage: the
    virtual pipeline stage, if there is one. options: other fields of Megatron's GPTModelConfig.
    """
    common = {
        "transformer_layer_spec": layer_spec,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }
    model = GPTModelConfig(
        transformer=transformer, vocab_size=vocabulary, seq_length=sequence, **common | options
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModelBuilder(model).build_model(groups, vp_stage=vp_stage)


def losses_and_gradients(model: MegatronModule) -> list[Tensor]:
    """The loss of each token of two random sequences, then the gradients of all parameters.

    model: with a vocabulary of 96 tokens or more, for 16 positions or more.
    """
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16).expand(2, -1)
    losses = model(tokens, positions, None, labels=tokens.roll(-1, 1))
    model.zero_grad()
    losses.sum().backward()
    return [losses.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
