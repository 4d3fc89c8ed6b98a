"""Checks and times this package on the GPU at hand, and writes one JSON to send back.

    python -m benchmarks.first_run

For GPUs on which this package has not run, such as Blackwell; it runs on every NVIDIA GPU. Each
part runs in a process of its own, so that a kernel that crashes or hangs does not affect the
others. docs/how-it-works.md, On other devices, describes it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_run_checks import (
    FORMATS,
    OUTPUTS,
    Output,
    Row,
    asked,
    check_codes,
    check_product,
    codings,
    decoded,
    operands,
    recorded,
)
from benchmarks.linear import bf16, problem, quantized
from benchmarks.timing import medians
from megatron_fp4 import get_recipe
from megatron_fp4.multipliers import MULTIPLIERS
from megatron_fp4.multipliers.base import Multiplier
from megatron_fp4.target import target_of
from tools.stamp import stamp

ROOT = Path(__file__).parents[1]
LIMIT = 1200  # seconds that a part may take
MATRICES = ((192, 320), (1024, 2048))
PRODUCTS = ((256, 512, 1024), (200, 176, 416), (16, 48, 96), (2048, 4096, 4096))  # M, N, K
TIMED = ((8192, 4096, 4096), (8192, 14336, 4096))  # M, N, K
LINEARS = ((4096, 4096), (4096, 14336))  # in, out
RECIPES = ("tetrajet", "mxfp4", "fp8")
COMPARISONS = (
    "mxfp4", "carriers", "block_scales", "row_scales", "averages", "dge_factor", "outlier_clamp",
    "ramping", "low_bit_adamw", "messages", "sent_weights", "swiglu", "rms_norm", "rotary",
    "scaled_product", "quotients",
)  # fmt: skip
GPU = torch.device("cuda", 0)


# --- the parts ------------------------------------------------------------------------------------


def codes(quick: bool) -> list[Row]:
    """A row for each quantizer, its axes and each matrix: how the kernels' codes differ."""
    return [
        recorded(
            partial(check_codes, coding, shape, GPU),
            quantizer=coding.name, axes=coding.axes, group=coding.group, matrix=shape,
        )
        for shape in MATRICES[: 1 if quick else None]
        for coding in codings()
    ]  # fmt: skip


def comparison(name: str, quick: bool) -> list[Row]:
    """The row of testing/kernels/compare_<name>.py: its lines, for difficult values."""

    def check() -> Row:
        module = importlib.import_module(f"testing.kernels.compare_{name}")
        lines = [line for line in module.differences("cuda") if line]
        return {"different": lines, "right": not lines}

    return [recorded(check, comparison=name)]


def products(multiplier: Multiplier, quick: bool) -> list[Row]:
    """A row for each format and output: errors and times of `multiplier`, or why it refuses."""
    rows = []
    for form in FORMATS:
        for name, output in OUTPUTS.items():
            about = {"multiplier": multiplier.name, "format": form, "output": name}
            check = partial(check_product, multiplier, form, output)
            rows.append(recorded(partial(check, PRODUCTS[: 3 if quick else None], GPU), **about))
            if "errors" not in rows[-1]:
                continue
            for shape in TIMED[: 1 if quick else None]:
                if multiplier.refuses(asked(form, output, shape), target_of(GPU)) is None:
                    time = partial(time_product, multiplier, form, output, shape)
                    rows.append(recorded(time, **about, shape=shape))
    return rows


def time_product(
    multiplier: Multiplier, form: str, output: Output, shape: tuple[int, int, int]
) -> Row:
    """The time of a product beside that of BF16's with the same output, in turns."""
    m, n, k = shape
    a, b = decoded(multiplier, *operands(form, shape, GPU))
    x, w = (torch.randn(rows, k, device=GPU).bfloat16() for rows in (m, n))
    sums = torch.zeros(m, n, device=GPU)
    into = sums if output.adds else None

    def plain() -> None:
        if output.adds:
            torch.addmm(sums, x, w.t(), out_dtype=torch.float32, out=sums)
        else:
            torch.mm(x, w.t(), out_dtype=output.dtype)

    def product() -> None:
        multiplier.multiply(a, b, output.correction, output.dtype, into)

    return in_turns(plain, product)


def linears(recipe: str, quick: bool) -> list[Row]:
    """A row for each shape: the time of forward and backward of a whole linear, beside BF16's."""

    def check(inputs: int, outputs: int) -> Row:
        p = problem(inputs, outputs)
        return in_turns(bf16(p), quantized(p, get_recipe(recipe)))

    return [
        recorded(partial(check, *shape), recipe=recipe, shape=shape)
        for shape in LINEARS[: 1 if quick else None]
    ]


