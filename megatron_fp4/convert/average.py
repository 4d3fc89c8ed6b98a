"""Average the weights of several checkpoints of one model.

The result has the arguments and the step of the last one and, like that of strip, no optimizer
state. Sums are in float64 and are rounded once, to the dtype of the weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp4.convert import arguments, rewrite, strip
from megatron_fp4.convert.blocks import blocks
from megatron_fp4.convert.metadata import Region
from megatron_fp4.convert.torch_dist import Checkpoint, find
from megatron_fp4.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    parser.add_argument(
        "checkpoints", type=Path, nargs="+", help="two or more; or the folder of one run"
    )
    parser.add_argument("--steps", type=int, nargs="+", help="of one run's folder")
    parser.add_argument(
        "--weights", type=float, nargs="+", help="of each checkpoint; default: all the same"
    )
    rewrite.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Writes the averaged checkpoint. Raises ConfigError if it cannot."""
    paths = _paths(args.checkpoints, args.steps)
    shares = _shares(args.weights, len(paths))
    sources = [Checkpoint(path) for path in paths]
    last = sources[-1]
    for other in sources[:-1]:
        _check_same_model(other, last)
    objects, common_file = strip.model_state(last)

    def values(key: str, region: Region) -> Tensor:
        return average((share, source.part(key, *region)) for share, source in mixed)

    mixed = list(zip(shares, sources, strict=True))
    parts = rewrite.as_saved(last, strip.weights(last))
    rewrite.write_checkpoint(
        rewrite.Plan("average", sources, parts, values, objects, common_file), args
    )


def average(parts: Iterable[tuple[float, Tensor]]) -> Tensor:
    """The weighted average of tensors of one shape and floating-point dtype, in that dtype.

    parts: (weight, tensor). The sum is in float64; the quotient is rounded once.
    """
    total, shares = None, []
    for share, part in parts:
        if total is None:
            total = torch.zeros(part.shape, dtype=torch.float64)
        for summed, added in blocks(total, part):
            summed += share * added.double()
        shares.append(share)
    assert total is not None
    result = torch.empty_like(total, dtype=part.dtype)
    for summed, quotient in blocks(total, result):
        quotient.copy_(rounded(summed / math.fsum(shares), part.dtype))
    return result


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 `x` in `dtype`, rounded once, to the nearest, ties to even.

    torch rounds float64 to float32 first where it converts to a 16-bit dtype, and a value that this
    makes a tie can then go the wrong way. Here the float32 value is rounded to odd: towards zero,
    with the last bit set if anything was lost, so that the second rounding sees no false tie.
    """
    if dtype.itemsize >= 4:
        return x.to(dtype)
    near = x.float()
    bits = near.view(torch.int32)
    bits = bits - (near.double().abs() > x.abs()).int()  # one step towards zero
    return (bits | (near.double() != x).int()).view(torch.float32).to(dtype)


def _paths(paths: list[Path], steps: list[int] | None) -> list[Path]:
    if steps is not None:
        if len(paths) != 1:
            raise ConfigError("--steps takes the folder of one run: give one, or no --steps")
        found = [find(paths[0], step) for step in steps]
    else:
        found = [find(path) for path in paths]
    if len({path.resolve() for path in found}) < max(len(found), 2):
        raise ConfigError("give two or more different checkpoints, or one run with --steps A B")
    return found


def _shares(given: list[float] | None, count: int) -> list[float]:
    if given is None:
        return [1.0] * count
    if len(given) != count:
        raise ConfigError(f"--weights has {len(given)} numbers for {count} checkpoints: give each")
    if not all(math.isfinite(share) and share > 0 for share in given):
        raise ConfigError("--weights are numbers above 0: leave out a checkpoint without weight")
    # A power of two changes no ratio. The largest is then below 1, so that no sum overflows.
    return [math.ldexp(share, -math.frexp(max(given))[1]) for share in given]


def _check_same_model(one: Checkpoint, other: Checkpoint) -> None:
    """Raises ConfigError if two checkpoints are not of the same model, by arguments and tensors."""
    differing = arguments.differences(one.args(), other.args())["model"]
    if differing:
        name, (a, b) = next(iter(differing.items()))
        raise ConfigError(f"{one.path} and {other.path} are of two models: {name} is {a} and {b}")
    tensors, others = ({k: c.tensors[k] for k in strip.weights(c)} for c in (one, other))
    for key in sorted(tensors.keys() | others.keys()):
        if tensors.get(key) != others.get(key):
            raise ConfigError(
                f"{one.path} and {other.path} are of two models: {key} is "
                f"{tensors.get(key)} and {others.get(key)}"
            )
        if not others[key].dtype.is_floating_point:
            raise ConfigError(f"{key} is not of a floating-point dtype: it has no average")
