"""Parses Megatron's command line and the plugin's flags, with defaults that fit the machine.

Megatron's own defaults require Transformer Engine, apex and NCCL. Defaults that need something this
machine lacks are changed before parsing (arguments/machine.py), so that a launch has to describe
only the model. A flag that the user gives and that cannot be used is refused with one line
(refusals/table.py).
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megatron.training.arguments import parse_and_validate_args

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments import machine
from megatron_fp4.mcore.arguments.flag_names import flag_of
from megatron_fp4.mcore.launch import flags, fp4_arguments, fused_kernels
from megatron_fp4.mcore.launch.refusals import checkpoints, fp4_flags
from megatron_fp4.mcore.launch.refusals.megatron_demands import megatrons_demands
from megatron_fp4.mcore.launch.refusals.table import of_command_line, of_data, of_launch, refuse

# Defaults that differ from Megatron's on every machine.
_DEFAULTS: dict[str, Any] = {
    "eval_interval": 1000,  # Megatron-core 0.19 has no default and divides by it
    **dict.fromkeys(fp4_flags.LAYERS_IN_BF16),  # None: not given
}


@dataclass(frozen=True)
class Script:
    """The training script whose command line is parsed, as Megatron's parser has to know it.

    ours: whether it is pretrain_gpt.py, this package's own, and not a user's. A user's script
        brings its layers, data and tasks, so checks of these do not apply to it. Without a recipe
        nothing is checked in it but the flags about recipes.
    add_flags: adds the script's own flags to the parser that it gets, and returns the parser.
    defaults: values, by name, that Megatron sets after parsing where an argument is None.
    ignores_unknown: whether unknown flags are not an error.
    """

    ours: bool
    add_flags: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignores_unknown: bool = False

    def is_checked(self, args: argparse.Namespace) -> bool:
        """Whether the launch is checked: it has a recipe, or the script is pretrain_gpt.py."""
        return self.ours or fp4_arguments.has_recipe(args)

    def settled(self, args: argparse.Namespace) -> argparse.Namespace:
        """A copy of `args` in which `defaults` are set, as Megatron will set them."""
        known = {name: value for name, value in vars(args).items() if value is not None}
        return argparse.Namespace(**vars(args) | dict(self.defaults) | known)


PRETRAIN_GPT = Script(ours=True)


def parse(script: Script = PRETRAIN_GPT) -> argparse.Namespace:
    """Parses and checks sys.argv; returns Megatron's arguments.

    The result is also set as Megatron's global arguments, and Megatron's tokenizer is built. Raises
    ConfigError for arguments that this package refuses, and in place of the assertions by which
    Megatron refuses them.
    """
    with megatrons_demands():
        args = parse_and_validate_args(
            extra_args_provider=lambda parser: add_arguments(parser, script),
            ignore_unknown_args=script.ignores_unknown,
            args_defaults=dict(script.defaults),
        )
    if script.is_checked(args):
        refuse(of_data(args, script.ours))
    return args


def settle_unsettled(args: argparse.Namespace, script: Script) -> bool:
    """Settles arguments of Megatron's that `parse` has not parsed, as without a recipe.

    Returns whether it did: arguments of `parse` stay as they are. Raises ConfigError if a flag of
    this package was given, since its checks and the defaults that it needs are those of `parse`.
    """
    if hasattr(args, "fp4_recipe_content"):
        return False
    own = flags.defaults()
    if args.fp4 is not None:  # --fp4-format, with which these flags are Megatron's
        del own["fp4_recipe"], own["fp4_param_gather"]
    elif not hasattr(args, "fp4_seed") or args.fp4_recipe in fp4_arguments.OFF:
        args.fp4_recipe = None  # Megatron's own flag has a default, which does nothing
    del own["verify_integrity"]  # Megatron's
    given = [flag_of(name) for name, value in own.items() if getattr(args, name, value) != value]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} would do nothing: the script parses its arguments by itself; "
            "call megatron.training.arguments' parse_and_validate_args in it"
        )
    vars(args).update(own | vars(args))
    _settle(args, script)
    return True


def add_arguments(
    parser: argparse.ArgumentParser, script: Script = PRETRAIN_GPT
) -> argparse.ArgumentParser:
    """Adds the flags of the script and the plugin, defaults and checks to Megatron's parser.

    Returns the parser, whose `parse_args` raises ConfigError for arguments that are refused.
    Megatron calls this as its `extra_args_provider`.
    """
    parser.set_defaults(**_DEFAULTS, **machine.defaults())
    if script.ours:
        # Without a mask, causal attention runs in its fastest kernel. By default Megatron's dataset
        # makes a [sequence, sequence] mask for each sample.
        parser.set_defaults(create_attention_mask_in_dataloader=False)
    if script.add_flags is not None:
        parser = script.add_flags(parser)
    flags.add_flags(parser)
    parser.error = _error_of(parser)  # type: ignore[method-assign, assignment]
    _mend_help(parser, script)
    # Megatron validates the arguments and opens the tokenizer right after parsing. Checks that have
    # to come before that run inside parse_args.
    if script.ignores_unknown:
        known = parser.parse_known_args

        def parse_known_args(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
            parsed, unknown = known(*args, **kwargs)
            return _checked(parser, parsed, script), unknown

        parser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]
    else:
        every = parser.parse_args

        def parse_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
            return _checked(parser, every(*args, **kwargs), script)

        parser.parse_args = parse_args  # type: ignore[method-assign, assignment]
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


def _mend_help(parser: argparse.ArgumentParser, script: Script) -> None:
    """Makes --help work, and print on one rank.

    The help of some of Megatron's flags contains a bare %, which argparse reads as a placeholder.
    The usage is shortened, because a list of all flags would fill several screens.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\()", "%%", action.help)
    if script.ours:
        parser.usage = "torchrun --nproc-per-node N pretrain_gpt.py [flags]"
        parser.description = (
            "Pretrains a GPT or LLaMA model; all flags but the first group are Megatron's."
        )
    else:
        name = Path(sys.argv[0]).name
        parser.usage = f"torchrun --nproc-per-node N -m megatron_fp4.run {name} [flags]"
        parser.description = (
            f"Runs {name} with this package's linears; all flags but the first group are those of "
            "the script and Megatron's."
        )
    parser._print_message = _print_once  # type: ignore[method-assign]


