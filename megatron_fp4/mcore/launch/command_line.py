"""Parses Megatron's command line and the plugin's flags, with defaults that fit the machine.

Megatron's own defaults require Transformer Engine, apex and NCCL. Defaults that need something this
machine lacks are changed before parsing (machine.py), so that a launch has to describe only the
model. A flag that the user gives and that cannot be used is refused with one line
(refusals/table.py).
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.training.arguments import parse_and_validate_args

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import flags, fp4_arguments, machine
from megatron_fp4.mcore.launch.refusals import checkpoints, fp4_flags
from megatron_fp4.mcore.launch.refusals.megatron_demands import megatrons_demands
from megatron_fp4.mcore.launch.refusals.table import of_command_line, of_data, of_launch, refuse

# Defaults that differ from Megatron's on every machine.
_DEFAULTS: dict[str, Any] = {
    # Without a mask, causal attention runs in its fastest kernel. By default Megatron's dataset
    # makes a [sequence, sequence] mask for each sample.
    "create_attention_mask_in_dataloader": False,
    "eval_interval": 1000,  # Megatron-core 0.19 has no default and divides by it
    **dict.fromkeys(fp4_flags.LAYERS_IN_BF16),  # None: not given
}


def parse() -> argparse.Namespace:
    """Parses and checks sys.argv; returns Megatron's arguments.

    The result is also set as Megatron's global arguments, and Megatron's tokenizer is built. Raises
    ConfigError for arguments that this package refuses, and in place of the assertions by which
    Megatron refuses them.
    """
    with megatrons_demands():
        args = parse_and_validate_args(extra_args_provider=add_arguments)
    refuse(of_data(args))
    return args


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the plugin's flags, defaults and checks to Megatron's parser; returns the parser.

    Passed to Megatron as its `extra_args_provider`. The returned parser's `parse_args` raises
    ConfigError for arguments that are refused.
    """
    parser.set_defaults(**_DEFAULTS, **machine.defaults())
    flags.add_flags(parser)
    parser.error = _error_of(parser)  # type: ignore[method-assign, assignment]
    _mend_help(parser)
    # Megatron validates the arguments and opens the tokenizer right after parsing. Checks that have
    # to come before that run inside parse_args.
    parser.parse_args = _checked(parser)  # type: ignore[method-assign, assignment]
    return parser


def _error_of(parser: argparse.ArgumentParser) -> Callable[[str], NoReturn]:
    """A replacement for `parser.error` that raises ConfigError with argparse's message.

    It adds what the user may have meant: the most similar flags, or that a value is missing.
    """

    def error(message: str) -> NoReturn:
        if re.search("expected (one|at least one) argument", message):
            message += ": give a value (a shell variable may not be set), or leave out the flag"
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        options = parser._option_string_actions
        known = difflib.get_close_matches(unknown, options) if unknown else []
        raise ConfigError(message + (f"; did you mean {' or '.join(known)}?" if known else ""))

    return error


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Makes --help work, and print on one rank.

    The help of some of Megatron's flags contains a bare %, which argparse reads as a placeholder.
    The usage is shortened, because a list of all flags would fill several screens.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\()", "%%", action.help)
    parser.usage = "torchrun --nproc-per-node N pretrain_gpt.py [flags]"
    parser.description = (
        "Pretrains a GPT or LLaMA model; all flags but the first group are Megatron's."
    )
    parser._print_message = _print_once  # type: ignore[method-assign]


def _print_once(message: str, file: object = None) -> None:
    """Prints the text of --help or --version on rank 0.

    Writes to the original stdout, since loop/log.py holds back what is printed during the start.
    """
    if message and sys.__stdout__ and not int(os.environ.get("RANK", "0")):
        sys.__stdout__.write(message)
        sys.__stdout__.flush()


def _checked(parser: argparse.ArgumentParser) -> Callable[..., argparse.Namespace]:
    parse = parser.parse_args

    def parse_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
        parsed = parse(*args, **kwargs)
        refuse(of_command_line(parser, parsed))
        fp4_arguments.settle_layers_in_bf16(parsed)
        if parsed.reset_attention_mask:  # has an effect only if there is a mask
            parsed.create_attention_mask_in_dataloader = True
        # This package's linears add dW to main_grad without apex; upstream's need apex for it.
        parsed.fp4_wgrad_fusion = parsed.gradient_accumulation_fusion
        if not machine.installed("fused_weight_gradient_mlp_cuda"):
            parsed.gradient_accumulation_fusion = False
        # The plugin verifies on all ranks (checkpoints/integrity.py), Megatron on rank 0 only.
        ours = parsed.ckpt_format in ("torch_dist", "torch") and not parsed.enable_msc
        parsed.fp4_verify_integrity = ours and parsed.verify_integrity is not False
        parsed.verify_integrity = bool(parsed.verify_integrity) and not ours
        fp4_arguments.settle(parsed)
        refuse(checkpoints.background_save(parsed))
        if not (parsed.use_checkpoint_args or parsed.yaml_cfg):  # else not all arguments are known
            refuse(of_launch(parsed))
        return parsed

    return parse_args
