"""The small models that the layouts train, sharded as a layout says.

Parameters are a function of their global names, so every layout trains the same model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron_fp4.arithmetic.philox import stream_id
from megatron_fp4.mcore.model.attach import attach
from megatron_fp4.mcore.model.run import Run
from testing.builders import small_gpt
from testing.layouts.matrix import ComparedLayout

VOCABULARY, SEQUENCE = 96, 32
# Four layers fill four pipeline stages, or two of two chunks; four ranks' shards hold whole blocks.
LLAMA: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 16,
}
GPT2 = {
    "num_query_groups": 8,
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
}
MOE = {
    "num_layers": 2,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
}
# What each model has other than LLaMA: its transformer's, and the rest.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "wide": ({"num_query_groups": 8, "kv_channels": 32, "ffn_hidden_size": 256}, {}),  # eight ranks
    "frozen": ({}, {}),  # the first layer's linears, as `build` has it
    "qkv-bias": ({"add_qkv_bias": True}, {}),
    "tied": ({}, {"share_embeddings_and_output_weights": True}),
    "gpt2": (
        GPT2,
        {
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": True,
        },
    ),
    "mtp": ({"mtp_num_layers": 1}, {}),
    "mtp-repeated": ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, {}),
    "moe": (MOE, {}),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {
        "recompute_granularity": "selective",
        # Upstream recomputes norms ("layernorm") with Transformer Engine alone.
        "recompute_modules": ["core_attn", "mlp", "moe"],
    },
}


def build(
    model: str, layout: ComparedLayout, dtype: torch.dtype, run: Run, recompute: str | None = None
) -> list[DistributedDataParallel]:
    """This rank's model chunks, one for each virtual stage, in Megatron's DistributedDataParallel.

    Their parameters are set (`_fill`), and their linears follow the run's recipe. recompute: a key
    of RECOMPUTE; None: nothing is recomputed.
    """
    MTPLossLoggingHelper.tracker.clear()  # it holds as many depths as the last model had
    transformer = _transformer(model, layout, dtype, recompute)
    own = {"parallel_output": False} | MODELS[model][1]
    stages = [None] if layout.vpp is None else list(range(layout.vpp))
    chunks: list[Any] = [
        small_gpt.build(transformer, VOCABULARY, SEQUENCE, stage, **own) for stage in stages
    ]
    for i, chunk in enumerate(chunks):
        for name, parameter in named_parameters(chunk):
            _fill(name, parameter)
            if model == "frozen" and name.startswith("decoder.layers.0.") and "linear" in name:
                parameter.requires_grad = False
        chunk.model_type = ModelType.encoder_or_decoder
        chunk.compute_language_model_loss = _cross_entropy
        chunks[i] = chunk.to(torch.cuda.current_device(), dtype)
    attach(run, chunks)
    wrapper = DistributedDataParallelConfig()
    return [DistributedDataParallel(transformer, wrapper, chunk) for chunk in chunks]


def _transformer(
    model: str, layout: ComparedLayout, dtype: torch.dtype, recompute: str | None
) -> TransformerConfig:
    sharding = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "sequence_parallel": layout.sp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # As Megatron's arguments have it: batched, the two directions between two stages mix.
        "overlap_p2p_comm": layout.vpp is not None,
        "batch_p2p_comm": layout.vpp is None,
    }
    own = LLAMA | MODELS[model][0] | (RECOMPUTE[recompute] if recompute else {})
    if recompute == "selective" and own.get("add_bias_linear"):
        # Upstream's checkpoint of an MLP returns fc2's bias itself, which so becomes a result of
        # the checkpoint, and backward recomputes without end.
        own["recompute_modules"] = ["core_attn"]
    return small_gpt.config(
        **own | sharding,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )


def _cross_entropy(labels: Tensor, logits: Tensor) -> Tensor:
    """The loss of each token, [batch, sequence], in the dtype of `logits`.

    labels: [batch, sequence]. logits: [sequence, batch, vocabulary]. Upstream's function converts
    logits to float32 first, and so cannot be used in float64.
    """
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.t().flatten(), reduction="none"
    )
    return losses.view(logits.shape[:2]).t()


# --- parameters by their global names ----------------------------------------------------------


def named_parameters(chunk: Any) -> list[tuple[str, Any]]:
    """(global name, parameter) of each parameter of a chunk.

    Layers and experts are numbered over the whole model. Tied weights have one name on all stages.
    """
    offsets = {
        prefix: f"decoder.layers.{layer.layer_number - 1}"
        for prefix, layer in chunk.named_modules()
        if isinstance(layer, TransformerLayer) and prefix.startswith("decoder.")
    }
    found = []
    for name, parameter in chunk.named_parameters():
        prefix = next((p for p in offsets if name.startswith(f"{p}.")), "")
        name = offsets.get(prefix, "") + name.removeprefix(prefix)
        name = re.sub(r"(?<=local_experts\.)\d+", _global_expert, name)
        if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        found.append((name, parameter))
    return found


def _global_expert(local: re.Match[str]) -> str:
    here = MOE["num_moe_experts"] // mpu.get_expert_model_parallel_world_size()
    return str(mpu.get_expert_model_parallel_rank() * here + int(local[0]))


def _fill(name: str, parameter: Any) -> None:
    """Sets a parameter to its shard of a random tensor, seeded by a hash of `name`; norms stay."""
    if "norm" in name:
        return
    axis, ranks, _ = _sharding(parameter)
    shape = list(parameter.shape)
    shape[axis] *= ranks
    generator = torch.Generator().manual_seed(stream_id(name))
    with torch.no_grad():
        parameter.copy_(shard(torch.randn(shape, generator=generator) * 0.05, parameter))


def shard(whole: Tensor, parameter: Any) -> Tensor:
    """This rank's shard of `whole`, as `parameter` is sharded.

    With a partition_stride of 2 it is the rank's part of each half: SwiGLU's gate and up.
    """
    axis, ranks, rank = _sharding(parameter)
    ranges = getattr(parameter, "partition_stride", 1)
    return torch.cat([part.chunk(ranks, axis)[rank] for part in whole.chunk(ranges, axis)], axis)


def _sharding(parameter: Any) -> tuple[int, int, int]:
    """(sharded axis, number of ranks, this rank) of a parameter; (0, 1, 0) if it is not sharded."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return 0, 1, 0
    is_expert = not getattr(parameter, "allreduce", True)
    group: Any = (
        mpu.get_expert_tensor_parallel_group()
        if is_expert
        else mpu.get_tensor_model_parallel_group()
    )
    return parameter.partition_dim, group.size(), group.rank()
