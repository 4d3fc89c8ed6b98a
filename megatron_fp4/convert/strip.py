"""Keep a checkpoint's weights and arguments, and drop the rest.

Drops the state of the optimizer and the learning-rate schedule, random state, and the states that
are kept beside weights (their averages). A launch loads the result with --finetune, to begin at
step 0, or with --no-load-optim, to go on at the step of the checkpoint with a new optimizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_fp4.convert import keys, rewrite
from megatron_fp4.convert.torch_dist import Checkpoint, find

# The parts of the common state that belong to what is dropped.
_DROPPED = ("optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    parser.add_argument("checkpoint", type=Path, help="its folder, or that of several")
    parser.add_argument("--step", type=int, help="the one of several; default: the newest")
    rewrite.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes the stripped checkpoint. Raises ConfigError if it cannot."""
    source = rewrite.source_of(find(args.checkpoint, args.step), args)
    kept = weights(source)
    objects, common_file = model_state(source)
    dropped = [key for key in source.tensors if key not in kept]
    size = sum(source.tensors[key].bytes for key in dropped)
    print(f"drops {len(dropped)} tensors ({rewrite.size_words(size)})")
    if any(keys.kind(key) == "states" for key in dropped):
        print("among them the states beside weights: a launch starts them at the weights")
    rewrite.write_checkpoint(
        rewrite.Plan(
            "strip",
            [source],
            rewrite.as_saved(source, kept),
            lambda key, region: source.part(key, *region),
            objects,
            common_file,
        ),
        args,
    )


def weights(source: Checkpoint) -> list[str]:
    """The keys of the model's weights."""
    return [key for key in source.tensors if keys.kind(key) == "weights"]


def model_state(source: Checkpoint) -> tuple[dict[str, bytes], bytes | None]:
    """(objects, common file) without those of the optimizer and the run; see `rewrite.carried`.

    The arguments say, as those of a run with --no-save-optim and --no-save-rng, that they are not
    there. Raises ConfigError if the checkpoint has no arguments.
    """
    common: dict[str, Any] = {
        name: value for name, value in source.common().items() if name not in _DROPPED
    }
    common["args"] = source.args()
    common["args"].no_save_optim = common["args"].no_save_rng = True
    of_model = [key for key in source.objects if keys.is_of_model(key)]
    return rewrite.carried(source, of_model, common)
