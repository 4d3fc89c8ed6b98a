"""Rewrite a checkpoint's files for another parallel layout.

A launch loads a torch_dist checkpoint in any layout; no launch needs this command. It makes loading
faster: each rank of the new layout finds its part of all weights and of the optimizer state in one
file (what ranks share is in the file of the first), and a checkpoint that a thousand ranks saved
becomes a few files. All values, the arguments and the random state stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_fp4.convert import keys, rewrite
from megatron_fp4.convert.shards import layout_of, shards
from megatron_fp4.convert.torch_dist import Checkpoint, find
from megatron_fp4.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    parser.add_argument("checkpoint", type=Path, help="its folder, or that of several")
    parser.add_argument("--step", type=int, help="the one of several; default: the newest")
    for name, default in {"tensor": None, "pipeline": None, "expert": 1}.items():
        parser.add_argument(
            f"--{name}-model-parallel-size",
            type=int,
            default=default,
            required=default is None,
            metavar="N",
            help="of the launches that will load it",
        )
    rewrite.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes the checkpoint anew. Raises ConfigError if it cannot."""
    source = Checkpoint(find(args.checkpoint, args.step))
    _check(source)
    layout = layout_of(
        source.args(),
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
    )
    parts = [
        rewrite.TensorPart(key, region, rank)
        for key, info in source.tensors.items()
        for rank, region in shards(key, info, layout)
    ]
    # The parts of one tensor follow each other by layer, so that each saved chunk is read once.
    parts.sort(key=lambda part: (part.key, part.region))
    objects, common_file = rewrite.carried(source, source.objects)
    rewrite.write_checkpoint(
        rewrite.Plan(
            "reshard",
            [source],
            parts,
            lambda key, region: source.part(key, *region),
            objects,
            common_file,
        ),
        args,
    )


def _check(source: Checkpoint) -> None:
    if any(map(keys.is_sharded_in_memory, (*source.tensors, *source.objects))):
        raise ConfigError(
            f"the optimizer state in {source.path} is saved as its ranks had it, for their layout "
            "alone: save with --dist-ckpt-optim-fully-reshardable, or drop it by strip"
        )
    if source.is_flattened:
        raise ConfigError(
            f"{source.path} has flattened tensors of an older Megatron-core: load and save it with "
            "a newer one, or drop the optimizer state by strip"
        )
