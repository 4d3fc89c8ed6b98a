"""Times a training step in Megatron's loop, in BF16 and in each recipe, on one GPU.

    python -m benchmarks.training_step

LLaMA-8B-shaped layers (hidden 4,096, SwiGLU of 14,336, 32 heads over 8 groups), sequences of 4,096,
mock data, as pretrain_gpt.py trains them. There are five BF16 rows. "upstream bf16" is Megatron
without this package, which without Apex does not add dW to main_grad in the GEMM. "bf16" is this
package's linear after a recipe's return to BF16, which adds dW to main_grad in the GEMM. "upstream
bf16, graphs" and "bf16, graphs" are the same with Megatron's CUDA graphs. "te bf16" is Megatron
without this package with the layers of Transformer Engine. Ratios are to the fastest BF16 row that
was measured.

In all rows but those of Transformer Engine attention is SDPA, and the kernels outside the linears
are the same: Liger-Kernel's, where it is installed, this package's for rotary embedding, and
torch's fused AdamW (--fp4-fused-kernels). Those of Transformer Engine are "te bf16", "te fp8 ..."
with its FP8 recipes, and recipes with --transformer-impl transformer_engine, whose linears are this
package's. In "te ..." dW is added to main_grad in the GEMM, as with Apex (stand_ins/). Where
Transformer Engine is installed, Megatron takes the optimizer from it in every row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import te
from megatron_fp4.recipes import uniform_recipes
from tools import pages
from tools.stamp import resumed, stamp

ROOT = Path(__file__).parents[1]
SEQUENCE = 4096
DATA = """
    --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 1000
    --log-interval 1 --eval-interval 1000 --eval-iters 0
""".split()
MODEL = f"""
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --normalization RMSNorm --swiglu --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0
    --hidden-dropout 0 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --bf16
""".split()
CAPTURED = ["--cuda-graph-impl", "local"]
BF16 = ["--fp4-recipe", "mxfp4", "--fp4-bf16-after", "1e-9"]
PLAIN: dict[str, list[str]] = {
    "upstream bf16": [],
    "bf16": BF16,
    "upstream bf16, graphs": CAPTURED,
    "bf16, graphs": [*BF16, *CAPTURED],
    te.BF16: te.flags(te.BF16),
}
# Megatron's defaults, but where Transformer Engine is installed.
LOCAL = ["--transformer-impl", "local", "--no-rope-fusion"]
DECODED = "tetrajet --fp4-weight-cache decoded"
GRAPHS = f"tetrajet {' '.join(CAPTURED)}"
TE_LAYERS = f"tetrajet {' '.join(te.LAYERS)}"
# The number of steps, and of warm-up steps at the start, which are not timed. The step after the
# warm-up is profiled. Bytes are counted in the last step. These two are not timed either.
STEPS, WARM = 8, 3
# In lines of the start table, which say that what is timed is slower than what a row says.
OTHERWISE = ("run in Python", "attention does not run in cuDNN's kernels")


def measure(
    name: str, flags: list[str], processes: int = 1, gpus: str | None = None
) -> dict[str, Any]:
    """The milliseconds of a step, its losses, and what training_step_worker.py found on each rank.

    name: of the row. flags: Megatron's. gpus: the GPUs to run on, as in CUDA_VISIBLE_DEVICES.
    Raises RuntimeError with the last output of a failed run.
    """
    output, found = launched(name, flags, processes, gpus)
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]
    return {"name": name, "ms": statistics.median(timed(output)), "losses": losses, "ranks": found}


def timed(output: str) -> list[float]:
    """The milliseconds of the steps that are timed, from Megatron's log."""
    told = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", output)
    return [float(ms) for ms in told[WARM + 1 : -1]]


