"""Small models of transformers with random weights, one for each family that is converted."""

from pathlib import Path
from typing import Any

import torch

VOCABULARY, TOKENS = 320, 64

# Weights are large, so that a norm, an activation or a head in the wrong place changes the logits.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES | {"rope_parameters": _LLAMA3}),
    "llama-tied": ("LlamaConfig", _SIZES | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", _SIZES | {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", _SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _SIZES | {"head_dim": 32}),
    "mixtral": ("MixtralConfig", _SIZES | {"num_local_experts": 4}),
    "qwen2-moe": ("Qwen2MoeConfig", _SIZES | _EXPERTS | {"shared_expert_intermediate_size": 96}),
    "qwen3-moe": ("Qwen3MoeConfig", _SIZES | _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-dense-first": (
        "Qwen3MoeConfig",
        _SIZES | _EXPERTS | {"head_dim": 32, "mlp_only_layers": [0]},
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "initializer_range": 0.15,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
}


def save(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **fields: Any
) -> Any:
    """Makes the model `name` of MODELS and saves it in `folder`; returns it.

    dtype: of its weights. shard: the size of a safetensors file. fields: of its configuration.
    Biases and norms are drawn at random too, since transformers begins with zeros and ones.
    """
    import transformers

    kind, sizes = MODELS[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, kind)(**sizes | fields)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def tokens() -> torch.Tensor:
    """int64 [2, TOKENS]: random tokens of the vocabulary."""
    return torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
