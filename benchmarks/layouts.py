"""Checks the statements of docs/numerics.md for every layout and recipe.

The first step of each layout is compared with that of one process, and a run with recomputed
activations and a resumed run with a plain run.

    python -m benchmarks.layouts [--layouts tp2 pp2] [--processes 2]

Prints a line for each layout, model and recipe, writes all figures, and exits with status 1 if a
statement does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from testing.layouts.matrix import LAYOUTS, MODES, ONE, Row, chosen, holds, run_layout, run_one
from tools import pages
from tools.stamp import stamp

# The default result: on a CPU, of all layouts that this many processes can run.
RESULT, PROCESSES = Path("benchmarks/results/layouts.json"), 4
OTHER = Path("runs/layouts.json")


def study(names: list[str], folder: Path, at_once: int) -> Iterator[list[Row]]:
    """Runs the layouts `names`, and yields the rows of each, with the key "holds" added.

    Each row is also printed. folder: where processes write their steps. at_once: the number of
    layouts that run at the same time.
    """
    run_one(names, folder)
    with ThreadPoolExecutor(at_once) as pool:
        for found in pool.map(partial(rows_of, folder=folder), names):
            rows = [row | {"holds": row["mode"] != "none" and holds(row)} for row in found]
            for row in rows:
                print(line(row), flush=True)
            yield rows


def rows_of(name: str, folder: Path) -> list[Row]:
    """The rows of a layout; one row without figures if its world failed."""
    try:
        return run_layout(name, folder)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return [{"layout": name, "model": "", "recipe": "", "mode": "none", "figures": {}}]


def line(row: Row) -> str:
    names = f"{row['layout']:<16} {row['model']:<12} {row['recipe']:<25} {row['mode']:<9}"
    figures = ", ".join(f"{name} {value:.3g}" for name, value in row["figures"].items() if value)
    return f"{names} {'holds' if row['holds'] else 'FAILS'}  {figures}"


def table(rows: list[Row]) -> list[str]:
    """The result as a Markdown table, a line for each layout, model and recipe."""
    heads = ["layout", "model", "recipe", "codes", *_TOLD, *MODES[1:]]
    body = []
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row["mode"] in MODES:
            who = row["layout"], row["model"], row["recipe"]
            found.setdefault(who, {})[row["mode"]] = row
    for names, modes in found.items():
        fresh = modes["fresh"]["figures"] if "fresh" in modes else {}
        codes = modes["resumed"]["figures"]["codes"]
        told = [_figure(fresh.get(figure)) for figure in _TOLD.values()]
        exact = ["same" if modes[mode]["holds"] else "DIFFERS" for mode in MODES[1:]]
        body.append([*names, f"{codes:,}", *told, *exact])
    return pages.table(heads, body)


# The figure under each heading of the table. A prefix in a heading ("float64:") begins the columns
# of one comparison.
_TOLD = {
    "float64: others": "differing codes",
    "loss": "loss",
    "gradients": "gradients",
    "same inputs: others": "same inputs differing codes",
    "its loss": "same inputs loss",
    "its gradients": "same inputs gradients",
    "float32: others": "float32 differing codes",
    "float32 loss": "float32 loss",
}


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) or not value else f"{value:.0e}"


def write(rows: list[Row], out: Path, stamped: dict[str, Any]) -> None:
    """Writes the result so far, so that a long run that is stopped leaves what it has."""
    result: dict[str, Any] = {
        "what": "layouts against one process, recomputed, and resumed",
        "stamp": stamped,
        "rows": rows,
        "table": table(rows),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    processes = torch.cuda.device_count() or PROCESSES
    parser.add_argument("--layouts", nargs="+", choices=[name for name in LAYOUTS if name != ONE])
    parser.add_argument("--processes", type=int, default=processes, help="of a layout, at most")
    parser.add_argument("--at-once", type=int, default=1, help="layouts side by side")
    parser.add_argument(
        "--out", type=Path, help=f"default: {RESULT}; of others, or on GPUs, {OTHER}"
    )
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    names = chosen(args.layouts or (), args.processes)
    if not names:
        sys.exit(f"no layout runs on {args.processes} processes; two is the fewest")
    others = args.layouts or args.processes != PROCESSES or torch.cuda.is_available()
    out = args.out or (OTHER if others else RESULT)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    stamped = stamp(args.commit)  # before its own result changes the tree
    with tempfile.TemporaryDirectory() as folder:
        for found in study(names, Path(folder), args.at_once):
            rows += found
            write(rows, out, stamped)
    failed = [row for row in rows if not row["holds"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} hold")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