def launched(
    name: str,
    flags: list[str],
    processes: int = 1,
    gpus: str | None = None,
    steps: int = STEPS,
    worker: str = "training_step_worker",
    profiled: int = WARM,
    model: list[str] = MODEL,
) -> tuple[str, list[dict[str, Any]]]:
    """Megatron's output, and what the worker found on each rank; see `measure`.

    worker: training_step_worker.py, or a module that runs it. profiled: the number of the step that
    is profiled, from 0; -1: none. What the host launches after it seems to take longer.
    model: the flags of the model.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", f"benchmarks.{worker}"]
    command += [*model, *DATA, "--train-iters", str(steps), *flags]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "FOUND": folder}
        # pretrain.py sets it too, but only after the worker has initialized CUDA.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        environment |= {"PROFILED_STEP": str(profiled), "COUNTED_STEP": str(steps - 1)}
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            said = (done.stdout + done.stderr).splitlines()
            own = [line for line in said if line.startswith(("[rank", "megatron-fp4: error"))]
            raise RuntimeError("\n".join([f"{name} failed:", *(own or said)[-30:]]))
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(processes)]
    for line in (done.stdout + done.stderr).splitlines():
        if any(words in line for words in OTHERWISE):
            print(f"{name}: {line.strip()}", file=sys.stderr, flush=True)
    return done.stdout, found


def asked(name: str) -> list[str]:
    """Megatron's flags for a row.

    name: of the row: one without FP4 (PLAIN), one of Transformer Engine's FP8 (te.FP8), or a
    recipe, which the whole training follows; with or without further flags (te.row_and_flags).
    """
    row, further = te.row_and_flags(name)
    if row in te.FP8:
        flags = te.flags(row)
    else:
        flags = PLAIN.get(row, ["--fp4-recipe", *row.split()])
    flags = [*flags, *further]
    return [*flags, *te.FUSED] if "--transformer-impl" in flags else [*LOCAL, *flags]


def study(names: list[str], layers: int, micro: int, batch: int) -> Iterator[dict[str, Any]]:
    """Measures a training step for each name (`asked`), and yields a row with the result.

    A launch that fails is reported, and has no row.
    layers: of the model. micro, batch: sequences in a microbatch and in a step.
    """
    flags = ["--num-layers", str(layers), "--micro-batch-size", str(micro)]
    flags += ["--global-batch-size", str(batch)]
    for name in names:
        try:
            row = measure(name, flags + asked(name))
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            continue
        (alone,) = row.pop("ranks")
        yield row | alone | {"tokens/s": batch * SEQUENCE / row["ms"] * 1e3}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table."""
    kinds = ("gemm", "quantize", "carry", "attention", "optimizer")
    head = ["recipe", "ms a step", "tokens/s", "speedup", "peak GiB"]
    body = []
    for row in rows:
        cells = [row["name"], f"{row['ms']:.0f}", f"{row['tokens/s']:.0f}", f"{row['ratio']:.2f}"]
        cells.append(f"{row['peak_gib']:.1f}")
        spent = row["gpu_ms"]
        cells += [f"{spent.get(kind, 0):.0f}" for kind in kinds]
        cells.append(f"{sum(spent.values()) - sum(spent.get(kind, 0) for kind in kinds):.0f}")
        body.append(cells)
    return pages.table([*head, *kinds, "other"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path("benchmarks/results/training_step.json")
    parser.add_argument("--out", type=Path, default=default)
    everything = [*PLAIN, *uniform_recipes(), DECODED, GRAPHS, TE_LAYERS, *te.FP8]
    parser.add_argument("--recipes", nargs="+", default=everything)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has")
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    result = {
        "stamp": stamp(args.commit),
        "layers": args.layers,
        "micro-batch": args.micro_batch,
        "batch": args.batch,
        "rows": rows,
    }
    if args.resume:
        rows += resumed(args.out, result)
    found = [row["name"] for row in rows]
    names = te.present([name for name in args.recipes if name not in found])
    for row in study(names, args.layers, args.micro_batch, args.batch):
        rows.append(row)
        bf16 = max((r["tokens/s"] for r in rows if r["name"] in PLAIN), default=row["tokens/s"])
        for each in rows:
            each["ratio"] = each["tokens/s"] / bf16
        args.out.write_text(json.dumps(result, indent=1) + "\n")  # what is measured so far
        print("\n".join(table(rows)), flush=True)
    if missing := set(names) - {row["name"] for row in rows}:
        sys.exit(f"no result of {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
