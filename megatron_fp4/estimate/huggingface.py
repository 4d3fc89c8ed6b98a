"""A model's sizes from a Hugging Face config.json, and Megatron's flags for them."""

from __future__ import annotations

from pathlib import Path

from megatron_fp4.convert.huggingface import families, model_files, settings
from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.model import Model


def read(path: Path, sequence: int) -> tuple[Model, list[str]]:
    """(the model of a config.json, Megatron's flags for it).

    path: the file, or its folder. sequence: the tokens of a training sequence. Raises ConfigError
    for a file that has another name or cannot be read, for sequences longer than it allows, and for
    architectures that cannot be imported or estimated.
    """
    if path.is_file() and path.name != model_files.CONFIG:
        raise ConfigError(f"--hf-config {path}: rename it to {model_files.CONFIG}")
    config = model_files.read_config(path.parent if path.name == model_files.CONFIG else path)
    found = families.by_name(config["model_type"]).settings(config, config["vocab_size"])
    if not isinstance(found["moe_layer_freq"], int):
        raise ConfigError(f"{path}: dense layers between those with experts are not estimated")
    if sequence > (positions := found["max_position_embeddings"]):
        raise ConfigError(
            f"--seq-length {sequence} is above the {positions} positions of {path}: give at most "
            "that, or change the file"
        )
    model = Model(
        found["num_layers"], found["hidden_size"], found["ffn_hidden_size"],
        found["num_attention_heads"], found["num_query_groups"], found["kv_channels"],
        config["vocab_size"], sequence,
        gated=found["swiglu"],
        rope=found["position_embedding_type"] == "rope",
        tied=not found["untie_embeddings_and_output_weights"],
        norm_vectors=1 if found["normalization"] == "RMSNorm" else 2,
        biases=found["add_bias_linear"],
        qkv_bias=found["add_qkv_bias"],
        qk_norm=found["qk_layernorm"],
        experts=found["num_experts"] or 0,
        top_k=found["moe_router_topk"],
        expert_ffn=found["moe_ffn_hidden_size"] or found["ffn_hidden_size"],
        shared_ffn=found["moe_shared_expert_intermediate_size"] or 0,
        moe_every=found["moe_layer_freq"],
    )  # fmt: skip
    return model, [*settings.flags(found), "--seq-length", str(sequence)]
