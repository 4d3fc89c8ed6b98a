"""Times what --fp4-metrics-interval adds to a training step of tetrajet, on one GPU.

    python -m benchmarks.metrics_costs

The step is that of benchmarks/training_step.py. Two launches of the same flags may differ by 2%,
and the steps of a launch become slower or faster with time. So each launch has cycles of EVERY
steps: first steps without metrics, then steps in which the rows of weights are followed
(metrics_costs_worker.py shortens the window of weights.WINDOW for it), and at last a report. Every
cycle is a row of the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.training_step import WARM, launched, timed
from tools import pages
from tools.stamp import stamp

FIRST = WARM + 2  # the number, from 1, of the first step that is timed
EVERY = 10  # steps of a cycle, from one report to the next
FOLLOWED = 5  # steps before a report in which rows are followed
CYCLES = 5  # of a launch, after a first one that is not timed
INTERVAL = 100  # for which the cost is computed


def times(flags: list[str]) -> tuple[dict[int, float], float]:
    """The milliseconds of each step of a launch, by its number, and the peak in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = ["--fp4-metrics-interval", str(EVERY), "--tensorboard-dir", folder]
        output, (found,) = launched(
            "tetrajet",
            [*flags, "--fp4-recipe", "tetrajet", *metrics],
            steps=(CYCLES + 1) * EVERY + 2,
            worker="metrics_costs_worker",
            profiled=-1,
        )
    return dict(enumerate(timed(output), FIRST)), found["peak_gib"]


def cycle(ms: dict[int, float], last: int) -> dict[str, float]:
    """The row of the cycle whose report is that of step `last`.

    The end of a step, where its report is written and where the sums of its sample are made, is
    timed by Megatron as part of the next step.
    """
    before = [ms[step] for step in range(last - EVERY + 2, last - FOLLOWED)]
    followed = [ms[step] for step in range(last - FOLLOWED + 1, last)]
    plain, sampled = statistics.median(before), statistics.median(followed)
    return {
        "plain ms": plain,
        "sampling ms": sampled - plain,
        "report ms": ms[last] + ms[last + 1] - sampled - plain,
    }


def measured(flags: list[str]) -> list[dict[str, float]]:
    """The rows of one launch."""
    ms, peak = times(flags)
    ends = range(2 * EVERY, (CYCLES + 1) * EVERY + 1, EVERY)
    return [cycle(ms, last) | {"peak_gib": peak} for last in ends]


def share(row: dict[str, float]) -> float:
    """The cost at an interval of INTERVAL, as a share of the time without metrics."""
    return (row["sampling ms"] + row["report ms"] / INTERVAL) / row["plain ms"]


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure over the rows."""
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def table(rows: list[dict[str, float]]) -> list[str]:
    """The result as a Markdown table: the mean over all cycles, and the least and the most."""
    each = [("mean", mean(rows))]
    for word, choose in (("least", min), ("most", max)):
        each.append((word, {name: choose(row[name] for row in rows) for name in rows[0]}))
        each[-1][1]["share"] = choose(share(row) for row in rows)
    body = []
    for word, row in each:
        cells = [word, f"{row['plain ms']:.1f}", f"{row['sampling ms']:.1f}"]
        cells += [f"{row['report ms']:.0f}", f"{row.get('share', share(row)):.2%}"]
        body.append([*cells, f"{row['peak_gib']:.1f}"])
    head = ["ms a step", "ms of following rows", "ms of a report", f"all, every {INTERVAL} steps"]
    return pages.table(["cycles", *head, "peak GiB"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/metrics_costs.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    flags = ["--num-layers", str(args.layers), "--micro-batch-size", str(args.micro_batch)]
    flags += ["--global-batch-size", str(args.batch)]
    settings = {"layers": args.layers, "micro-batch": args.micro_batch, "batch": args.batch}
    rows: list[dict[str, float]] = []
    for _ in range(args.launches):
        rows += measured(flags)
        result = {"stamp": stamp(args.commit), **settings, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print("\n".join(table(rows)), flush=True)


if __name__ == "__main__":
    main()
