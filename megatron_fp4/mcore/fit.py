"""What differs between the run that saved a checkpoint and the launch that loads it.

Both are Megatron's arguments, which every checkpoint carries. Here they are compared for what the
state must fit: the model, the layout, the optimizer and the schedule of the learning rate.
comparison.py compares the numerics. C stands for megatron/core, T for megatron/training.
"""

import argparse
from collections.abc import Iterable
from typing import Any

from megatron_fp4.errors import ConfigError

# Arguments that the shapes and the number of tensors follow from. Their flags are their names.
_MODEL = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "padded_vocab_size position_embedding_type max_position_embeddings normalization swiglu "
    "add_bias_linear add_qkv_bias qk_layernorm untie_embeddings_and_output_weights num_experts "
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size mtp_num_layers"
).split()
_LAYOUT = (
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage world_size"
).split()
_OPTIMIZER = "optimizer use_distributed_optimizer bf16 fp16 use_precision_aware_optimizer".split()
# Arguments that T/training.py:get_optimizer_param_scheduler makes the schedule of.
_SCHEDULE = (
    "train_iters train_samples global_batch_size lr min_lr decoupled_lr decoupled_min_lr "
    "lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples "
    "lr_warmup_fraction start_weight_decay end_weight_decay weight_decay_incr_style"
).split()
# What C/optimizer takes the rates of a group of parameters from.
_RATES = {"max_lr": ("lr", "decoupled_lr"), "min_lr": ("min_lr", "decoupled_min_lr")}
# Where the flag is not the argument's name.
_FLAGS = {
    "padded_vocab_size": "the vocabulary with its padding (--vocab-size, "
    "--make-vocab-size-divisible-by)",
    "add_bias_linear": "biases (off: --disable-bias-linear)",
    "world_size": "the number of processes",
    "start_weight_decay": "--weight-decay (or --start-weight-decay)",
    "end_weight_decay": "--weight-decay (or --end-weight-decay)",
}


def differences(saved: argparse.Namespace, launch: argparse.Namespace) -> str:
    """What of the model, the layout and the optimizer differs, with the flags; "" if nothing."""
    return _differing([*_MODEL, *_LAYOUT, *_OPTIMIZER], saved, launch)


def other_schedule(saved: argparse.Namespace, launch: argparse.Namespace) -> str:
    """How the schedules of learning rate and weight decay differ, with the flags, and what to do;
    "" if they do not."""
    changed = _differing(_SCHEDULE, saved, launch)
    return changed and (
        f"was trained with another schedule: {changed}; add --override-opt_param-scheduler to go "
        "on with this launch's, or give what was"
    )


def check_optimizer_state(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    """Raises ConfigError where the state of the optimizer is loaded, and is another optimizer's or
    has groups of parameters of other learning rates, which C/optimizer would not find."""
    if launch.no_load_optim or getattr(saved, "no_save_optim", None):
        return
    if changed := _differing(["optimizer"], saved, launch):
        raise ConfigError(
            f"the checkpoint was trained with another optimizer: {changed}; give what was, or "
            "--no-load-optim to begin with a new optimizer state"
        )
    rates = [name for names in _RATES.values() for name in names]
    if _differing(rates, saved, launch) and not launch.override_opt_param_scheduler:
        raise ConfigError(f"the checkpoint {other_schedule(saved, launch)}")


def take_learning_rate(state: Any, saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    """Gives the groups of parameters in a loaded optimizer state the learning rates of `launch`.

    C/optimizer knows a group by its rates among other things, and would not find it under others,
    --override-opt_param-scheduler or not.
    """
    if isinstance(state, list):  # of the format torch, one for each optimizer
        state = dict(enumerate(state))
    if not isinstance(state, dict):
        return
    for group in state.get("param_groups", []):
        for key, flags in _RATES.items():
            of = [name for name in flags if group.get(key) == getattr(saved, name, None)]
            if of and group.get(key) is not None:
                group[key] = getattr(launch, of[0])
    for value in state.values():
        take_learning_rate(value, saved, launch)


def _differing(names: Iterable[str], saved: argparse.Namespace, launch: argparse.Namespace) -> str:
    missing = object()
    found = []
    for name in names:
        was, now = getattr(saved, name, missing), getattr(launch, name, missing)
        # An argument that one of the versions has not got cannot be compared.
        if missing not in (was, now) and (was or 0) != (now or 0):
            flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
            found.append(f"{flag} was {_said(was)} and is {_said(now)}")
    return "; ".join(found)


def _said(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "on" if value else "off" if value is False else "none"
    return str(value)
