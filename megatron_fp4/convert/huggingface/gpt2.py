"""GPT-2: LayerNorm, GELU, learned positions, biases; weights of linears are saved as [in, out]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_fp4.convert.huggingface.layouts import (
    Entry,
    Layer,
    PaddedRows,
    Qkv,
    Same,
    Transposed,
)
from megatron_fp4.convert.huggingface.settings import Settings, normal
from megatron_fp4.errors import ConfigError

# Megatron's fused GELU is the approximation by tanh, the unfused one is exact.
_GELU = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
_FIXED = {  # fields that would change what is computed
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


class Gpt2:
    """The family of GPT-2; see `families.Family` for its methods."""

    model_type, has_experts = "gpt2", False

    def settings(self, config: Mapping[str, Any], padded: int) -> Settings:
        for field, value in _FIXED.items():
            if config.get(field, value) != value:
                raise ConfigError(f"{field} {config[field]}: Megatron's layers do not have this")
        activation = config.get("activation_function", "gelu_new")
        if activation not in _GELU:
            raise ConfigError(f"activation_function {activation}: Megatron's GPT has GELU")
        hidden, heads = config["n_embd"], config["n_head"]
        return normal(
            {
                "num_layers": config["n_layer"],
                "hidden_size": hidden,
                "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
                "num_attention_heads": heads,
                "num_query_groups": heads,
                "kv_channels": hidden // heads,
                "max_position_embeddings": config["n_positions"],
                "layernorm_epsilon": config.get("layer_norm_epsilon", 1e-5),
                "init_method_std": config.get("initializer_range", 0.02),
                "bias_gelu_fusion": _GELU[activation],
                "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
                "padded_vocab_size": padded,
            }
        )

    def config(self, settings: Settings, vocab_size: int) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": self.model_type,
            "n_layer": settings["num_layers"],
            "n_embd": settings["hidden_size"],
            "n_head": settings["num_attention_heads"],
            "n_inner": settings["ffn_hidden_size"],
            "n_positions": settings["max_position_embeddings"],
            "layer_norm_epsilon": settings["layernorm_epsilon"],
            "initializer_range": settings["init_method_std"],
            "activation_function": "gelu_new" if settings["bias_gelu_fusion"] else "gelu",
            "tie_word_embeddings": not settings["untie_embeddings_and_output_weights"],
            "vocab_size": vocab_size,
        }

    def entries(self, settings: Settings, vocab_size: int) -> Iterator[Entry]:
        hidden, padded = settings["hidden_size"], settings["padded_vocab_size"]
        table, rows = (padded, hidden), PaddedRows(vocab_size, padded)
        yield Entry("embedding.word_embeddings.weight", table, ("transformer.wte.weight",), rows)
        positions = (settings["max_position_embeddings"], hidden)
        yield Entry("embedding.position_embeddings.weight", positions, ("transformer.wpe.weight",))
        layers = settings["num_layers"]
        for i in range(layers):
            yield from self._layer(Layer(i, layers, True, "transformer.h"), settings)
        for word in ("weight", "bias"):
            names = (f"transformer.ln_f.{word}",)
            yield Entry(f"decoder.final_layernorm.{word}", (hidden,), names)
        if settings["untie_embeddings_and_output_weights"]:
            yield Entry("output_layer.weight", table, ("lm_head.weight",), rows)

    def _layer(self, layer: Layer, settings: Settings) -> Iterator[Entry]:
        hidden, size = settings["hidden_size"], settings["ffn_hidden_size"]
        qkv = Transposed(Qkv(settings["num_attention_heads"], 1, settings["kv_channels"]), 3)
        for norm, name in (("self_attention.linear_qkv", "ln_1"), ("mlp.linear_fc1", "ln_2")):
            for word in ("weight", "bias"):
                yield layer.entry(f"{norm}.layer_norm_{word}", (hidden,), (f"{name}.{word}",))
        for module, shape, name, layout in (
            ("self_attention.linear_qkv", (3 * hidden, hidden), "attn.c_attn", qkv),
            ("self_attention.linear_proj", (hidden, hidden), "attn.c_proj", Transposed(Same())),
            ("mlp.linear_fc1", (size, hidden), "mlp.c_fc", Transposed(Same())),
            ("mlp.linear_fc2", (hidden, size), "mlp.c_proj", Transposed(Same())),
        ):
            yield layer.linear(module, shape, (name,), layout)
            yield layer.entry(f"{module}.bias", shape[:1], (f"{name}.bias",), layout)
