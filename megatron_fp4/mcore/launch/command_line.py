"""Megatron's command line, with defaults that run on the machine at hand.

Megatron's own defaults ask for Transformer Engine, apex and NCCL. What the machine has not got is
turned off here before parsing, so that a launch names the model and nothing else; what a user
asks for in so many words and cannot have is an error of one line.
"""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core.datasets.object_storage_utils import is_object_storage_path
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import get_checkpoint_tracker_filename

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.data import dataset_files, splits, vocabulary
from megatron_fp4.mcore.launch import flags, fp4_arguments
from megatron_fp4.mcore.launch.flags import flag_of
from megatron_fp4.mcore.launch.refusals import (
    megatron_demands,
    optimizer,
    packages,
    tokenizer,
    values,
)

# What Megatron asserts to be there, and has no default for; some go by an older name too.
_REQUIRED = {
    "num_layers": "encoder_num_layers",
    "hidden_size": None,
    "num_attention_heads": None,
    "seq_length": "encoder_seq_length",
    "max_position_embeddings": None,
    "micro_batch_size": None,
}


def parse() -> argparse.Namespace:
    """Parses sys.argv and makes the result Megatron's global arguments, tokenizer and all.

    Raises ConfigError in place of Megatron's failed assertions, with their text.
    """
    with megatron_demands.megatrons_demands():
        args = parse_and_validate_args(extra_args_provider=add_arguments)
    if "MASTER_ADDR" not in os.environ:  # torch.distributed meets the other processes there
        raise ConfigError("no launcher: start this script by torchrun --nproc-per-node N")
    dataset_files.check_tokens(args)
    return args


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's `extra_args_provider`: sets the machine's defaults and checks what is parsed."""
    parser.set_defaults(**_machine_defaults())
    flags.add_flags(parser)
    parser.error = _error(parser)  # type: ignore[method-assign, assignment]
    _mend_help(parser)
    # Megatron validates, and opens the tokenizer, before anyone sees what was parsed.
    parser.parse_args = _checked(parser)  # type: ignore[method-assign, assignment]
    return parser


def validate(args: argparse.Namespace) -> None:
    """Raises ConfigError for what was asked for and cannot be had, before Megatron's own checks."""
    if not torch.cuda.is_available() and args.distributed_backend != "gloo":
        raise ConfigError(
            f"--distributed-backend {args.distributed_backend} needs a GPU and this machine shows "
            "none; leave it out (gloo is the default here) or use --distributed-backend gloo"
        )
    if args.cuda_graph_impl != "none" and not torch.cuda.is_available():
        raise ConfigError(
            f"--cuda-graph-impl {args.cuda_graph_impl} needs a GPU and this machine shows none: "
            "leave it out"
        )
    if args.profile and args.use_pytorch_profiler and not args.tensorboard_dir:
        raise ConfigError(
            "--use-pytorch-profiler writes its traces beside TensorBoard's logs: add "
            "--tensorboard-dir DIR"
        )
    if args.profile and not (args.use_pytorch_profiler or torch.cuda.is_available()):
        raise ConfigError(
            "--profile needs a GPU and this machine shows none: leave it out, or add "
            "--use-pytorch-profiler and --tensorboard-dir DIR"
        )
    if args.transformer_impl != "local" and not HAVE_TE:
        raise ConfigError(
            f"--transformer-impl {args.transformer_impl} needs Transformer Engine and a GPU; "
            "install transformer-engine[pytorch], or leave it out (local is the default here)"
        )
    if args.attention_backend == AttnBackend.local:
        raise ConfigError(
            "--attention-backend local is not supported; leave it out: without Transformer Engine "
            "attention runs in torch's scaled_dot_product_attention"
        )
    if args.rampup_batch_size is not None:  # T/global_vars.py builds its calculator without it
        raise ConfigError(
            "Megatron-core 0.19 drops --rampup-batch-size: use --step-batch-size-schedule"
        )
    if args.use_precision_aware_optimizer and not HAVE_TE:
        raise ConfigError("--use-precision-aware-optimizer needs Transformer Engine: leave it out")
    alltoall = args.num_experts and args.moe_token_dispatcher_type == "alltoall"
    if alltoall and args.expert_model_parallel_size > 1 and args.distributed_backend == "gloo":
        raise ConfigError("gloo has no all-to-all: use --moe-token-dispatcher-type allgather")
    spread = args.tensor_model_parallel_size > 1 and not args.sequence_parallel
    if args.num_experts and spread and not args.skip_train:  # said in the first step, by each rank
        raise ConfigError("experts under tensor parallelism need --sequence-parallel: add it")
    if "layernorm" in (args.recompute_modules or []) and not HAVE_TE:
        raise ConfigError(
            "--recompute-modules layernorm needs Transformer Engine: recompute other modules"
        )
    mlp = args.recompute_granularity == "selective" and "mlp" in (args.recompute_modules or [])
    if mlp and args.add_bias_linear:
        # The bias that it returns through its checkpoint leads back into it.
        raise ConfigError(
            "Megatron-core 0.19 recomputes an MLP with biases without end: recompute other modules "
            "than mlp, or add --disable-bias-linear"
        )
    if not (args.train_iters or args.train_samples or args.skip_train):
        raise ConfigError("how long to train? give --train-iters or --train-samples")
    if args.lr is None and not args.skip_train:
        raise ConfigError("no learning rate: give --lr")
    for name, older in _REQUIRED.items():
        if getattr(args, name) is None and getattr(args, older or name) is None:
            raise ConfigError(f"give {flag_of(name)} N: it has no default")
    if args.fp16 and args.bf16:
        raise ConfigError("--fp16 and --bf16 contradict each other: choose one")
    for option in ("sft", "fim_data", "dataloader_inter_document_masking"):
        if getattr(args, option):
            raise ConfigError(f"{flag_of(option)} is not supported: pretraining only")
    if args.inprocess_restart:
        raise ConfigError("--inprocess-restart is not supported: leave it out")
    optimizer.check(args)
    tokenizer.check(args)
    vocabulary.check(args)
    values.check_together(args)
    dataset_files.check_files(args)
    splits.check(args)
    _check_save(args)
    _check_folders(args)
    packages.check(args)


