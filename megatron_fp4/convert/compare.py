"""Compare two checkpoints: their arguments, and every tensor.

Tensors that are not equal bit for bit are listed with their largest difference. The exit status is
0 if the checkpoints are equal, and 1 if they differ or cannot be read. Paths, the log, the number
of the process and the step from which its launch went on are not compared.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.convert import arguments, keys, rewrite
from megatron_fp4.convert.blocks import blocks
from megatron_fp4.convert.metadata import TensorInfo
from megatron_fp4.convert.output import Progress
from megatron_fp4.convert.torch_dist import COMMON, Checkpoint, find


@dataclass
class Difference:
    """By how much the values b of a tensor differ from a, the values in the first checkpoint.

    max_abs: the largest |a - b|. max_relative: the largest |a - b| / max(|a|, |b|).
    relative_l2: the root of sum (a - b)² / sum a². NaN if a NaN is in one alone.
    """

    max_abs: float
    max_relative: float
    relative_l2: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command to a parser."""
    parser.add_argument("a", type=Path, help="a checkpoint's folder, or that of several")
    parser.add_argument("b", type=Path, help="another")
    parser.add_argument("--steps", type=int, nargs=2, metavar=("A", "B"), help="of several")
    parser.add_argument("--weights-only", action="store_true", help="the model's weights alone")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    rewrite.add_verify(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; returns the exit status. Raises ConfigError if it cannot read one."""
    steps = args.steps or (None, None)
    a, b = (
        Checkpoint(find(path, step)) for path, step in zip((args.a, args.b), steps, strict=True)
    )
    rewrite.verify((a, b), args)
    found = compare(a, b, args.weights_only)
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 0 if found["equal"] else 1


def compare(a: Checkpoint, b: Checkpoint, weights_only: bool = False) -> dict[str, Any]:
    """What differs between two checkpoints, as JSON data.

    weights_only: compare the weights of the model alone, and nothing else.
    """
    found: dict[str, Any] = {"a": str(a.path), "b": str(b.path)}
    found["arguments"] = {} if weights_only else _arguments(a, b)
    found["tensors"] = _tensors(a, b, weights_only)
    found["objects"] = {} if weights_only else _objects(a, b)
    counted = ("only_in_a", "only_in_b", "other_shape", "different")
    found["equal"] = not (
        any(found["arguments"].values())
        or any(found["tensors"][name] for name in counted)
        or any(found["objects"].values())
    )
    return found


class _Sums:
    """Goes through the parts of one tensor, and adds up what its Difference is made of."""

    def __init__(self) -> None:
        self._largest = self._relative = 0.0
        self._squares = self._total = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Adds a part of the tensor, of both checkpoints."""
        for one, other in blocks(a, b):
            x, y = one.double(), other.double()
            same = (x == y) | (x.isnan() & y.isnan())
            apart = (x - y).abs().masked_fill(same, 0.0)
            size = torch.maximum(x.abs(), y.abs())
            self._largest = _max(self._largest, apart)
            self._relative = _max(self._relative, torch.where(apart == 0, 0.0, apart / size))
            self._squares += apart.square().sum().item()
            self._total += x.square().sum().item()

    def difference(self) -> Difference:
        """The difference of the parts that were added."""
        squares, total = self._squares, self._total
        root = math.sqrt(squares / total) if total > 0 else math.sqrt(squares) and math.inf
        return Difference(self._largest, self._relative, root)


def _max(largest: float, values: Tensor) -> float:
    """The larger of a number and all values; NaN if one is NaN."""
    return torch.tensor([largest, values.max().item()], dtype=torch.float64).max().item()


def _arguments(a: Checkpoint, b: Checkpoint) -> dict[str, dict[str, list[str]]]:
    groups = arguments.differences(a.args(), b.args())
    return {
        group: {name: [str(was), str(now)] for name, (was, now) in differing.items()}
        for group, differing in groups.items()
    }


def _tensors(a: Checkpoint, b: Checkpoint, weights_only: bool) -> dict[str, Any]:
    ours, theirs = (
        {k: info for k, info in c.tensors.items() if not weights_only or keys.kind(k) == "weights"}
        for c in (a, b)
    )
    both = [key for key in ours if key in theirs]
    comparable = [key for key in both if ours[key] == theirs[key]]
    progress = Progress("comparing", sum(ours[key].bytes for key in comparable))
    different = {
        key: asdict(found)
        for key in comparable
        if (found := _compare_tensor(a, b, key, progress)) is not None
    }
    return {
        "equal": [key for key in comparable if key not in different],
        "different": different,
        "other_shape": {
            key: [_words(ours[key]), _words(theirs[key])] for key in both if key not in comparable
        },
        "only_in_a": [key for key in ours if key not in theirs],
        "only_in_b": [key for key in theirs if key not in ours],
    }


def _compare_tensor(
    a: Checkpoint, b: Checkpoint, key: str, progress: Progress
) -> Difference | None:
    """The difference of one tensor, which is read by the chunks of `a`; None if its bits are
    equal."""
    equal = True
    for region in a.chunks(key):
        equal = equal and rewrite.equal_bits(a.part(key, *region), b.part(key, *region))
        progress.add(TensorInfo(region[1], a.tensors[key].dtype).bytes)
    if equal:
        return None
    sums = _Sums()
    for region in a.chunks(key):  # of which one is in memory at a time
        sums.add(a.part(key, *region), b.part(key, *region))
    return sums.difference()


def _objects(a: Checkpoint, b: Checkpoint) -> dict[str, list[str]]:
    """Keys of objects, and what the common state has beside the arguments."""
    ours, theirs = ({key for key in c.objects if key != COMMON} for c in (a, b))
    differing = [key for key in sorted(ours & theirs) if a.raw(key) != b.raw(key)]
    states = [
        {key: repr(value) for key, value in c.common().items() if key != "args"} for c in (a, b)
    ]
    names = sorted(states[0].keys() | states[1].keys())
    return {
        "only_in_a": sorted(ours - theirs),
        "only_in_b": sorted(theirs - ours),
        "different": differing + [n for n in names if states[0].get(n) != states[1].get(n)],
    }


def _words(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"


def _text(found: dict[str, Any]) -> str:
    lines = [f"a: {found['a']}", f"b: {found['b']}"]
    for group, differing in found["arguments"].items():
        lines += [f"{group} arguments: {len(differing) or 'none'} differ"]
        lines += [f"  {name}: {_short(a)} | {_short(b)}" for name, (a, b) in differing.items()]
    tensors = found["tensors"]
    lines.append(
        f"tensors: {len(tensors['equal'])} equal bit for bit, {len(tensors['different'])} "
        f"different, {len(tensors['other_shape'])} of another shape or dtype"
    )
    for key, values in tensors["different"].items():
        numbers = "max |a-b| {max_abs:.3g}, relative {max_relative:.3g}, L2 {relative_l2:.3g}"
        lines.append(f"  {key}: {numbers.format(**values)}")
    lines += [f"  {key}: {a} | {b}" for key, (a, b) in tensors["other_shape"].items()]
    for letter in "ab":
        lines += [f"  only in {letter}: {key}" for key in tensors[f"only_in_{letter}"]]
    for name, listed in found["objects"].items():
        where = "different" if name == "different" else f"only in {name[-1]}"
        lines += [f"  state {where}: {key}" for key in listed]
    return "\n".join([*lines, "equal" if found["equal"] else "different"])


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
