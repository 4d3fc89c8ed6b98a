"""Refuses values of flags that are empty, NaN, infinite, out of range or not the multiple needed.

Megatron itself accepts any number. It then fails later, hangs, or trains with that number.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fp4.mcore.arguments.flag_names import flag_of


class _Range(NamedTuple):
    """The numbers from `low` (included if `takes_low`) to `high` (excluded)."""

    low: float
    high: float = math.inf
    takes_low: bool = True

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int | float)
        return self.low <= number < self.high and (self.takes_low or number != self.low)

    def __str__(self) -> str:
        if not self.takes_low:
            return f"a number above {self.low}"
        if self.high == math.inf:
            return f"a number of at least {self.low}"
        return f"a number of at least {self.low} and below {self.high}"


# The range of each argument, by Megatron's name for it (flags have hyphens for the underscores).
_RANGES = {
    _Range(1): """
        adlr_autoresume_interval check_weight_hash_across_dp_replicas_interval context_parallel_size
        dist_ckpt_workers distributed_timeout_minutes eval_global_batch_size eval_interval
        eval_micro_batch_size exit_duration_in_mins exit_interval expert_model_parallel_size
        expert_tensor_parallel_size ffn_hidden_size global_batch_size hidden_size hysteresis
        kv_channels log_interval log_memory_interval loss_scale_window lr_decay_iters
        lr_decay_samples make_vocab_size_divisible_by max_position_embeddings micro_batch_size
        moe_ffn_hidden_size moe_router_topk moe_shared_expert_intermediate_size mtp_num_layers
        non_persistent_save_interval num_attention_heads num_dataset_builder_threads
        num_distributed_optimizer_instances num_experts num_layers
        num_layers_per_virtual_pipeline_stage num_query_groups num_virtual_stages_per_pipeline_rank
        padded_vocab_size pipeline_model_parallel_size recompute_num_layers rotary_base
        save_interval save_retain_interval seq_length tensor_model_parallel_size
        tensorboard_log_interval tensorboard_queue_size train_sync_interval vocab_size
    """,
    _Range(0): """
        ckpt_step clip_grad decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        decoupled_lr decoupled_min_lr empty_unused_memory_level end_weight_decay eval_iters
        fp4_metrics_interval init_method_std lr lr_warmup_init lr_warmup_iters lr_warmup_samples
        lr_wsd_decay_iters lr_wsd_decay_samples manual_gc_interval mid_level_dataset_surplus min_lr
        moe_aux_loss_coeff moe_z_loss_coeff num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
        num_workers seed start_eval_at_iter start_weight_decay timing_log_level train_iters
        train_samples weight_decay
    """,
    _Range(0, 1): """
        adam_beta1 adam_beta2 attention_dropout hidden_dropout lion_beta1 lion_beta2
        lr_warmup_fraction muon_momentum sgd_momentum
    """,
    _Range(0, takes_low=False): """
        adam_eps initial_loss_scale loss_scale min_loss_scale layernorm_epsilon rope_scaling_factor
        rotary_percent
    """,
}
_RANGE_OF = {name: range_ for range_, names in _RANGES.items() for name in names.split()}
_INSTEAD = {
    "eval_interval": "--eval-iters 0 leaves evaluation out",
    "fp4_recipe": "--fp4-recipe off trains without a recipe",
    "log_interval": "the log's line is one in so many steps",
    "save_interval": "leaving out --save saves nothing",
}


def of_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[str]:
    """Refuses empty values, and numbers that are not finite or not in the range of their flag.

    parser: the parser that parsed `args`. A value that is a flag's default is accepted.
    """
    for action in parser._actions:
        for value in _each(getattr(args, action.dest, None)):
            if isinstance(value, str) and not value.strip() and value != action.default:
                yield (
                    f"{_flag(action)} has an empty value, maybe of a shell variable that is not "
                    f"set: give one, or leave out the flag{_hint(action)}"
                )
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield from _number(action, value)


def config_file(args: argparse.Namespace) -> Iterator[str]:
    """Refuses --yaml-cfg with a file that does not exist."""
    if args.yaml_cfg is not None and not Path(args.yaml_cfg).is_file():
        yield f"no file {args.yaml_cfg}: give --yaml-cfg one that exists"


def multiples(args: argparse.Namespace) -> Iterator[str]:
    """Refuses numbers that are not multiples of others, as they have to be.

    Examples are attention heads and tensor-parallel ranks. Also refuses a --moe-router-topk above
    the number of experts.
    """
    heads, ranks = "num_attention_heads", "tensor_model_parallel_size"
    pairs = [(heads, ranks)]
    if not args.num_experts:
        pairs.append(("ffn_hidden_size", ranks))
    if args.group_query_attention:
        pairs.append((heads, "num_query_groups"))
    if args.sequence_parallel:
        pairs.append(("seq_length", ranks))
    if args.num_experts:
        pairs.append(("num_experts", "expert_model_parallel_size"))
        if args.moe_router_topk > args.num_experts:
            yield (
                f"--moe-router-topk {args.moe_router_topk} is above --num-experts "
                f"{args.num_experts}: lower it"
            )
    for name, divisor in pairs:
        number, by = getattr(args, name), getattr(args, divisor)
        if number is not None and number % by:
            yield (
                f"{flag_of(name)} {number} is not a multiple of "
                f"{flag_of(divisor)} {by}: change one of them"
            )


def _number(action: argparse.Action, number: float) -> Iterator[str]:
    if not math.isfinite(number):
        yield f"{_flag(action)} {number}: give a finite number"
    expected = _RANGE_OF.get(action.dest)
    if expected is not None and number not in expected and number != action.default:
        yield f"{_flag(action)} {number}: give {expected}{_hint(action)}"


def _hint(action: argparse.Action) -> str:
    instead = _INSTEAD.get(action.dest)
    return f" ({instead})" if instead else ""


def _each(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _flag(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else action.dest