def _machine_defaults() -> dict[str, Any]:
    defaults: dict[str, Any] = {
        # Without a mask, causal attention runs in its fastest kernel. Megatron's dataset makes a
        # [sequence, sequence] mask for each sample unless told not to.
        "create_attention_mask_in_dataloader": False,
        "eval_interval": 1000,  # Megatron-core 0.19 has no default and divides by it
        **dict.fromkeys(fp4_arguments.LAYERS_IN_BF16),  # None: not given
    }
    if not HAVE_TE:
        defaults |= {"transformer_impl": "local", "apply_rope_fusion": False}
    if not packages.installed("apex"):
        defaults |= {"no_persist_layer_norm": True, "masked_softmax_fusion": False}
    if not packages.installed("one_logger"):  # NVIDIA's own: on by default, a warning if missing
        defaults["enable_one_logger"] = False
    if not torch.cuda.is_available():
        defaults |= {
            "distributed_backend": "gloo",
            "use_cpu_initialization": True,
            "bias_gelu_fusion": False,
            "bias_swiglu_fusion": False,
            "bias_dropout_fusion": False,
            "num_workers": 0,  # a forked loader would have to start torch once more
        }
    return defaults


def _error(parser: argparse.ArgumentParser) -> Callable[[str], NoReturn]:
    def error(message: str) -> NoReturn:
        raise megatron_demands.refusal(message, parser)

    return error


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Lets --help work, on one rank: some of Megatron's flags have a bare % in their help, which
    argparse takes for a placeholder, and the usage of all flags would fill screens."""
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\()", "%%", action.help)
    parser.usage = "torchrun --nproc-per-node N pretrain_gpt.py [flags]"
    parser.description = (
        "Pretrains a GPT or LLaMA model; all flags but the first group are Megatron's."
    )
    parser._print_message = _print_once  # type: ignore[method-assign]


def _print_once(message: str, file: object = None) -> None:
    """Help and version, from one rank and past what holds back the start (loop/log.py)."""
    if message and sys.__stdout__ and not int(os.environ.get("RANK", "0")):
        sys.__stdout__.write(message)
        sys.__stdout__.flush()


def _checked(parser: argparse.ArgumentParser) -> Callable[..., argparse.Namespace]:
    parse = parser.parse_args

    def parse_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
        parsed = parse(*args, **kwargs)
        values.check(parser, parsed)
        fp4_arguments.settle_layers_in_bf16(parsed)
        if parsed.yaml_cfg is not None and not Path(parsed.yaml_cfg).is_file():
            raise ConfigError(f"no file {parsed.yaml_cfg}: give --yaml-cfg one that exists")
        if parsed.reset_attention_mask:  # it exists in the mask alone
            parsed.create_attention_mask_in_dataloader = True
        # The package's linears add dW to main_grad themselves; upstream's need apex for it.
        parsed.fp4_wgrad_fusion = parsed.gradient_accumulation_fusion
        if not packages.installed("fused_weight_gradient_mlp_cuda"):
            parsed.gradient_accumulation_fusion = False
        # The plugin verifies on all ranks (checkpoints/integrity.py), Megatron on rank 0 alone.
        ours = parsed.ckpt_format in ("torch_dist", "torch") and not parsed.enable_msc
        parsed.fp4_verify_integrity = ours and parsed.verify_integrity is not False
        parsed.verify_integrity = bool(parsed.verify_integrity) and not ours
        fp4_arguments.settle(parsed)
        _check_background_save(parsed)
        if not (parsed.use_checkpoint_args or parsed.yaml_cfg):  # those bring arguments later
            validate(parsed)
        return parsed

    return parse_args


def _check_save(args: argparse.Namespace) -> None:
    if args.save is None:
        return
    if args.non_persistent_save_interval and args.non_persistent_ckpt_type is None:
        raise ConfigError("--non-persistent-save-interval needs --non-persistent-ckpt-type global")
    if args.non_persistent_save_interval and args.ckpt_format == "torch":
        raise ConfigError(
            "--non-persistent-save-interval does not save in --ckpt-format torch: leave out one"
        )
    if args.save_interval is None:
        raise ConfigError("--save needs --save-interval N: the steps from checkpoint to checkpoint")
    tracker = Path(get_checkpoint_tracker_filename(args.save))
    if args.load is None and not is_object_storage_path(args.save) and tracker.is_file():
        raise ConfigError(
            f"--save {args.save} has checkpoints of another run, which this one would write over: "
            f"add --load {args.save} to go on from them, or give another folder"
        )


def _check_folders(args: argparse.Namespace) -> None:
    for name in ("save", "tensorboard_dir", "wandb_save_dir", "data_cache_path"):
        folder = getattr(args, name)
        if folder is None or is_object_storage_path(folder):
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(
                f"{flag_of(name)} {folder} cannot be written ({error.strerror}): give another "
                "folder"
            ) from error


def _check_background_save(args: argparse.Namespace) -> None:
    """Refuses --async-save where its worker would die and the ranks wait for it, or Megatron stop
    with a traceback once it has saved."""
    if not args.async_save:
        return
    if args.ckpt_format == "torch":
        raise ConfigError("--async-save does not save in --ckpt-format torch: leave out one")
    if not args.use_persistent_ckpt_worker:
        return  # Megatron says that it leaves out the flag, and saves in the foreground
    if not torch.cuda.is_available():
        raise ConfigError(
            "--async-save needs a GPU, which its worker asks for, and this machine shows none: "
            "leave it out"
        )
    if args.async_strategy == "nvrx" and not packages.installed("nvidia_resiliency_ext"):
        raise ConfigError(
            "--async-save needs nvidia-resiliency-ext: pip install nvidia-resiliency-ext, or add "
            "--async-strategy mcore"
        )
