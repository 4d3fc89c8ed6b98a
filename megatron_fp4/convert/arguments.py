"""Megatron's arguments in checkpoints: which of them say what about a run."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_fp4.errors import ConfigError

# Arguments that determine the tensors of a checkpoint and their shapes.
SHAPES = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "padded_vocab_size position_embedding_type max_position_embeddings normalization swiglu "
    "add_bias_linear add_qkv_bias qk_layernorm untie_embeddings_and_output_weights num_experts "
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size mtp_num_layers"
).split()
# Others that determine what the model computes from its weights.
_FUNCTION = (
    "group_query_attention multi_latent_attention rotary_base rotary_percent rotary_interleaved "
    "rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor squared_relu "
    "openai_gelu quick_geglu layernorm_epsilon layernorm_zero_centered_gamma moe_layer_freq "
    "moe_router_topk moe_router_score_function moe_router_pre_softmax moe_shared_expert_gate "
    "moe_router_topk_scaling_factor apply_residual_connection_post_layernorm softmax_type "
    "window_size seq_length activation_func_clamp_value glu_linear_offset use_mup "
    "mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
    "mup_attn_scale_power moe_router_num_groups moe_router_group_topk moe_apply_probs_on_input "
    "attention_output_gate experimental_attention_variant moe_latent_size no_rope_freq qk_l2_norm "
    "moe_router_enable_expert_bias moe_shared_expert_glu_interleave_size"
).split()
LAYOUT = (
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage context_parallel_size "
    "data_parallel_size sequence_parallel use_distributed_optimizer world_size"
).split()
_FP4 = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
# Those of a process, its files and its log, those that a flag of the above settles, and from where
# a launch went on: the common state has the step and the operations at the save.
_OF_A_PROCESS = (
    "rank local_rank save load pretrained_checkpoint ckpt_step iteration "
    "num_floating_point_operations_so_far"
).split()
_ENDINGS = ("_dir", "_path", "_interval", "_port")

GROUPS = ("model", "FP4", "training", "layout")


def group(name: str) -> str | None:
    """One of GROUPS, which an argument belongs to; None for what is of a process and its files."""
    if name in SHAPES or name in _FUNCTION:
        return "model"
    if name.startswith("fp4_") or name in _FP4:
        return "FP4"
    if name in LAYOUT:
        return "layout"
    if name in _OF_A_PROCESS or name.endswith(_ENDINGS):
        return None
    return "training"


def whole_number(args: argparse.Namespace, name: str) -> int:
    """The value of an argument that is a whole number, 1 or more. Raises ConfigError if it is
    not."""
    value = getattr(args, name, None)
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"the checkpoint's {name} is {str(value)[:20]!r}: its arguments are damaged"
        )
    return value


def differences(
    one: argparse.Namespace, other: argparse.Namespace
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """For each of GROUPS the arguments that differ, by name, with both values.

    An argument that one of them does not have counts as None.
    """
    found: dict[str, dict[str, tuple[Any, Any]]] = {name: {} for name in GROUPS}
    for name in sorted(vars(one).keys() | vars(other).keys()):
        was, now = getattr(one, name, None), getattr(other, name, None)
        if (where := group(name)) is not None and repr(was) != repr(now):
            found[where][name] = was, now
    return found
