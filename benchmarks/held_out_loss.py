"""Compares the held-out loss of every recipe with BF16's, on real text, in Megatron's own loop.

    python -m benchmarks.held_out_loss [--steps 300] [--seeds 3] [--model small]

The text is the demo's (the Python standard library's sources, held out by file). A sweep with one
seed finds the learning rate that is best for BF16; all runs use it. Each run is evaluated twice at
its end: with the forward pass with which it was trained, and with BF16's. There is one run at a
time on each GPU, or without a GPU one on the CPU.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpus import visible_gpus
from megatron_fp4 import list_recipes
from megatron_fp4.mcore.data import prepare_data
from tools import pages, runs
from tools.stamp import stamp, write

MODELS = {
    "tiny": (runs.Model(), runs.Training(steps=0)),
    "small": (
        runs.Model(layers=8, hidden=512, ffn=1536, heads=8, query_groups=4, sequence=512),
        runs.Training(steps=0, batch=16, learning_rate=1e-3, evaluations=1, held_out_batches=15),
    ),
}
WORK = Path("runs/held_out_loss")


@dataclass(frozen=True)
class Job:
    """One run: a recipe, perhaps with options ("dge-occ,occ=false"), or "bf16"."""

    recipe: str
    seed: int
    learning_rate: float

    def flags(self) -> list[str]:
        """The flags, Megatron's and this package's, in which this run differs from the others."""
        return runs.recipe_flags(self.recipe)


def study(args: argparse.Namespace) -> dict[str, Any]:
    """The whole result: settings, stamp, the sweep, and each recipe's losses, seed by seed."""
    manifest = prepare_data.prepare([], WORK / "data", prepare_data.Options())
    devices: queue.Queue[str] = queue.Queue()
    for gpu in visible_gpus() or ("",):
        devices.put(gpu)
    with ThreadPoolExecutor(devices.qsize()) as pool:
        run = partial(one, args=args, devices=devices)
        # The best rate for BF16, so that no recipe has an advantage by a better learning rate.
        sweep = [Job("bf16", 0, rate) for rate in args.learning_rates]
        swept = [found["trained forward"] for found in pool.map(run, sweep)]
        rate = min(zip(swept, args.learning_rates, strict=True))[1]
        jobs = [Job(recipe, s, rate) for s in range(args.seeds) for recipe in args.recipes]
        losses = list(pool.map(run, jobs))
    results: dict[str, Any] = {recipe: {} for recipe in args.recipes}
    for job, loss in zip(jobs, losses, strict=True):
        for kind, value in loss.items():
            results[job.recipe].setdefault(kind, []).append(value)
    model, training = MODELS[args.model]
    settings = {"steps": args.steps, "seeds": args.seeds, "learning_rate": rate}
    return {
        "what": "held-out loss (nats a token) after training on real text",
        "stamp": stamp(args.commit),
        "model": asdict(model),
        "training": asdict(training) | settings,
        "bf16_by_learning_rate": dict(zip(map(str, args.learning_rates), swept, strict=True)),
        "data": manifest,
        "results": results,
        "table": table(results),
    }


def one(job: Job, args: argparse.Namespace, devices: Any) -> dict[str, float]:
    """Trains one run and evaluates it; returns its held-out losses and "ms a step".

    "trained forward" is the loss with the forward pass of the training. A recipe is also evaluated
    with a BF16 forward pass. devices: a queue of GPUs, of which the run takes one.
    """
    model, training = MODELS[args.model]
    where = WORK / f"{job.recipe}-{job.learning_rate:g}-{job.seed}"
    settings = {"steps": args.steps, "seed": 1234 + job.seed, "learning_rate": job.learning_rate}
    flags = [
        *model.flags(),
        *runs.Training(**asdict(training) | settings).flags(),
        *runs.data_flags(WORK / "data"),
        *job.flags(),
    ]
    save = ["--save", str(where), "--save-interval", str(args.steps), "--no-save-optim"]
    load = ["--load", str(where), "--skip-train", "--fp4-eval-forward", "bf16"]
    load += ["--no-load-optim", "--no-load-rng"]
    device = devices.get()
    run = partial(runs.run, environment={"CUDA_VISIBLE_DEVICES": device, "OMP_NUM_THREADS": "1"})
    try:
        trained = run(runs.launch(1, flags + save), where / "train.log")
        losses = {"trained forward": trained.held_out[-1][1], "ms a step": trained.milliseconds}
        if job.recipe != "bf16":
            again = run(runs.launch(1, flags + load), where / "evaluate.log")
            losses["BF16 forward"] = again.held_out[-1][1]
    finally:
        devices.put(device)
    print(f"{job}: {losses}", file=sys.stderr, flush=True)
    return losses


def table(results: dict[str, Any]) -> list[str]:
    """The result as a Markdown table: means over the seeds, and differences from BF16 seed by
    seed with their standard errors."""
    base = results["bf16"]["trained forward"]
    head = ["recipe", "held-out loss, trained forward", "minus BF16", "held-out loss, BF16 forward"]
    body = []
    for recipe, found in results.items():
        own = found["trained forward"]
        gaps = [a - b for a, b in zip(own, base, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        plain = found.get("BF16 forward", own)
        gap = f"{statistics.mean(gaps):+.4f} ± {error:.4f}"
        body.append([recipe, f"{statistics.mean(own):.4f}", gap, f"{statistics.mean(plain):.4f}"])
    return pages.table(head, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--recipes", nargs="+", default=["bf16", *list_recipes()])
    rates = [2.5e-4, 5e-4, 1e-3, 2e-3]
    parser.add_argument("--learning-rates", nargs="+", type=float, default=rates)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/held_out_loss.json"))
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    result = study(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write(args.out, result)


if __name__ == "__main__":
    main()
