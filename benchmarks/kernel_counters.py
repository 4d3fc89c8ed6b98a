"""Reads hardware counters of the quantize kernels with Nsight Compute, on one GPU.

    python -m benchmarks.kernel_counters

For each kernel of `benchmarks.quantize_kernels` with stochastic rounding or a Hadamard transform,
and for nearest rounding beside them: how busy memory and the units are, as a share of their peak,
and what warps wait for. `ncu` runs this module again with --launch, which launches each kernel once
after a warm-up. It needs ncu on the PATH, and the permission to read counters.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantize_kernels import KERNELS, SHAPES, kernel
from tools import pages
from tools.stamp import stamp, write

CASES = [
    "nearest, along rows",
    "nearest, along columns",
    "nearest, both",
    "stochastic, along rows",
    "stochastic, along columns",
    "stochastic, both",
    "stochastic, along columns, from codes, with E4M3",
    "stochastic, both, with E5M2",
    "stochastic, both, of a SwiGLU's gradient, with E5M2",
    "Hadamard 64 + stochastic, along rows",
    "Hadamard 64 + stochastic, along columns",
    "Hadamard 64 + stochastic, both",
]
DURATION = "gpu__time_duration.sum"
SHARES = {  # of the peak, by the name in the result
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "ALU": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "multipliers": "sm__inst_executed_pipe_fmaheavy.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "L1 and shared memory": "l1tex__throughput.avg.pct_of_peak_sustained_active",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
SECTION = "WarpStateStats"  # has the counters of STALL
MARK = "FillFunctor"  # of the kernel that is launched before those of each case
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}


def launch() -> None:
    """Launches a mark and then the kernels of each case, the only ones that ncu profiles."""
    x = torch.randn(*SHAPES[0], device="cuda").bfloat16()
    calls = [kernel(x, KERNELS[name]) for name in CASES]
    for call in calls:
        call()  # compiles
    mark = torch.empty(3, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        mark.fill_(1.0)
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiled(log: Path) -> None:
    """Runs `launch` under ncu, which writes its table to log. Ends with ncu's words if it fails."""
    metrics = ",".join([DURATION, *SHARES.values()])
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv"]
    command += ["--page", "raw", "--section", SECTION, "--metrics", metrics]
    command += ["--log-file", str(log), sys.executable, "-m", "benchmarks.kernel_counters"]
    done = subprocess.run([*command, "--launch"], capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr).splitlines()
        said += log.read_text().splitlines() if log.exists() else []
        sys.exit("\n".join(["ncu failed:", *said[-20:]]))


def read(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields for each kernel of ncu's table its name, microseconds, shares of the peak (SHARES),
    and by reason how many warps it stalled, on average over the cycles in which one issued."""
    table = csv.reader(line for line in lines if line.startswith('"'))
    columns = next(table)
    units = dict(zip(columns, next(table), strict=True))
    reasons = {key: found[1] for key in columns if (found := STALL.match(key))}
    for cells in table:
        row = dict(zip(columns, cells, strict=True))
        yield {
            "kernel": row["Kernel Name"],
            "us": number(row[DURATION]) * MICROSECONDS[units[DURATION]],
            "shares": {name: number(row[key]) for name, key in SHARES.items()},
            "stalls": {reason: number(row[key]) for key, reason in reasons.items()},
        }


def number(cell: str) -> float:
    """A number of ncu's table, which separates thousands by commas."""
    return float(cell.replace(",", ""))


def by_case(kernels: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each kernel that quantizes, with its case. Smaller kernels of a case are left out:
    those that take less than a tenth of the case's longest one."""
    found: list[list[dict[str, Any]]] = []
    for each in kernels:
        if MARK in each["kernel"]:
            found.append([])
        else:
            found[-1].append(each)
    rows = []
    for name, those in zip(CASES, found, strict=True):
        least = max(each["us"] for each in those) / 10
        rows += [{"case": name} | each for each in those if each["us"] >= least]
    return rows


def table(rows: list[dict[str, Any]], reasons: int = 4) -> list[str]:
    """The result as a Markdown table, with the `reasons` largest stalls of each kernel."""
    body = []
    for row in rows:
        stalls = sorted(row["stalls"].items(), key=lambda each: -each[1])
        largest = [f"{name.replace('_', ' ')} {n:.1f}" for name, n in stalls if name != "selected"]
        cells = [row["case"], f"{row['us']:.0f}"]
        cells += [f"{row['shares'][name]:.0f}%" for name in SHARES]
        body.append([*cells, ", ".join(largest[:reasons])])
    return pages.table(["kernel", "µs", *SHARES, "a warp waits for"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/kernel_counters.json")
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    parser.add_argument("--launch", action="store_true", help="launch the kernels for ncu")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the kernels are measured on a GPU, and this machine shows none")
    if args.launch:
        return launch()
    if shutil.which("ncu") is None:
        sys.exit("ncu is not on the PATH: install NVIDIA Nsight Compute")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        profiled(log)
        rows = by_case(read(log.read_text().splitlines()))
    result: dict[str, Any] = {
        "what": "hardware counters of the quantize kernels on 8192 x 8192 BF16, one launch each",
        "stamp": stamp(args.commit),
        "metrics": {"us": DURATION, **SHARES, "stalls": STALL.pattern},
        "rows": rows,
        "table": table(rows),
    }
    write(args.out, result)


if __name__ == "__main__":
    main()
