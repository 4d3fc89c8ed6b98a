"""Times what --fp4-metrics-interval adds to a training step of tetrajet, on one GPU.

    python -m benchmarks.metrics_costs

The step is that of benchmarks/training_step.py. Two launches of the same flags may differ by 2%,
so that each figure comes from differences within a launch:

- sampling: the rows of weights that are followed, in the last weights.WINDOW steps before a report.
  A launch whose window begins in its middle has steps without and steps with it. The steps of a
  launch become slower or faster with time, so that the same difference of a launch without metrics
  is subtracted.
- a report: a launch that reports every tenth step has steps with and without one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.stamp import stamp
from benchmarks.training_step import WARM, launched, timed
from megatron_fp4.metrics.weights import WINDOW

STEPS = 36
FIRST = WARM + 2  # the number, from 1, of the first step that is timed
MIDDLE = 20  # the first step with sampling
EVERY = 10  # steps from one report to the next
INTERVAL = 100  # for which the cost is computed


def times(flags: list[str], interval: int) -> tuple[dict[int, float], float]:
    """The milliseconds of each step that is timed, by its number, and the peak in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = ["--fp4-metrics-interval", str(interval), "--tensorboard-dir", folder]
        given = [*flags, "--fp4-recipe", "tetrajet", *metrics]
        output, (found,) = launched(f"an interval of {interval}", given, steps=STEPS)
    return dict(enumerate(timed(output), FIRST)), found["peak_gib"]


def halves(ms: dict[int, float]) -> tuple[float, float]:
    """The median time of the steps before MIDDLE, and of those after it."""
    before = [taken for step, taken in ms.items() if step < MIDDLE]
    # The sums of the first sample are made at the end of its step, which Megatron times as part of
    # the next one.
    after = [taken for step, taken in ms.items() if step > MIDDLE]
    return statistics.median(before), statistics.median(after)


def report_ms(ms: dict[int, float]) -> float:
    """The milliseconds that writing one report adds to training.

    ms: the time of each step, of a launch that reports every EVERY steps. The report is written at
    the end of its step, which Megatron times as part of the next one: both steps count.
    """
    usual = statistics.median(taken for step, taken in ms.items() if step % EVERY not in (0, 1))
    reports = [step for step in ms if step % EVERY == 0 and step + 1 in ms]
    return statistics.median(ms[step] + ms[step + 1] - 2 * usual for step in reports)


def measured(flags: list[str]) -> dict[str, float]:
    """The row of one round."""
    plain, later = halves(times(flags, 0)[0])
    before, sampled = halves(times(flags, WINDOW + MIDDLE)[0])
    ms, peak = times(flags, EVERY)
    return {
        "plain ms": plain,
        "drift ms": later - plain,
        "sampling ms": (sampled - before) - (later - plain),
        "report ms": report_ms(ms),
        "peak_gib": peak,
    }


def share(row: dict[str, float]) -> float:
    """The cost at an interval of INTERVAL, as a share of the time without metrics."""
    return (row["sampling ms"] + row["report ms"] / INTERVAL) / row["plain ms"]


def table(rows: list[dict[str, float]]) -> list[str]:
    """The result as a Markdown table, with the mean over the rounds in its last row."""
    lines = [
        "| round | ms a step | ms of sampling | ms of a report | all, every 100 steps | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
    for number, row in [*enumerate(rows, 1), ("mean", mean)]:
        cells = [str(number), f"{row['plain ms']:.1f}", f"{row['sampling ms']:+.1f}"]
        cells += [f"{row['report ms']:.0f}", f"{share(row):.2%}", f"{row['peak_gib']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/metrics_costs.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    flags = ["--num-layers", str(args.layers), "--micro-batch-size", str(args.micro_batch)]
    flags += ["--global-batch-size", str(args.batch)]
    settings = {"layers": args.layers, "micro-batch": args.micro_batch, "batch": args.batch}
    rows: list[dict[str, float]] = []
    for _ in range(args.rounds):
        rows.append(measured(flags))
        result = {"stamp": stamp(args.commit), **settings, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print("\n".join(table(rows)), flush=True)


if __name__ == "__main__":
    main()
