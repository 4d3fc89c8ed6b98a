"""Times a training step on several GPUs, in BF16 and with recipes, by parallel layout.

    python -m benchmarks.parallel_step [--layouts one tp2-sp dp2] [--side-by-side]

The model, the micro-batch and the number of sequences of a data-parallel rank in a step are the
same in every row. Tensor and pipeline parallelism therefore divide one GPU's step over N GPUs
(strong scaling), and data parallelism makes N such steps (weak scaling). *Scaling* is the tokens/s
of one GPU of the layout, divided by those of the layout "one" with the same recipe: 1 is ideal in
both cases. The names are those of training_step.py. A ratio is to the fastest BF16 of the layout.

Bytes are those sent in one step, by each kind of collective the most that any rank sends: for
linears, data-parallel sums and the optimizer (traffic.py). Rows with CUDA graphs have none, since
replays cannot be counted. All-to-all and broadcast have columns only where some row sends a
hundredth of its bytes by them. Milliseconds on the GPU are means over the ranks. Those of
communication include waiting for other ranks, and mostly overlap with computation. Those in which
nothing else ran on the GPU are "exposed". Memory is the largest peak of any rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from benchmarks import te
from benchmarks.gpus import visible_gpus
from benchmarks.training_step import GRAPHS, PLAIN, SEQUENCE, TE_LAYERS, asked, measure
from tools import pages
from tools.stamp import resumed, stamp

Row = dict[str, Any]
Case = tuple[str, str]  # a layout's name and a recipe's


@dataclass(frozen=True)
class TimedLayout:
    """How a model is distributed over tp * pp * dp GPUs. sp: sequence parallelism."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    sharded: bool = True  # whether data-parallel ranks share out the optimizer's state

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def flags(self) -> list[str]:
        """Megatron's flags, as a user who wants speed would set them."""
        flags = ["--tensor-model-parallel-size", str(self.tp)]
        flags += ["--pipeline-model-parallel-size", str(self.pp)]
        # Megatron alone would pad the vocabulary to 32,768 rows in all layouts. This package pads
        # to multiples of this number alone, which leaves out up to 2% of the head under TP.
        flags += ["--make-vocab-size-divisible-by", str(1024 // self.tp)]
        if self.sp:
            flags.append("--sequence-parallel")
        if self.dp > 1:
            flags.append("--overlap-grad-reduce")
        if self.dp > 1 and self.sharded:
            flags += ["--use-distributed-optimizer", "--overlap-param-gather"]
        return flags


ONE = "one"  # the layout of one GPU, with which the others are compared
LAYOUTS = {
    ONE: TimedLayout(),
    "tp2-sp": TimedLayout(tp=2, sp=True),
    "pp2": TimedLayout(pp=2),
    "dp2": TimedLayout(dp=2),
    "dp2-ddp": TimedLayout(dp=2, sharded=False),
    "tp4-sp": TimedLayout(tp=4, sp=True),
    "dp4": TimedLayout(dp=4),
    "tp2-sp-pp2": TimedLayout(tp=2, pp=2, sp=True),
    "tp8": TimedLayout(tp=8),
    "tp8-sp": TimedLayout(tp=8, sp=True),
    "dp8": TimedLayout(dp=8),
}
KINDS = ("gemm", "quantize", "carry", "communication")
SENT = ("all-gather", "reduce-scatter", "all-reduce", "send")
RARELY_SENT = ("all-to-all", "broadcast")  # their columns are left out where they hold next to 0


def row_of(case: Case, model: list[str], batch: int, gpus: str | None = None) -> Row:
    """Measures a layout with a recipe.

    model: the flags of the model. batch: the sequences of a data-parallel rank in a step.
    """
    layout, (name, recipe) = LAYOUTS[case[0]], case
    flags = [*model, "--global-batch-size", str(batch * layout.dp), *layout.flags()]
    found = measure(f"{name}, {recipe}", flags + asked(recipe), layout.gpus, gpus)
    speed = batch * layout.dp * SEQUENCE / found["ms"] * 1e3
    row = {"layout": name, "gpus": layout.gpus, "tokens/s": speed}
    row |= {"tokens/s a GPU": speed / layout.gpus, **summed_up(found.pop("ranks"))}
    if "--cuda-graph-impl" in flags + asked(recipe):
        row["sent"] = None
    return found | row | {"name": recipe}


def summed_up(ranks: list[dict[str, Any]]) -> Row:
    """What the ranks measured, as one row."""

    def each(key: str, how: Any) -> dict[str, Any]:
        kinds = {kind for rank in ranks for kind in rank[key]}
        return {kind: how([rank[key].get(kind, 0) for rank in ranks]) for kind in sorted(kinds)}

    spent = {kind: round(ms, 2) for kind, ms in each("gpu_ms", statistics.mean).items()}
    exposed = round(statistics.mean(rank["exposed_ms"] for rank in ranks), 2)
    row = {"gpu_ms": spent, "exposed_ms": exposed, "sent": each("sent", max)}
    row["peak_gib"] = max(rank["peak_gib"] for rank in ranks)
    return row | {"largest": ranks[0]["largest"]}  # kernels of rank 0


def grouped(cases: list[Case], gpus: int) -> list[list[Case]]:
    """The cases in groups, each of which fits on `gpus` GPUs at one time."""
    groups: list[list[Case]] = []
    for case in cases:
        for group in groups:
            if sum(LAYOUTS[name].gpus for name, _ in [*group, case]) <= gpus:
                group.append(case)
                break
        else:
            groups.append([case])
    return groups


def study(groups: list[list[Case]], model: list[str], batch: int) -> Iterator[Row]:
    """A row for each case. The cases of a group run at one time, each on GPUs of its own.

    A case that fails is reported, and has no row.
    """
    for group in groups:
        free = iter(visible_gpus())
        with ThreadPoolExecutor(len(group)) as pool:
            jobs = []
            for case in group:
                own = ",".join(islice(free, LAYOUTS[case[0]].gpus))
                jobs.append(pool.submit(row_of, case, model, batch, own))
        for job in jobs:
            try:
                yield job.result()
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)


def compare(rows: list[Row]) -> None:
    """Sorts the rows, and adds to each its ratio to the layout's BF16 and to one GPU, where those
    were measured."""
    rows.sort(key=lambda row: list(LAYOUTS).index(row["layout"]))  # recipes keep their order
    found = {(row["layout"], row["name"]): row["tokens/s a GPU"] for row in rows}
    for row in rows:
        plain = [found[row["layout"], name] for name in PLAIN if (row["layout"], name) in found]
        bases = {"ratio": max(plain, default=None), "scaling": found.get((ONE, row["name"]))}
        for key, base in bases.items():
            if base is not None:
                row[key] = row["tokens/s a GPU"] / base


def sent_kinds(rows: list[Row]) -> list[str]:
    """The kinds of collective that have a column in the table of these rows."""
    sent = [row["sent"] or {} for row in rows]
    rare = (k for k in RARELY_SENT if any(s.get(k, 0) > sum(s.values()) / 100 for s in sent))
    return [*SENT, *rare]


def table(rows: list[Row]) -> list[str]:
    """The result as a Markdown table; bytes in MB. Rows of older results have no `exposed_ms`."""
    exposed = ["exposed"] if any("exposed_ms" in row for row in rows) else []
    kinds = sent_kinds(rows)
    head = ["layout", "recipe", "ms a step", "tokens/s", "a GPU", "speedup", "scaling"]
    head += ["peak GiB", *KINDS, *exposed, *(f"{kind} MB" for kind in kinds)]
    body = []
    for row in rows:
        cells = [row["layout"], row["name"], f"{row['ms']:.0f}"]
        cells += [f"{row[key]:.0f}" for key in ("tokens/s", "tokens/s a GPU")]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("ratio", "scaling")]
        cells.append(f"{row['peak_gib']:.1f}")
        cells += [f"{row['gpu_ms'].get(kind, 0):.0f}" for kind in KINDS]
        cells += [f"{row['exposed_ms']:.0f}" if "exposed_ms" in row else "" for _ in exposed]
        sent = row["sent"]
        cells += [f"{sent.get(kind, 0) / 1e6:,.0f}" if sent is not None else "" for kind in kinds]
        body.append(cells)
    return pages.table(head, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/parallel_step.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    everything = [*PLAIN, "tetrajet", GRAPHS, TE_LAYERS, *te.FP8]
    parser.add_argument("--recipes", nargs="+", default=everything)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="of a data-parallel rank")
    parser.add_argument(
        "--side-by-side", action="store_true", help="layouts that find room run at one time"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    rows: list[Row] = []
    result: dict[str, Any] = {"stamp": stamp(args.commit), "layers": args.layers}
    result |= {"micro-batch": args.micro_batch, "batch": args.batch, "rows": rows}
    if args.resume:
        rows += resumed(args.out, result)
    fit = [name for name in args.layouts if LAYOUTS[name].gpus <= gpus]
    for name in args.layouts:
        if name not in fit:
            print(f"{name} is left out: it needs {LAYOUTS[name].gpus} GPUs, and here are {gpus}")
    found = [(row["layout"], row["name"]) for row in rows]
    cases = [case for case in product(fit, te.present(args.recipes)) if case not in found]
    groups = grouped(cases, gpus) if args.side_by_side else [[case] for case in cases]
    model = ["--num-layers", str(args.layers), "--micro-batch-size", str(args.micro_batch)]
    for row in study(groups, model, args.batch):
        rows.append(row)
        compare(rows)
        args.out.write_text(json.dumps(result, indent=1) + "\n")  # what is measured so far
        print("\n".join(table(rows)), flush=True)


if __name__ == "__main__":
    main()
