"""Held-out loss of every recipe beside BF16's, through Megatron's own loop, on real text.

    python -m benchmarks.held_out_loss [--steps 300] [--seeds 3] [--model small]

The text is the demo's (the Python standard library's sources, held out by file). Each run is
evaluated twice at its end: with the forward pass that it trained with, and with BF16's. Runs go
side by side, one on each GPU; without a GPU one after the other on the CPU.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.stamp import stamp
from megatron_fp4 import list_recipes
from tools import prepare_data, runs

MODELS = {
    "tiny": (runs.Model(), runs.Training(steps=0)),
    "small": (
        runs.Model(layers=8, hidden=512, ffn=1536, heads=8, query_groups=4, sequence=512),
        runs.Training(steps=0, batch=16, learning_rate=1e-3, evaluations=1, held_out_batches=15),
    ),
}
WORK = Path("runs/held_out_loss")


def study(args: argparse.Namespace) -> dict[str, Any]:
    """The whole result: settings, stamp, and for each recipe its losses, seed by seed."""
    manifest = prepare_data.prepare([], WORK / "data", prepare_data.Options())
    devices: queue.Queue[str] = queue.Queue()
    for index in range(torch.cuda.device_count()) or [""]:
        devices.put(str(index))
    jobs = [(recipe, seed) for seed in range(args.seeds) for recipe in args.recipes]
    with ThreadPoolExecutor(devices.qsize()) as pool:
        losses = list(pool.map(lambda job: one(*job, args, devices), jobs))
    results: dict[str, Any] = {recipe: {} for recipe in args.recipes}
    for (recipe, seed), loss in zip(jobs, losses, strict=True):
        for kind, value in loss.items():
            results[recipe].setdefault(kind, []).append(value)
    model, training = MODELS[args.model]
    return {
        "what": "held-out loss (nats a token) after training on real text",
        "stamp": stamp(args.commit),
        "model": asdict(model),
        "training": asdict(training) | {"steps": args.steps, "seeds": args.seeds},
        "data": manifest,
        "results": results,
        "table": table(results),
    }


def one(recipe: str, seed: int, args: argparse.Namespace, devices: Any) -> dict[str, float]:
    """Trains one run and evaluates it; the loss with its own forward pass and with BF16's."""
    model, training = MODELS[args.model]
    where = WORK / f"{recipe}-{seed}"
    fields = asdict(training) | {"steps": args.steps, "seed": 1234 + seed}
    flags = [
        *model.flags(),
        *runs.Training(**fields).flags(),
        *runs.data_flags(WORK / "data"),
        *([] if recipe == "bf16" else ["--fp4-recipe", recipe]),
    ]
    save = ["--save", str(where), "--save-interval", str(args.steps), "--no-save-optim"]
    load = ["--load", str(where), "--skip-train", "--fp4-eval-forward", "bf16"]
    load += ["--no-load-optim", "--no-load-rng"]
    device = devices.get()
    environment = {"CUDA_VISIBLE_DEVICES": device, "OMP_NUM_THREADS": "1"}
    try:
        command = runs.launch(1, flags + save)
        trained = runs.run(command, where / "train.log", environment=environment)
        losses = {"trained forward": trained.held_out[-1][1], "ms a step": trained.milliseconds}
        if recipe != "bf16":
            command = runs.launch(1, flags + load)
            again = runs.run(command, where / "evaluate.log", environment=environment)
            losses["BF16 forward"] = again.held_out[-1][1]
    finally:
        devices.put(device)
    print(f"{recipe:14} seed {seed}: {losses}", file=sys.stderr, flush=True)
    return losses


def table(results: dict[str, Any]) -> list[str]:
    """The result as a Markdown table: means over the seeds, and differences from BF16 seed by
    seed with their standard errors."""
    base = results["bf16"]["trained forward"]
    lines = [
        "| recipe | held-out loss, trained forward | minus BF16 | held-out loss, BF16 forward |",
        "|---|---|---|---|",
    ]
    for recipe, found in results.items():
        own = found["trained forward"]
        gaps = [a - b for a, b in zip(own, base, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        plain = found.get("BF16 forward", own)
        lines.append(
            f"| {recipe} | {statistics.mean(own):.4f} | {statistics.mean(gaps):+.4f} ± {error:.4f} "
            f"| {statistics.mean(plain):.4f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--recipes", nargs="+", default=["bf16", *list_recipes()])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/held_out_loss.json"))
    parser.add_argument("--commit", help="where the tree has no git of its own")
    result = study(parser.parse_args())
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(result["table"]))


if __name__ == "__main__":
    main()
