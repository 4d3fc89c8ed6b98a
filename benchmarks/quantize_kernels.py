"""The quantize kernels against the bandwidth of a copy, in one run on one GPU.

    python -m benchmarks.quantize_kernels

A kernel reads 2 bytes an element and writes 4.25 bits for each copy that it makes. Its share is
those bytes in its time, over the bytes that a copy of the same BF16 matrix moves in its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.stamp import stamp
from benchmarks.timing import medians
from megatron_fp4.kernels.quantize import Copy, quantize
from megatron_fp4.philox import Key, Noise, Placement, Signs
from megatron_fp4.quantizer import get_quantizer

SHAPES = ((8192, 8192), (8192, 14336))
# What is made: the quantizer, the axes of the copies, the transform's group.
KERNELS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "nearest, along rows": ("mxfp4-ceil", (1,), 0),
    "nearest, across": ("mxfp4-ceil", (0,), 0),
    "nearest, both": ("mxfp4-ceil", (1, 0), 0),
    "stochastic, along rows": ("mxfp4-ceil-sr", (1,), 0),
    "stochastic, across": ("mxfp4-ceil-sr", (0,), 0),
    "stochastic, both": ("mxfp4-ceil-sr", (1, 0), 0),
    "Hadamard 64 + stochastic, along rows": ("mxfp4-sr", (1,), 64),
    "Hadamard 64 + stochastic, across": ("mxfp4-sr", (0,), 64),
    "Hadamard 64 + stochastic, both": ("mxfp4-sr", (1, 0), 64),
}
AIMS = {"nearest": 0.85, "stochastic": 0.70, "Hadamard": 0.60}  # of one direction
BOTH = 0.65


def study() -> list[dict[str, Any]]:
    """A row for each shape and kernel."""
    rows = []
    for shape in SHAPES:
        x = torch.randn(*shape, device="cuda").bfloat16()
        copy = torch.empty_like(x)
        calls: dict[str, Callable[[], Any]] = {"copy": partial(copy.copy_, x)}
        for name, (quantizer, axes, group) in KERNELS.items():
            calls[name] = kernel(x, quantizer, axes, group)
        taken = medians(calls)
        speed = 4 * x.numel() / taken["copy"]
        for name, (_, axes, _) in KERNELS.items():
            moved = x.numel() * (2 + len(axes) * 4.25 / 8)
            aim = BOTH if len(axes) == 2 else AIMS[name.split(",")[0].split()[0]]
            rows.append(
                {
                    "shape": list(shape),
                    "kernel": name,
                    "us": taken[name] * 1e6,
                    "TB/s": moved / taken[name] / 1e12,
                    "copy TB/s": speed / 1e12,
                    "share": moved / taken[name] / speed,
                    "aim": aim,
                }
            )
    return rows


def kernel(x: torch.Tensor, name: str, axes: tuple[int, ...], group: int) -> Callable[[], Any]:
    """A call as training makes it: noise by the rows that a data-parallel rank holds."""
    quantizer = get_quantizer(name)
    place = Placement(rows=torch.arange(len(x), device="cuda") + 3 * len(x))
    copies = [
        Copy(
            axis,
            Noise(Key(7, 3), 5 + axis, place) if quantizer.stochastic else None,
            Signs(Key(7), 9 + axis) if group else None,
        )
        for axis in axes
    ]
    return lambda: quantize(x, quantizer, copies, group)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table."""
    lines = ["| matrix | kernel | µs | TB/s | of a copy | aim |", "|---" * 6 + "|"]
    for row in rows:
        size = " × ".join(str(n) for n in row["shape"])
        cells = [size, row["kernel"], f"{row['us']:.1f}", f"{row['TB/s']:.2f}"]
        cells += [f"{row['share']:.0%}", f"{row['aim']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/quantize_kernels.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the kernels are timed on a GPU, and this machine shows none")
    rows = study()
    result: dict[str, Any] = {
        "what": "quantize kernels against a copy",
        "stamp": stamp(args.commit),
        "rows": rows,
        "table": table(rows),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(result["table"]))


if __name__ == "__main__":
    main()
