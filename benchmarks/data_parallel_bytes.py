"""Counts the bytes that data-parallel ranks send and hold, by the flags that reduce them.

    python -m benchmarks.data_parallel_bytes

pretrain_gpt.py trains a small LLaMA in BF16 over 2 and over 4 ranks: Megatron's own, and `tetrajet`
with --fp4-grad-comm, --fp4-optimizer-state, --fp4-param-gather, and all of them. Two microbatches
make a step. A dispatch mode counts what is sent in the last step (traffic.py), of gradients and of
weights; what is left are the loss and the norm of the gradients. What the optimizer holds are the
bytes of its tensors.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.training_step import LOCAL, launched
from tools import pages
from tools.stamp import resumed, stamp

Row = dict[str, Any]
# The size of buckets gives this model about as many as a large one has by Megatron's default.
MODEL = """
    --num-layers 4 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8
    --num-query-groups 4 --vocab-size 8192 --seq-length 64 --max-position-embeddings 64
    --ddp-bucket-size 500000
""".split()
MICROBATCHES, STEPS = 2, 3
RECIPE = "--fp4-recipe tetrajet"
GRADIENTS, MOMENTS = "--fp4-grad-comm", "--fp4-optimizer-state"
GATHER = "--fp4-param-gather"
ALL = f"{GRADIENTS} fp8 {MOMENTS} m=fp8,v=fp16 {GATHER}"
OPTIMIZERS = {
    "plain": ["--overlap-grad-reduce"],
    "distributed": [
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    ],
}
MEGATRON = {"Megatron": "", "Megatron, --grad-reduce-in-bf16": "--grad-reduce-in-bf16"}
ANYWHERE = [
    *(f"{GRADIENTS} bf16", f"{GRADIENTS} fp8"),
    *(f"{MOMENTS} m=fp8,v=fp16", f"{MOMENTS} m=fp8,v=fp8"),
]
SHARDED = [GATHER, ALL]  # flags that the distributed optimizer alone can have


@dataclass(frozen=True)
class Case:
    """What is launched.

    name: of the row. optimizer: a key of OPTIMIZERS. ranks: the number of data-parallel ranks.
    """

    name: str
    optimizer: str
    ranks: int

    @property
    def flags(self) -> list[str]:
        """Megatron's flags, without those of the model."""
        own = MEGATRON.get(self.name, f"{RECIPE} {self.name}").split()
        batch = ["--micro-batch-size", "1", "--global-batch-size", str(MICROBATCHES * self.ranks)]
        return [*LOCAL, *batch, *OPTIMIZERS[self.optimizer], *own]


CASES = [
    Case(name, optimizer, ranks)
    for optimizer in OPTIMIZERS
    for ranks in (2, 4)
    for name in [*MEGATRON, *ANYWHERE, *(SHARDED if optimizer == "distributed" else [])]
]


def row_of(case: Case, model: list[str] = MODEL) -> Row:
    """What the ranks of a launch send and hold, and what its start table says of it.

    model: the flags of the model. Raises RuntimeError with the last output of a failed launch.
    """
    flags = [*model, *case.flags]
    worker = "data_parallel_bytes_worker"
    output, ranks = launched(case.name, flags, case.ranks, steps=STEPS, worker=worker, profiled=-1)
    said = re.findall(r"^ +((?:dense: |\d[\d,]* weights |Adam's moments ).*)$", output, re.M)
    return asdict(case) | {"each": ranks, "said": said}


def a_parameter(row: Row, *keys: str) -> float:
    """Bytes of a parameter of the model, the mean over the ranks.

    keys: of what a rank found, such as "sent", "gradients", "all-to-all"; all below are summed.
    """
    return mean(_total(rank, keys) / rank["parameters"] for rank in row["each"])


def _total(found: Any, keys: tuple[str, ...]) -> int:
    for key in keys:
        found = found.get(key, {})
    return sum(found.values()) if isinstance(found, dict) else found


def table(rows: list[Row]) -> list[str]:
    """The rows as a Markdown table, with columns for the kinds of collective that they have."""
    kinds = dict.fromkeys(
        (purpose, kind)
        for purpose in ("gradients", "weights")
        for row in rows
        for kind in row["each"][0]["sent"][purpose]
    )
    head = ["ranks", "flags", *(f"{purpose}, {kind}" for purpose, kind in kinds), "sent in all"]
    head += ["moments", "main weights"]
    body = []
    for row in rows:
        sizes = [a_parameter(row, "sent", *kind) for kind in kinds]
        sizes += [sum(sizes), *(a_parameter(row, "held", key) for key in head[-2:])]
        name = row["name"] if row["name"] in MEGATRON else f"`{row['name']}`"
        cells = [str(row["ranks"]), name, *(f"{size:.3f}" if size else "" for size in sizes)]
        body.append(cells)
    return pages.table(head, body)


def tables(rows: list[Row]) -> dict[str, list[str]]:
    """A table for each optimizer."""
    return {
        optimizer: table([row for row in rows if row["optimizer"] == optimizer])
        for optimizer in OPTIMIZERS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/data_parallel_bytes.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    args = parser.parse_args()
    rows: list[Row] = []
    result: dict[str, Any] = {"stamp": stamp(), "model": " ".join(MODEL), "rows": rows}
    if args.resume:
        rows += resumed(args.out, result)
    for case in CASES[len(rows) :]:
        rows.append(row_of(case))
        args.out.write_text(json.dumps(result, indent=1) + "\n")  # what is counted so far
        print(case, flush=True)
    for name, lines in tables(rows).items():
        print(f"\n{name}\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
