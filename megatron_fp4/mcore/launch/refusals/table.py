"""The table of refusals: what a launch asks for and cannot have, and why.

A refusal is one line for the user that says what is wrong and what to do. Each function of this
package yields the refusals of one topic, in the order in which they are asked; `refuse` raises the
first of them as a ConfigError.

    when                          refusals                     asked by
    the command line is parsed    of_command_line              launch/command_line.py
    the FP4 flags settle          fp4_flags, cuda_graphs,      launch/fp4_arguments.py
                                    weight_states
    then                          checkpoints.background_save  launch/command_line.py
    all arguments are known       of_launch                    launch/command_line.py
      from a checkpoint as well   of_launch                    loop/compat.py
    Megatron has validated them   of_data                      launch/command_line.py
    a layer is built              model                        model/spec.py, norm.py, attention.py
    a microbatch is read          dataset.unknown_token        loop/gpt.py

megatron_demands.py puts what Megatron's own checks raise into words of flags.

Refusals that are not about flags alone stay with what they are about:

- how a value is spelt: launch/command_line.py (what argparse says), launch/fp4_arguments.py
  (KEY=VALUE, GLOB=RECIPE), and megatron_fp4/recipe.py and recipes/ for a recipe's content;
- a built model: model/attach.py (names of linears, noise streams, recipes that nothing follows) and
  model/size_checks.py (sizes on a rank that blocks do not divide);
- a checkpoint: checkpoints/loading.py, compare_numerics.py and compare_state.py;
- a file system that takes no more: checkpoints/saving.py, and loop/gpt.py for the data's index;
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
    tokenizer,
    training,
    values,
)


def refuse(refusals: Iterable[str]) -> None:
    """Raises ConfigError with the first of the refusals, if there is any.

    Nothing is asked after the first: what follows a refusal in its function may rely on it.
    """
    for refusal in refusals:
        raise ConfigError(refusal)


def of_command_line(parser: ArgumentParser, args: Namespace) -> Iterator[str]:
    """Asked of what `parser` parsed, before anything of it is changed."""
    yield from values.of_flags(parser, args)
    yield from fp4_flags.layers_in_bf16(args)
    yield from values.config_file(args)


def of_launch(args: Namespace) -> Iterator[str]:
    """Asked when all arguments are known, before Megatron's own checks."""
    yield from machine.gpu(args)
    yield from model.layers(args)
    yield from training.settings(args)
    yield from optimizer.choice(args)
    yield from tokenizer.choice(args)
    yield from tokenizer.vocabulary(args)
    yield from values.multiples(args)
    yield from dataset.files(args)
    yield from dataset.splits(args)
    yield from checkpoints.saving(args)
    yield from checkpoints.folders(args)
    yield from packages.needed(args)


def of_data(args: Namespace) -> Iterator[str]:
    """Asked when Megatron has opened the tokenizer and padded the vocabulary."""
    yield from machine.launcher(args)
    yield from dataset.tokens(args)
