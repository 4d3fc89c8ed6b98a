"""Megatron's command line, with defaults that run on the machine at hand.

Megatron's own defaults ask for Transformer Engine, apex and NCCL. What the machine has not got is
turned off here before parsing (machine.py), so that a launch names the model and nothing else; what
a user asks for in so many words and cannot have is an error of one line (refusals/table.py).
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

# Other defaults than Megatron's, on any machine.
_DEFAULTS: dict[str, Any] = {
    # Without a mask, causal attention runs in its fastest kernel. Megatron's dataset makes a
    # [sequence, sequence] mask for each sample unless told not to.
    "create_attention_mask_in_dataloader": False,
    "eval_interval": 1000,  # Megatron-core 0.19 has no default and divides by it
    **dict.fromkeys(fp4_flags.LAYERS_IN_BF16),  # None: not given
}


def parse() -> argparse.Namespace:
    """Parses sys.argv and makes the result Megatron's global arguments, tokenizer and all.

    Raises ConfigError in place of Megatron's failed assertions, with their text.
    """
    with megatrons_demands():
        args = parse_and_validate_args(extra_args_provider=add_arguments)
    refuse(of_data(args))
    return args


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's `extra_args_provider`: sets the machine's defaults and checks what is parsed."""
    parser.set_defaults(**_DEFAULTS, **machine.defaults())
    flags.add_flags(parser)
    parser.error = _error_of(parser)  # type: ignore[method-assign, assignment]
    _mend_help(parser)
    # Megatron validates, and opens the tokenizer, before anyone sees what was parsed.
    parser.parse_args = _checked(parser)  # type: ignore[method-assign, assignment]
    return parser


def _error_of(parser: argparse.ArgumentParser) -> Callable[[str], NoReturn]:
    """Raises what argparse says of a command line, and what may be meant or missing there."""

    def error(message: str) -> NoReturn:
        if re.search("expected (one|at least one) argument", message):
            message += ": give a value (a shell variable may not be set), or leave out the flag"
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        options = parser._option_string_actions
        known = difflib.get_close_matches(unknown, options) if unknown else []
        raise ConfigError(message + (f"; did you mean {' or '.join(known)}?" if known else ""))

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
        refuse(of_command_line(parser, parsed))
        fp4_arguments.settle_layers_in_bf16(parsed)
        if parsed.reset_attention_mask:  # it exists in the mask alone
            parsed.create_attention_mask_in_dataloader = True
        # The package's linears add dW to main_grad themselves; upstream's need apex for it.
        parsed.fp4_wgrad_fusion = parsed.gradient_accumulation_fusion
        if not machine.installed("fused_weight_gradient_mlp_cuda"):
            parsed.gradient_accumulation_fusion = False
        # The plugin verifies on all ranks (checkpoints/integrity.py), Megatron on rank 0 alone.
        ours = parsed.ckpt_format in ("torch_dist", "torch") and not parsed.enable_msc
        parsed.fp4_verify_integrity = ours and parsed.verify_integrity is not False
        parsed.verify_integrity = bool(parsed.verify_integrity) and not ours
        fp4_arguments.settle(parsed)
        refuse(checkpoints.background_save(parsed))
        if not (parsed.use_checkpoint_args or parsed.yaml_cfg):  # those bring arguments later
            refuse(of_launch(parsed))
        return parsed

    return parse_args
