"""Times what Q-EMA and Q-Ramping add to a training step of tetrajet, on one GPU.

    python -m benchmarks.method_costs

The step is that of benchmarks/training_step.py. Every round runs all of ROWS, one after the other,
and repeats "tetrajet" at its end, so that the spread of equal runs is seen. Ratios are to the mean
of "tetrajet". A calibration's time is that in the log, less that of as many steps. There are two in
a launch: the first one also allocates memory.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.training_step import WARM, launched, timed
from tools import pages
from tools.stamp import stamp

STEPS = 14
CALIBRATION = 2  # steps
_OPTION = "--fp4-recipe-option"
_RAMPING = f"--fp4-recipe tetrajet-ramping {_OPTION} ramping_interval"
_CALIBRATED = f"{_RAMPING}={WARM + 3} {_OPTION} ramping_calibration={CALIBRATION}"


class Row(NamedTuple):
    """A row of the benchmark, with the flags of its launch."""

    name: str
    flags: str


ROWS = (
    Row("tetrajet", "--fp4-recipe tetrajet"),
    Row("tetrajet-ema", "--fp4-recipe tetrajet-ema"),
    Row("tetrajet-ramping", f"{_RAMPING}=1000"),
    Row("calibration", _CALIBRATED),
    Row("calibration, offloaded", f"{_CALIBRATED} --fp4-offload-calibration"),
)
UPDATES = ("blend_kernel", "ramp_kernel")


def measure(row: Row, flags: list[str]) -> dict[str, Any]:
    """The milliseconds of a row's step, those of its update's kernel, and the peak of memory.

    first_calibration_s, calibration_s: the seconds of the first and of the last calibration, if
        there were any, without those of its steps.
    """
    output, (found,) = launched(row.name, [*flags, *row.flags.split()], steps=STEPS)
    ms = statistics.median(timed(output))
    kernels = {name: 0.0 for name in UPDATES}
    for kernel_ms, _, name in found["largest"]:
        if name in kernels:
            kernels[name] += kernel_ms
    result = {
        "name": row.name,
        "ms": ms,
        "update ms": sum(kernels.values()),
        "optimizer ms": found["gpu_ms"]["optimizer"],
        "peak_gib": found["peak_gib"],
    }
    if told := re.findall(r"calibrated over \d+ steps in ([\d.]+) s", output):
        of_steps = CALIBRATION * ms / 1e3
        result["first_calibration_s"] = float(told[0]) - of_steps
        result["calibration_s"] = float(told[-1]) - of_steps
    return result


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table: means over the rounds."""
    by_name = defaultdict[str, list[dict[str, Any]]](list)
    for row in rows:
        by_name[row["name"]].append(row)
    plain = statistics.mean(row["ms"] for row in by_name["tetrajet"])
    body = []
    for name, own in by_name.items():
        ms = statistics.mean(row["ms"] for row in own)
        ratios = sorted(row["ms"] / plain for row in own)
        spread = f" ({ratios[0]:.3f} to {ratios[-1]:.3f})" if len(own) > 1 else ""
        update = statistics.mean(row["update ms"] for row in own)
        seconds = [row["calibration_s"] for row in own if "calibration_s" in row]
        cells = [name, f"{ms:.0f}", f"{ms / plain:.3f}{spread}"]
        cells += [f"{update:.1f}" if update else "", f"{max(row['peak_gib'] for row in own):.1f}"]
        cells.append(f"{statistics.mean(seconds):.1f}" if seconds else "")
        body.append(cells)
    head = ["ms a step", "times `tetrajet`", "update's kernel, ms", "peak GiB", "calibration, s"]
    return pages.table(["launch", *head], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/method_costs.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS])
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    flags = ["--num-layers", str(args.layers), "--micro-batch-size", str(args.micro_batch)]
    flags += ["--global-batch-size", str(args.batch)]
    rows: list[dict[str, Any]] = []
    settings = {"layers": args.layers, "micro-batch": args.micro_batch, "batch": args.batch}
    result = {"stamp": stamp(args.commit), **settings, "rows": rows}
    chosen = [row for row in ROWS if row.name in args.rows]
    for _ in range(args.rounds):
        for row in (*chosen, ROWS[0]):
            rows.append(measure(row, flags))
            args.out.write_text(json.dumps(result, indent=1) + "\n")  # what is measured so far
            print(json.dumps(rows[-1]), flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
