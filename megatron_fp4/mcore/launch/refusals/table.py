"""The checks that refuse a launch: which ones there are, and when each of them runs.

A refusal is one line for the user that says what is wrong and what to do. Each public function of
this package checks one topic and yields its refusals. `refuse` raises the first as a ConfigError.

    when                          checks                       called by
    the command line is parsed    of_command_line              launch/command_line.py
    the FP4 values are set        fp4_flags, cuda_graphs,      launch/fp4_arguments.py
                                    weight_states, gradients,
                                    param_gather, optimizer_state
    after that                    checkpoints.background_save  launch/command_line.py
    all arguments are known       of_launch                    launch/command_line.py
      some from a checkpoint      of_launch                    loop/plugin.py
    Megatron has validated them   of_data                      launch/command_line.py
    a layer is built              model                        model/spec.py, norm.py, attention.py
    a microbatch is read          dataset.unknown_token        loop/gpt.py

In a user's own script (megatron_fp4/run.py) the checks of its layers, tasks and data are left out,
and without a recipe all of them but fp4_flags and gradients: such a launch runs as it would without
this package.

megatron_demands.py rewords the errors of Megatron's own checks, so that they name flags.

Checks that need more than the arguments are elsewhere:

- the syntax of a value: launch/command_line.py (argparse's errors), launch/fp4_arguments.py
  (KEY=VALUE, GLOB=RECIPE), megatron_fp4/recipe.py and recipes/ (the content of a recipe);
- a built model: model/attach.py (names of linears, random streams, recipes that no linear follows)
  and model/size_checks.py (sizes on a rank that blocks do not divide);
- a checkpoint: checkpoints/loading.py, compare_numerics.py and compare_state.py;
- a failed write: checkpoints/saving.py, and loop/gpt.py for the index of the data;
- a GPU that is not NVIDIA's: runtime/cpu.py, before Megatron is imported.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch.refusals import (
    checkpoints,
    dataset,
    fp4_flags,
    machine,
    model,
    optimizer,
    packages,
    pretrain_gpt,
    tokenizer,
    training,
    values,
)


def refuse(refusals: Iterable[str]) -> None:
    """Raises ConfigError with the first of `refusals`; returns if there are none.

    A check does not run past its first refusal, so code after a `yield` may assume that the refused
    case does not occur.
    """
    for refusal in refusals:
        raise ConfigError(refusal)


def of_command_line(parser: ArgumentParser, args: Namespace) -> Iterator[str]:
    """The checks of the arguments as `parser` parsed them, before any of them is changed."""
    yield from values.of_flags(parser, args)
    yield from fp4_flags.layers_in_bf16(args)
    yield from values.config_file(args)


def of_launch(args: Namespace, ours: bool) -> Iterator[str]:
    """The checks that run when all arguments are known, before Megatron validates them.

    ours: whether the script is pretrain_gpt.py and not a user's own.
    """
    yield from machine.gpu(args)
    yield from packages.transformer_engine(args)
    yield from model.layers(args)
    yield from training.settings(args)
    if ours:
        yield from pretrain_gpt.layers(args)
        yield from pretrain_gpt.tasks(args)
    yield from optimizer.choice(args)
    if ours or args.tokenizer_type in tokenizer.READ_BY:
        yield from tokenizer.choice(args)
    yield from tokenizer.vocabulary(args)
    yield from values.multiples(args)
    if ours:
        yield from dataset.files(args)
        yield from dataset.splits(args)
    yield from checkpoints.saving(args)
    yield from checkpoints.folders(args)
    yield from packages.needed(args)


def of_data(args: Namespace, ours: bool) -> Iterator[str]:
    """The checks that run when Megatron has opened the tokenizer and padded the vocabulary.

    ours: whether the script is pretrain_gpt.py. A user's own script may give the flags of data to
    datasets of other formats, which are not checked.
    """
    yield from machine.launcher(args)
    if ours or dataset.are_indexed(args):
        yield from dataset.tokens(args)
