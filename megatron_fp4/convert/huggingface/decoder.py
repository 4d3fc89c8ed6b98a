"""Decoders with RMSNorm, SwiGLU and rotary positions, dense or with experts.

LLaMA, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE and Qwen3-MoE differ in few fields of their
config.json, in the names of their experts, and in which Megatron arguments they can express.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fp4.convert.huggingface.layouts import Entry, Layer, PaddedRows, Qkv, Rows
from megatron_fp4.convert.huggingface.settings import Settings, normal
from megatron_fp4.errors import ConfigError

Config = dict[str, Any]

# The only parameters of RoPE scaling that Megatron has (rotary_pos_embedding.py:_apply_scaling).
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SAME = {  # fields of config.json that are arguments of Megatron's under another name
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "initializer_range": "init_method_std",
    "rms_norm_eps": "layernorm_epsilon",
}


@dataclass(frozen=True)
class Decoder:
    """A family of decoders of `transformers`.

    model_type, architecture: of its config.json.
    qkv_bias, qk_norm: whether Q, K and V have biases, and Q and K norms.
    scales_rope: whether its RoPE may be scaled as LLaMA 3's is.
    experts: the name of a layer's experts and router in tensor names, such as "mlp"; "" if dense.
    gated: the names of an expert's gate, up and down projections.
    shared_expert: whether a layer has a shared expert, with a gate.
    """

    model_type: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    scales_rope: bool = False
    experts: str = ""
    gated: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: bool = False

    @property
    def has_experts(self) -> bool:
        return bool(self.experts)

    # --- config.json to Megatron's arguments --------------------------------------------------

    def settings(self, config: Mapping[str, Any], padded: int) -> Settings:
        """The settings of the model that config.json describes.

        padded: rows of the embedding. Raises ConfigError for what Megatron does not have.
        """
        self._refuse(config)
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        theta, scaling = rope(config)
        found = {argument: config[field] for field, argument in _SAME.items() if field in config}
        found |= {
            "ffn_hidden_size": config["intermediate_size"],
            "group_query_attention": groups != heads,
            "num_query_groups": groups,
            "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "rotary_base": _integer(theta, "rope_theta"),
            "swiglu": True,
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
            "padded_vocab_size": padded,
            **self._scaled(scaling),
        }
        if self.experts:
            found |= self._experts(config)
        return normal(found)

    def _refuse(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError for settings in config.json that Megatron's layers do not have.

        Without it such a model would be imported, and would compute something else.
        """
        window = config.get("sliding_window")
        if "use_sliding_window" in config and not config["use_sliding_window"]:
            window = None
        if window and window < config["max_position_embeddings"]:
            raise ConfigError(
                f"sliding_window {window}: attention here has no window. For sequences of up to "
                f"{window} tokens it makes no difference: set max_position_embeddings to {window} "
                "and sliding_window to null in a copy of config.json, and import that"
            )
        wrong = {
            "hidden_act": config.get("hidden_act", "silu") != "silu",
            "attention_bias": config.get("attention_bias", False),
            "mlp_bias": config.get("mlp_bias", False),
            "qkv_bias": config.get("qkv_bias", self.qkv_bias) != self.qkv_bias,
            "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
            "router_jitter_noise": config.get("router_jitter_noise", 0.0) != 0.0,
        }
        for field in [field for field, is_wrong in wrong.items() if is_wrong]:
            raise ConfigError(
                f"{field} {config[field]}: Megatron's layers do not have this ({self.model_type})"
            )

    def _scaled(self, scaling: Mapping[str, Any]) -> Settings:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return {}
        given = {name: scaling.get(name) for name in _LLAMA3}
        if kind != "llama3" or not self.scales_rope:
            raise ConfigError(f"rope_type {kind}: Megatron scales RoPE only as LLaMA 3.1 does")
        if given != _LLAMA3:
            raise ConfigError(f"rope_scaling {given}: Megatron has the constants {_LLAMA3}")
        return {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}

    def _experts(self, config: Mapping[str, Any]) -> Settings:
        layers = config["num_hidden_layers"]
        every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        pattern = [int((i + 1) % every == 0 and i not in dense) for i in range(layers)]
        found: Settings = {
            "num_experts": config.get("num_local_experts") or config["num_experts"],
            "moe_ffn_hidden_size": config.get("moe_intermediate_size")
            or config["intermediate_size"],
            "moe_router_topk": config["num_experts_per_tok"],
            # Without a softmax before top-k the weights of the chosen experts are normalized.
            "moe_router_pre_softmax": not config.get("norm_topk_prob", self.gated[0] == "w1"),
            "moe_layer_freq": 1 if all(pattern) else pattern,
            "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        }
        if self.shared_expert:
            found["moe_shared_expert_intermediate_size"] = config["shared_expert_intermediate_size"]
            found["moe_shared_expert_gate"] = True
        return found

    # --- Megatron's arguments to config.json ---------------------------------------------------

    def config(self, settings: Settings, vocab_size: int) -> Config:
        """The config.json of a model with these settings, without token ids and dtype."""
        found: Config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{field: settings[argument] for field, argument in _SAME.items()},
            "intermediate_size": settings["ffn_hidden_size"],
            "num_key_value_heads": settings["num_query_groups"],
            "head_dim": settings["kv_channels"],
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_theta": float(settings["rotary_base"]),
            "tie_word_embeddings": not settings["untie_embeddings_and_output_weights"],
            "vocab_size": vocab_size,
        }
        if settings["use_rope_scaling"]:
            factor = settings["rope_scaling_factor"]
            found["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        if self.experts:
            found |= self._experts_config(settings)
        return found

    def _experts_config(self, settings: Settings) -> Config:
        pattern = moe_pattern(settings)
        found: Config = {
            "num_experts_per_tok": settings["moe_router_topk"],
            "router_aux_loss_coef": settings["moe_aux_loss_coeff"],
        }
        if self.gated[0] == "w1":
            return found | {
                "num_local_experts": settings["num_experts"],
                "intermediate_size": settings["moe_ffn_hidden_size"],
            }
        found |= {
            "num_experts": settings["num_experts"],
            "moe_intermediate_size": settings["moe_ffn_hidden_size"],
            "norm_topk_prob": not settings["moe_router_pre_softmax"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, is_moe in enumerate(pattern) if not is_moe],
        }
        if self.shared_expert:
            shared = settings["moe_shared_expert_intermediate_size"]
            found["shared_expert_intermediate_size"] = shared
        return found

    # --- tensors -----------------------------------------------------------------------------

    def entries(self, settings: Settings, vocab_size: int) -> Iterator[Entry]:
        """Every tensor of the model, in the order of its layers."""
        hidden, padded = settings["hidden_size"], settings["padded_vocab_size"]
        table, rows = (padded, hidden), PaddedRows(vocab_size, padded)
        yield Entry("embedding.word_embeddings.weight", table, ("model.embed_tokens.weight",), rows)
        pattern = moe_pattern(settings)
        stacked = all(pattern) or not any(pattern)
        for i, is_moe in enumerate(pattern):
            layer = Layer(i, len(pattern), stacked)
            yield from self._attention(layer, settings)
            yield from self._moe(layer, settings) if is_moe else self._mlp(layer, settings)
        yield Entry("decoder.final_layernorm.weight", (hidden,), ("model.norm.weight",))
        if settings["untie_embeddings_and_output_weights"]:
            yield Entry("output_layer.weight", table, ("lm_head.weight",), rows)

    def _attention(self, layer: Layer, settings: Settings) -> Iterator[Entry]:
        hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
        groups, size = settings["num_query_groups"], settings["kv_channels"]
        qkv, out = Qkv(groups, heads // groups, size), (heads + 2 * groups) * size
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        attention = "self_attention"
        of = f"{attention}.linear_qkv"
        yield layer.entry(f"{of}.layer_norm_weight", (hidden,), ("input_layernorm.weight",))
        yield layer.linear(of, (out, hidden), names, qkv)
        if self.qkv_bias:
            yield layer.entry(f"{of}.bias", (out,), tuple(f"{name}.bias" for name in names), qkv)
        if self.qk_norm:
            for x in ("q", "k"):
                name = f"self_attn.{x}_norm.weight"
                yield layer.entry(f"{attention}.{x}_layernorm.weight", (size,), (name,))
        shape = (hidden, heads * size)
        yield layer.linear(f"{attention}.linear_proj", shape, ("self_attn.o_proj",))

    def _mlp(self, layer: Layer, settings: Settings) -> Iterator[Entry]:
        hidden, size = settings["hidden_size"], settings["ffn_hidden_size"]
        norm = "mlp.linear_fc1.layer_norm_weight"
        yield layer.entry(norm, (hidden,), ("post_attention_layernorm.weight",))
        yield from self._gated_mlp(layer, "mlp", hidden, size, "mlp")

    def _moe(self, layer: Layer, settings: Settings) -> Iterator[Entry]:
        hidden, experts = settings["hidden_size"], settings["num_experts"]
        size, (gate, up, down) = settings["moe_ffn_hidden_size"], self.gated
        norm = "pre_mlp_layernorm.weight"
        yield layer.entry(norm, (hidden,), ("post_attention_layernorm.weight",))
        router = (f"{self.experts}.gate.weight",)
        yield layer.entry("mlp.router.weight", (experts, hidden), router)
        for e in range(experts):
            of = f"{self.experts}.experts.{e}"
            fc1, fc2 = (f"{of}.{gate}", f"{of}.{up}"), (f"{of}.{down}",)
            yield layer.expert("linear_fc1", e, experts, (2 * size, hidden), fc1, Rows())
            yield layer.expert("linear_fc2", e, experts, (hidden, size), fc2)
        if self.shared_expert:
            of, to = "mlp.shared_expert", "mlp.shared_experts"
            yield layer.entry(f"{to}.gate_weight", (1, hidden), (f"{of}_gate.weight",))
            shared = settings["moe_shared_expert_intermediate_size"]
            yield from self._gated_mlp(layer, to, hidden, shared, of)

    def _gated_mlp(
        self, layer: Layer, module: str, hidden: int, size: int, of: str
    ) -> Iterator[Entry]:
        """The linears of a gated MLP. size: between them. of: its name in `transformers`."""
        names = (f"{of}.gate_proj", f"{of}.up_proj")
        yield layer.linear(f"{module}.linear_fc1", (2 * size, hidden), names, Rows())
        yield layer.linear(f"{module}.linear_fc2", (hidden, size), (f"{of}.down_proj",))


def rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """(base, parameters of its scaling) of rotary positions.

    transformers 5 has both in `rope_parameters`, version 4 in `rope_theta` and `rope_scaling`.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return parameters.get("rope_theta", config.get("rope_theta", 10000.0)), parameters


def moe_pattern(settings: Settings) -> list[bool]:
    """Whether each layer has experts."""
    layers, frequency = settings["num_layers"], settings["moe_layer_freq"]
    if settings["num_experts"] is None:
        return [False] * layers
    if isinstance(frequency, int):
        return [i % frequency == 0 for i in range(layers)]
    return [bool(is_moe) for is_moe in frequency]


def _integer(value: float, field: str) -> int:
    if value != int(value):
        raise ConfigError(f"{field} {value}: Megatron takes an integer")
    return int(value)
