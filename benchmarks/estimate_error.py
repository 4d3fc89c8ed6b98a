"""Compares megatron_fp4/estimate with committed measurements on H200s.

    python -m benchmarks.estimate_error

For each measured step, linear and kernel: the estimate over the measurement. `fitted` uses the
rates of rates.py. `left out` uses rates that are fitted without that row, and for rows of several
GPUs without all rows of its layout; it is a prediction. Rows of other commits are fitted to never.
Memory has no fitted number. Bytes are compared too, and must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.estimate_fit import fit
from benchmarks.estimate_rows import (
    BY_TORCH,
    CURRENT,
    EACH_RECIPE,
    KERNELS,
    LINEARS,
    OTHERS,
    Step,
    Timed,
    kernels,
    linears,
    mlps,
    steps,
)
from benchmarks.training_step import PLAIN
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.layout import stages
from megatron_fp4.estimate.memory import adam_bytes, calibration, memory
from megatron_fp4.estimate.rates import RATES, Rates, seconds
from megatron_fp4.estimate.step import Time, step_time, work_of
from tools import pages
from tools.stamp import stamp

Row = dict[str, Any]
GIB = 2.0**30


def rows() -> list[Row]:
    """A row for each committed measurement."""
    timed = (*linears(), *mlps(), *kernels())
    return [*(of_step(step) for step in steps()), *(of_timed(each) for each in timed)]


# --- time -----------------------------------------------------------------------------------------


def left_out(row: Step | Timed) -> Rates:
    """The rates as fitted without a row, or without its layout on several GPUs."""
    if isinstance(row, Step) and not row.is_fitted:
        return RATES
    return fit(partial(_is_of, row))


def _is_of(row: Step | Timed, other: Step | Timed) -> bool:
    if isinstance(row, Step) and isinstance(other, Step) and row.layout.gpus > 1:
        return row.layout_name == other.layout_name
    return row is other


def time_of(step: Step, rates: Rates = RATES) -> Time:
    """The estimated time of a measured step."""
    return step_time(step.model, step.layout, step.recipe, MEASURED, rates)


def of_step(step: Step) -> Row:
    """The row of a measured step."""
    measured = step.row["ms"]
    estimates = {"fitted": time_of(step), "left out": time_of(step, left_out(step))}
    found: Row = {"file": step.file, "layout": step.layout_name, "name": step.name}
    found |= {"measured ms": measured}
    found |= {key: each.total * 1e3 / measured for key, each in estimates.items()}
    found["peak GiB"] = step.row["peak_gib"]
    if has_memory(step):
        found["memory"] = peak(step) / step.row["peak_gib"]
    if step.row["sent"]:
        found["bytes"] = {
            kind: estimate / step.row["sent"][kind] for kind, estimate in sent(step).items()
        }
    return found


def of_timed(row: Timed) -> Row:
    """The row of a measured linear or kernel."""
    found: Row = {"file": row.file, "name": row.name, "measured ms": row.seconds * 1e3}
    used = {"fitted": RATES} if row.only else {"fitted": RATES, "left out": left_out(row)}
    for key, rates in used.items():
        estimate = sum(seconds(row.amounts, MEASURED, rates.seconds).values())
        found[key] = estimate * (rates.alone if row.alone else 1.0) / row.seconds
    return found


# --- memory and bytes -----------------------------------------------------------------------------


def has_memory(step: Step) -> bool:
    """Whether the memory of a layout is estimated; with CUDA graphs of a pipeline it is not."""
    return not (step.layout.graphs and step.layout.pp > 1)


def peaks_in_optimizer(step: Step) -> bool:
    """Whether the peak that torch's allocator counts is in the optimizer.

    It does not count the memory of CUDA graphs. But in the first step of a phase layers run without
    graphs, when the optimizer's state exists.
    """
    return step.layout.graphs and "--fp4-bf16-after" not in PLAIN.get(step.name, [])


def peak(step: Step) -> float:
    """The estimated peak memory in GiB, as torch's allocator counts it.

    The memory of a calibration of Q-Ramping is left out, since no step was measured during one.
    """
    found, in_optimizer = [], peaks_in_optimizer(step)
    for stage in stages(step.model, step.layout):
        each = memory(step.model, step.layout, step.recipe, MEASURED.target, stage)
        adam = adam_bytes(step.model, step.layout, stage)
        counted = each.state + adam if in_optimizer else each.total
        found.append(counted - calibration(step.model, step.layout, step.recipe, stage))
    return max(found) / GIB


def sent(step: Step) -> dict[str, float]:
    """The estimated bytes of a step by kind of collective: the most that any rank sends."""
    found: dict[str, float] = {}
    for work in work_of(step.model, step.layout, step.recipe, MEASURED):
        micro = [*work.micro.forward.sent, *work.micro.backward.sent]
        mine: dict[str, float] = {}
        for each in [*(s.times(step.layout.microbatches) for s in micro), *work.sent_once]:
            mine[each.kind] = mine.get(each.kind, 0.0) + each.sent
        for kind, size in mine.items():
            found[kind] = max(found.get(kind, 0.0), size)
    return found


# --- tables ---------------------------------------------------------------------------------------


def tables(rows: list[Row]) -> list[list[str]]:
    """The steps as Markdown tables: of the present kernels, and with torch's."""
    found = [row for row in rows if "layout" in row]
    return [_table([row for row in found if row["file"] in group]) for group in (CURRENT, BY_TORCH)]


