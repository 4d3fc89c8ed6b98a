"""Keep a checkpoint's weights and arguments, and drop the rest.

Drops the state of the optimizer and the learning-rate schedule, random state, and the states that
are kept beside weights (their averages). A launch loads the result with --finetune, to begin at
step 0, or with --no-load-optim, to go on at the step of the checkpoint with a new optimizer.
--keep-average keeps the averages, by which export-hf rounds the weights of such a run; a launch
does not read them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_fp4.convert import keys, rewrite
from megatron_fp4.convert.torch_dist import Checkpoint, find
from megatron_fp4.errors import ConfigError

# The parts of the common state that belong to what is dropped.
_DROPPED = ("optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    parser.add_argument("checkpoint", type=Path, help="its folder, or that of several")
    parser.add_argument("--step", type=int, help="the one of several; default: the newest")
    parser.add_argument(
        "--keep-average", action="store_true", help="keep the averages of weights, for export-hf"
    )
    rewrite.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes the stripped checkpoint. Raises ConfigError if it cannot."""
    source = Checkpoint(find(args.checkpoint, args.step))
    kept = weights(source) + (_averages(source) if args.keep_average else [])
    objects, common_file = model_state(source)
    dropped = [key for key in source.tensors if key not in kept]
    size = sum(source.tensors[key].bytes for key in dropped)
    print(f"drops {len(dropped)} tensors ({rewrite.size_words(size)})")
    if any(keys.kind(key) == "states" for key in source.tensors):
        print("a launch starts the states beside weights anew, at the weights")
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


def _averages(source: Checkpoint) -> list[str]:
    """The keys of the weights' averages. Raises ConfigError if there are none by weight."""
    found = [key for key in source.tensors if keys.is_average(key)]
    if not found:
        raise ConfigError(f"{source.path} has no average of its weights: leave out --keep-average")
    if any(keys.is_sharded_in_memory(key) for key in found):
        raise ConfigError(
            f"{source.path} has its averages as ranks had them, not by weight: save with "
            "--dist-ckpt-optim-fully-reshardable, or leave out --keep-average"
        )
    return found


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
