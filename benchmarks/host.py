"""Times Megatron's linears where the host decides the time, in BF16 and in each recipe.

    python -m benchmarks.host [--tp 2]

A linear of 512 tokens, inputs and outputs takes the host longer than the GPU. Each row is a launch
of pretrain_gpt.py (benchmarks/host_worker.py), whose column-parallel fc1 and row-parallel fc2 run
forward and backward beside torch's own linear in the same process. "upstream bf16" is Megatron
without this package, and "bf16" this package's linear after a recipe's return to BF16. Times are
those of the slowest rank. Ratios are to the faster BF16 linear; since processes differ in speed,
each time is first divided by that of torch's linear beside it.

benchmarks/host_linear.py times the public `linear` in one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.host_worker import LINEARS
from benchmarks.training_step import asked, launched
from megatron_fp4.recipes import uniform_recipes
from tools import pages
from tools.stamp import stamp

SIZE = 512  # tokens, inputs and outputs on each rank
BF16 = ("upstream bf16", "bf16")
Row = dict[str, Any]


def model(size: int, tp: int) -> list[str]:
    """Megatron's flags for a layer whose linears have `size` inputs and outputs on each of `tp`
    ranks, and for a microbatch of `size` tokens."""
    words = f"""
        --num-layers 1 --hidden-size {size} --ffn-hidden-size {size * tp} --num-attention-heads 4
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --seq-length {size} --max-position-embeddings {size} --bf16
        --micro-batch-size 1 --global-batch-size 1
    """.split()
    if tp > 1:
        words += ["--tensor-model-parallel-size", str(tp), "--sequence-parallel"]
    return words


def measured(name: str, size: int, tp: int) -> Row:
    """The row of one launch: for each of LINEARS its microseconds, and those of torch's linear.

    name: of BF16, or a recipe. Raises RuntimeError if the launch fails.
    """
    _, ranks = launched(name, asked(name), tp, worker="host_worker", model=model(size, tp))
    slowest = {key: max(found[key] for found in ranks) for key in ranks[0]}
    return {"name": name, **slowest}


def relative(row: Row, linear: str) -> float:
    """The time of a linear as a multiple of that of torch's linear beside it."""
    return float(row[linear] / row[f"torch {linear}"])


def compare(rows: list[Row]) -> None:
    """Adds "times <linear>" to each row: its time as a multiple of the faster BF16's."""
    for linear in LINEARS:
        plain = [relative(row, linear) for row in rows if row["name"] in BF16]
        for row in rows:
            if plain:
                row[f"times {linear}"] = relative(row, linear) / min(plain)


def study(names: list[str], size: int, tp: int) -> Iterator[Row]:
    """Yields the row of each launch, in the order of `names`: "upstream bf16", "bf16" or a recipe.

    size: tokens, inputs and outputs of the linears on each of `tp` ranks. The error of a launch
    that fails is printed, and the launch has no row.
    """
    for name in names:
        try:
            yield measured(name, size, tp)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)


def table(rows: list[Row]) -> list[str]:
    """The result as a Markdown table."""
    head, body = ["linear"], []
    for name in ("fc1", "fc2"):
        head += [f"{name} µs", "torch's", "relative to BF16"]
    for row in rows:
        cells = [row["name"]]
        for linear in LINEARS:
            times = row.get(f"times {linear}")
            cells += [f"{row[linear]:,.0f}", f"{row[f'torch {linear}']:,.0f}"]
            cells.append("" if times is None else f"{times:.2f}")
        body.append(cells)
    return pages.table(head, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/host.json"))
    parser.add_argument("--recipes", nargs="+", default=[*BF16, *uniform_recipes()])
    parser.add_argument("--tp", type=int, default=1, help="ranks of tensor parallelism")
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.tp:
        sys.exit(f"linears are timed on {args.tp} GPUs, and this machine shows fewer")
    rows: list[Row] = []
    result = {"stamp": stamp(args.commit), "size": SIZE, "tp": args.tp, "rows": rows}
    for row in study(args.recipes, SIZE, args.tp):
        rows.append(row)
        compare(rows)
        args.out.write_text(json.dumps(result, indent=1) + "\n")  # what is measured so far
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