def _table(rows: list[Row]) -> list[str]:
    head = ["result", "layout", "recipe", "ms measured", "estimated", "left out"]
    head += ["GiB measured", "estimated"]
    body = []
    for row in rows:
        cells = [row["file"], row["layout"], row["name"], f"{row['measured ms']:.0f}"]
        cells += [f"{row['fitted']:.2f}", f"{row['left out']:.2f}"]
        cells += [f"{row['peak GiB']:.1f}", f"{row['memory']:.3f}" if "memory" in row else ""]
        body.append(cells)
    return pages.table(head, body)


def summary(rows: list[Row]) -> list[str]:
    """The errors of kinds of rows as a Markdown table."""
    body = []
    for name, is_one in KINDS.items():
        errors = [abs(row["left out"] - 1) for row in rows if is_one(row) and "left out" in row]
        cells = [name, str(len(errors)), f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"]
        body.append(cells)
    return pages.table(["rows", "number", "median error", "largest"], body)


def _waits_for_python(row: Row) -> bool:
    """Whether linears ran in Python, where the GPUs may wait for the host. They run in C++ now."""
    in_python = row["file"].startswith("parallel_step")
    return in_python and row.get("layout", "")[:2] == "tp" and row["name"] in ("bf16", "tetrajet")


def _waits_for_hosts(row: Row) -> bool:
    """Whether GPUs wait for the host in the present steps: each collective for the slowest."""
    captured = "graph" in row["name"]
    return row["file"] in CURRENT and row.get("layout", "")[:3] == "tp4" and not captured


def _in(files: tuple[str, ...], alone: bool | None = None) -> Callable[[Row], bool]:
    """Whether a row is of these files, and of one GPU (`alone`) or of several."""

    def is_one(row: Row) -> bool:
        if row["file"] not in files or _waits_for_python(row):
            return False
        return alone is None or alone == (row["layout"] == "one")

    return is_one


KINDS: dict[str, Callable[[Row], bool]] = {
    "steps on one GPU": _in(CURRENT, True),
    "steps on 2 or 4 GPUs": lambda row: _in(CURRENT, False)(row) and not _waits_for_hosts(row),
    "TP4 without CUDA graphs": _waits_for_hosts,
    "steps with torch's kernels, on one GPU": _in(BY_TORCH, True),
    "steps with torch's kernels, on 2 or 4 GPUs": _in(BY_TORCH, False),
    "steps of other commits": _in(OTHERS),
    "steps of each recipe": _in(EACH_RECIPE),
    "TP with linears in Python": _waits_for_python,
    "linears": lambda row: " × " in row["name"] and row["file"] in (*LINEARS, "peers"),
    "MLPs": _in(("mlp",)),
    "quantize kernels": lambda row: row["file"] == KERNELS or "to " in row["name"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/estimate_error.json")
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    found = rows()
    args.out.write_text(json.dumps({"stamp": stamp(), "rows": found}, indent=1) + "\n")
    for lines in (*tables(found), summary(found)):
        print("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