def in_turns(plain: Callable[[], None], other: Callable[[], None]) -> Row:
    """The median times of both calls, and how many times as fast `other` is."""
    taken = medians({"bf16": plain, "this": other}, each=3)
    ms = {name: seconds * 1e3 for name, seconds in taken.items()}
    return {"bf16 ms": ms["bf16"], "ms": ms["this"], "times bf16": ms["bf16"] / ms["this"]}


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "codes": codes,
    **{f"comparison:{name}": partial(comparison, name) for name in COMPARISONS},
    **{f"products:{each.name}": partial(products, each) for each in MULTIPLIERS},
    **{f"linear:{name}": partial(linears, name) for name in RECIPES},
}


def in_process(part: str, quick: bool, limit: float = LIMIT) -> list[Row]:
    """The rows of a part, run in a process of its own; if that fails, a row with the reason."""
    command = [sys.executable, "-m", "benchmarks.first_run", "--part", part]
    command += ["--quick"] if quick else []
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [{"part": part, "raised": f"no result in {limit:g} seconds"}]
    for line in done.stdout.splitlines():
        if line.startswith("result: "):
            rows: list[Row] = json.loads(line.removeprefix("result: "))
            return rows
    told = f"the process ended with status {done.returncode}"
    return [{"part": part, "raised": told, "output": (done.stdout + done.stderr)[-3000:]}]


# --- the file -------------------------------------------------------------------------------------


def device(commit: str | None) -> Row:
    """The stamp of a result, and what else tells one GPU and its software from another."""
    packages: dict[str, str] = {}
    for name in ("transformer-engine", "ml_dtypes"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    query = "--query-gpu=name,driver_version,power.limit,memory.total"

    def driver() -> Row:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {"said": said.strip().splitlines()}

    return {
        **stamp(commit),
        **packages,
        "capability": list(torch.cuda.get_device_capability(GPU)),
        "cuda of torch": torch.version.cuda,
        "nvidia-smi": recorded(driver),
    }


def failures(parts: Mapping[str, list[Row]]) -> dict[str, int]:
    """The number of rows of each part that raised or are wrong; parts without any are left out."""
    counts = {
        part: sum("raised" in row or row.get("right") is False for row in rows)
        for part, rows in parts.items()
    }
    return {part: count for part, count in counts.items() if count}


def summary(result: Row, out: Path) -> str:
    """One paragraph on what was found, what to send back, and where."""
    parts: dict[str, list[Row]] = result["parts"]
    rows = [row for some in parts.values() for row in some]
    checked = [row for row in rows if "right" in row]
    wrong = failures(parts)
    right = sum(row["right"] for row in checked)
    words = [f"On {', '.join(result['stamp']['device'])}, {right} of {len(checked)} checks hold."]
    usable = {row["multiplier"] for row in checked if "multiplier" in row and row["right"]}
    words.append(f"Multipliers with correct products: {', '.join(sorted(usable)) or 'none'}.")
    if wrong:
        told = ", ".join(f"{part} ({count})" for part, count in wrong.items())
        words.append(f"Rows that raised or are wrong: {told}.")
    for row in rows:
        if "recipe" in row and "times bf16" in row:
            size = " x ".join(map(str, row["shape"]))
            words.append(f"A linear of {size} in {row['recipe']}: {row['times bf16']:.2f} x BF16.")
    words.append(f"Please send {out} as it is, attached to an issue of this project's repository.")
    return " ".join(words)


def collect(
    stamped: Row, out: Path, run: Callable[[str], list[Row]], parts: Mapping[str, Any] = PARTS
) -> Row:
    """All parts by `run`, as they are written to `out` after each of them."""
    result: Row = {"stamp": stamped, "parts": {}}
    for part in parts:
        result["parts"][part] = run(part)
        out.write_text(json.dumps(result, indent=1) + "\n")  # what is measured so far
        print(f"{part}: {len(result['parts'][part])} rows", flush=True)
    result["summary"] = summary(result, out)
    out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("first_run.json"))
    parser.add_argument(
        "--quick", action="store_true", help="fewer shapes and no comparisons of variants"
    )
    parser.add_argument("--part", choices=PARTS, help="print the rows of one part as JSON")
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the first run needs an NVIDIA GPU, and this machine shows none")
    if args.part:
        print("result: " + json.dumps(PARTS[args.part](args.quick)))
        return
    # The comparisons compile every variant of the kernels, which takes most of the time.
    parts = {name: PARTS[name] for name in PARTS if not (args.quick and "comparison:" in name)}
    result = collect(device(args.commit), args.out, partial(in_process, quick=args.quick), parts)
    print(result["summary"])


if __name__ == "__main__":
    main()
