r"""Compares other packages with this one on one GPU: linears, forward and backward, and quantizers.

    SKIP_CUDA_BUILD=1 FORCE_BUILD=1 pip install --no-deps --no-build-isolation --target DIR \
        torchao==0.18.0 fouroversix==1.0.5 qwantize==0.1.1
    PYTHONPATH=DIR python -m benchmarks.peers

fouroversix imports transformers; its kernels for Blackwell are not built here. nvidia-modelopt has
many requirements, and is measured only if it is installed.

The linear has 8,192 tokens in BF16, as in linear.py: X and dY are given, and every operand that is
quantized is quantized in every step, W too. Each linear is timed alternately with BF16, in a
process of its own, in CUDA graphs. "eager" marks one that cannot be captured because it waits for
the GPU; the host launches its kernels. No two linears compute the same, so the table says what each
does. Quantizers quantize one BF16 matrix along its rows. GB/s counts 16 bits read and the format's
bits written for each element, whatever is really moved. "Equal" is the share of elements whose code
and scale are equal to this package's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.linear import SHAPES, TOKENS
from benchmarks.peers_worker import LINEARS, QUANTIZERS, SIDE
from tools import pages
from tools.stamp import resumed, stamp

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
ABSENT = {"microxcaling": "not on the package index"}  # packages that have no rows, and why


def row_of(name: str, *options: str) -> Row:
    """The row of another package's linear or quantizer: its figures, or why there are none."""
    peer = LINEARS.get(name) or QUANTIZERS[name]
    row: Row = {"name": name, "package": peer.package, "operation": peer.operation}
    try:
        row["version"] = version(peer.package) if peer.package else ""
    except PackageNotFoundError:
        return row | {"absent": "not installed"}
    for more, how in (((), "graphs"), (("--eager",), "eager")):
        command = [sys.executable, "-m", "benchmarks.peers_worker", name, *options, *more]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            return row | {"raises": "nothing, for five minutes"}
        lines = (done.stdout + done.stderr).splitlines()
        for line in lines:
            if line.startswith("result: "):
                return row | {"timed": how, "found": json.loads(line.removeprefix("result: "))}
        told = [line for line in lines if line.startswith("error: ")] or lines or ["nothing"]
    return row | {"raises": told[-1].removeprefix("error: ")}


def table(rows: list[Row]) -> list[str]:
    """The result as two Markdown tables: linears, then quantizers."""
    shapes = [f"{inputs} × {outputs}" for inputs, outputs in SHAPES]
    linears, quantizers = [], []
    for row in rows:
        if row["name"] not in QUANTIZERS:
            cells = [f"{one['ms']:.2f} ms, {one['ratio']:.2f}×" for one in row.get("found", [])]
            linears.append(_cells(row, cells, len(shapes)))
        else:
            cells = []
            for one in row.get("found", []):
                share = "" if one["equal"] is None else f"{one['equal']:.4f}"
                cells = [f"{one['us']:.1f}", f"{one['GB/s']:.0f}", share]
            quantizers.append(_cells(row, cells, 3))
    head = ["quantizer", "version", "operation", "µs", "GB/s", "equal"]
    first = pages.table(["linear", "version", "operation", *shapes], linears)
    return [*first, "", *pages.table(head, quantizers)]


def _cells(row: Row, figures: list[str], places: int) -> list[str]:
    notes = [f"{key}: {row[key]}".replace("|", "/") for key in ("raises", "absent") if key in row]
    what = "; ".join([row["operation"]] * bool(row["operation"]) + notes)
    what += "; eager" if row.get("timed") == "eager" else ""
    figures = figures + [""] * (places - len(figures))
    return [row["name"], row.get("version", ""), what, *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/peers.json"))
    everything = [*LINEARS, *QUANTIZERS]
    parser.add_argument("--only", nargs="+", choices=everything, default=everything)
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("peers are timed on a GPU, and this machine shows none")
    rows = [{"name": name, "operation": "", "absent": reason} for name, reason in ABSENT.items()]
    result = {"stamp": stamp(args.commit), "tokens": TOKENS, "side": SIDE, "rows": rows}
    if args.resume:
        rows[:] = resumed(args.out, result) or rows
    measured = {row["name"] for row in rows}
    for name in [name for name in args.only if name not in measured]:
        rows.insert(-len(ABSENT), row_of(name))
        print(json.dumps(rows[-1 - len(ABSENT)]), flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")  # what is measured so far
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
