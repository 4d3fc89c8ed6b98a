"""Megatron's arguments that describe a model, as a dict by argument name, and as flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

Settings = dict[str, Any]

# Megatron's default for each argument that a family may set, in the form of its parsed arguments.
# What a family does not set has this value. (megatron/training/arguments.py)
DEFAULTS: Settings = {
    "num_layers": None,
    "hidden_size": None,
    "ffn_hidden_size": None,
    "num_attention_heads": None,
    "group_query_attention": False,
    "num_query_groups": None,
    "kv_channels": None,
    "max_position_embeddings": None,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "swiglu": False,
    "bias_gelu_fusion": True,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": False,
    "padded_vocab_size": None,
    "init_method_std": 0.02,
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_router_topk": 2,
    "moe_router_pre_softmax": False,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_aux_loss_coeff": 0.0,
}
# Arguments that no family can express, with the value that they must have.
UNSUPPORTED: Settings = {
    "activation_func_clamp_value": None,
    "layernorm_zero_centered_gamma": False,
    "apply_query_key_layer_scaling": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "glu_linear_offset": 0.0,
    "moe_apply_probs_on_input": False,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "moe_latent_size": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_glu_interleave_size": None,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "quick_geglu": False,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "softmax_type": "vanilla",
    "squared_relu": False,
    "use_mup": False,
    "window_size": None,
}
# Values that no family can express, of arguments with others that change nothing after training.
UNSUPPORTED_VALUES: Settings = {"moe_router_load_balancing_type": "sinkhorn"}
# The flag and the value that it stands for, of arguments whose flag is not --their-name VALUE.
_SWITCHES = {
    "group_query_attention": ("--group-query-attention", True),
    "use_rope_scaling": ("--use-rope-scaling", True),
    "swiglu": ("--swiglu", True),
    "bias_gelu_fusion": ("--no-bias-gelu-fusion", False),
    "add_bias_linear": ("--disable-bias-linear", False),
    "add_qkv_bias": ("--add-qkv-bias", True),
    "qk_layernorm": ("--qk-layernorm", True),
    "untie_embeddings_and_output_weights": ("--untie-embeddings-and-output-weights", True),
    "moe_router_pre_softmax": ("--moe-router-pre-softmax", True),
    "moe_shared_expert_gate": ("--moe-shared-expert-gate", True),
}
_SPELLED = {"layernorm_epsilon": "--norm-epsilon"}
# Arguments that have no effect on a model for which the named argument is off.
_ONLY_WITH = {
    "num_query_groups": "group_query_attention",
    "rope_scaling_factor": "use_rope_scaling",
    "moe_ffn_hidden_size": "num_experts",
    "moe_router_topk": "num_experts",
    "moe_router_pre_softmax": "num_experts",
    "moe_layer_freq": "num_experts",
    "moe_shared_expert_intermediate_size": "num_experts",
    "moe_shared_expert_gate": "num_experts",
    "moe_aux_loss_coeff": "num_experts",
}


def of_args(args: argparse.Namespace) -> Settings:
    """The settings of a run from its parsed arguments."""
    found: Settings = {name: getattr(args, name, default) for name, default in DEFAULTS.items()}
    if found["kv_channels"] is None:
        found["kv_channels"] = found["hidden_size"] // found["num_attention_heads"]
    return normal(found)


def normal(settings: Mapping[str, Any]) -> Settings:
    """All settings, with Megatron's default for those that are missing or have no effect."""
    found: Settings = {**DEFAULTS, **settings}
    for name, switch in _ONLY_WITH.items():
        if not found[switch]:
            found[name] = DEFAULTS[name]
    if not found["group_query_attention"]:  # each head has keys and values of its own
        found["num_query_groups"] = found["num_attention_heads"]
    if found["swiglu"]:
        found["bias_gelu_fusion"] = DEFAULTS["bias_gelu_fusion"]
    if found["add_bias_linear"]:  # linear_qkv has a bias as all linears have
        found["add_qkv_bias"] = DEFAULTS["add_qkv_bias"]
    return found


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Megatron's flags for these settings; those that have their default are left out."""
    words: list[str] = []
    for name, value in settings.items():
        if name in _SWITCHES:
            flag, means = _SWITCHES[name]
            words += [flag] if value == means else []
        elif value is not None and value != DEFAULTS[name] and _has_effect(name, settings):
            flag = _SPELLED.get(name, f"--{name.replace('_', '-')}")
            words += [flag, _text(value)]
    return words


def _has_effect(name: str, settings: Mapping[str, Any]) -> bool:
    return name not in _ONLY_WITH or bool(settings[_ONLY_WITH[name]])


def _text(value: Any) -> str:
    return str(value).replace(" ", "") if isinstance(value, list) else str(value)


def differences(run: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """For each setting that differs, "NAME is A, not B", where A is the run's."""
    return [f"{name} is {run[name]}, not {other[name]}" for name in run if run[name] != other[name]]