def _print_once(message: str, file: object = None) -> None:
    """Prints the text of --help or --version on rank 0.

    Writes to the original stdout, since loop/log.py holds back what is printed during the start.
    """
    if message and sys.__stdout__ and not int(os.environ.get("RANK", "0")):
        sys.__stdout__.write(message)
        sys.__stdout__.flush()


def _checked(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace, script: Script
) -> argparse.Namespace:
    """`parsed` with the values that are in force; raises ConfigError if they are refused."""
    is_checked = script.is_checked(parsed)
    if is_checked:
        refuse(of_command_line(parser, parsed))
    _settle(parsed, script)
    if is_checked:
        refuse(checkpoints.background_save(parsed))
        if not (parsed.use_checkpoint_args or parsed.yaml_cfg):  # else not all arguments are known
            refuse(of_launch(script.settled(parsed), script.ours))
    return parsed


def _settle(parsed: argparse.Namespace, script: Script) -> None:
    """Sets the values that are in force; raises ConfigError for those that contradict another."""
    is_checked = script.is_checked(parsed)
    fp4_arguments.settle_layers_in_bf16(parsed)
    if script.ours and parsed.reset_attention_mask:  # has an effect only if there is a mask
        parsed.create_attention_mask_in_dataloader = True
    _settle_fusion(parsed, is_checked)
    # The plugin verifies on all ranks (checkpoints/integrity.py), Megatron on rank 0 only.
    ours = is_checked and parsed.ckpt_format in ("torch_dist", "torch") and not parsed.enable_msc
    parsed.fp4_verify_integrity = ours and parsed.verify_integrity is not False
    parsed.verify_integrity = bool(parsed.verify_integrity) and not ours
    fp4_arguments.settle(parsed)
    refuse(fused_kernels.refusals(parsed))
    fused_kernels.settle(parsed, is_checked)
    parsed.fp4_metrics_interval = fp4_arguments.metrics_interval(script.settled(parsed))


def _settle_fusion(parsed: argparse.Namespace, is_checked: bool) -> None:
    """Sets who adds dW to main_grad.

    This package's linears do without apex; Megatron's need apex for it, and Transformer Engine's
    are left as they are in a launch that is not checked.
    """
    parsed.fp4_wgrad_fusion = parsed.gradient_accumulation_fusion
    stock = parsed.transformer_impl == "local"
    if (is_checked or stock) and not machine.installed("fused_weight_gradient_mlp_cuda"):
        parsed.gradient_accumulation_fusion = False
