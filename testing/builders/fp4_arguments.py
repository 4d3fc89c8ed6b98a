"""The FP4 flags through Megatron's own parser, without a launch."""

import argparse
import functools

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import flags, fp4_arguments
from megatron_fp4.recipe import Recipe


@functools.cache
def parser() -> argparse.ArgumentParser:
    return flags.add_flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def parse(*flags: str) -> argparse.Namespace:
    """What Megatron's parser makes of the flags, settled."""
    args = parser().parse_args(list(flags))
    fp4_arguments.settle(args)
    args.fp4_metrics_interval = fp4_arguments.metrics_interval(args)
    return args


def recipe(*flags: str) -> Recipe:
    found = fp4_arguments.recipe_of(parse("--fp4-recipe", *flags))
    assert found is not None
    return found


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(*flags)
    message = str(raised.value)
    assert "\n" not in message
    return message
