"""Trains the ViT of examples/vit by every recipe: accuracy and oscillation over seeds and folds.

    python -m benchmarks.vit [--steps 300] [--seeds 5] [--processes 1]

Seed i holds out fold i of as many folds as there are seeds, so that together the runs of a recipe
evaluate each digit once, on a model that has not seen it. All recipes have the same seeds, folds,
initial weights and batches. A result that was interrupted is taken up again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fp4.metrics.weights import WINDOW
from tools import pages, runs
from tools.stamp import resumed, stamp

ROOT = Path(__file__).resolve().parents[1]
WORK = Path("runs/vit")
# A recipe, perhaps with options: recipe,option=value. The default average of tetrajet-ema has a
# half-life longer than a short training, and the default interval of tetrajet-ramping is longer
# than that too.
RECIPES = (
    "bf16",
    "mxfp4",
    "tetrajet",
    "tetrajet-ema",
    "tetrajet-ema,ema_share=0.02",
    "tetrajet-ramping,ramping_interval_share=0.25",
)
FIRST_SEED = 1234


@dataclass(frozen=True)
class Job:
    """One run. recipe: as in RECIPES. seed: of weights, batches and rounding. fold: held out."""

    recipe: str
    seed: int
    fold: int

    def flags(self) -> list[str]:
        """The flags in which this run differs from the others."""
        recipe = runs.recipe_flags(self.recipe)
        return [*recipe, "--seed", str(self.seed), "--fold", str(self.fold)]


def jobs(recipes: Iterable[str], seeds: int) -> list[Job]:
    """All runs, seed by seed, so that an interrupted study has whole seeds."""
    return [Job(recipe, FIRST_SEED + i, i) for i in range(seeds) for recipe in recipes]


def common_flags(args: argparse.Namespace) -> list[str]:
    """The flags that all runs share; the rest are the example's defaults."""
    return [
        *("--bf16", "--train-iters", str(args.steps), "--lr", f"{args.learning_rate:g}"),
        *("--folds", str(args.seeds)),
    ]


def run(job: Job, common: list[str]) -> dict[str, Any]:
    """Trains one run in a process of one thread; returns its row of the result."""
    where = WORK / f"{job.recipe}-{job.seed}"
    where.mkdir(parents=True, exist_ok=True)
    found = where / "oscillation.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *("-m", "megatron_fp4.run", "benchmarks/vit_worker.py", "--oscillation", str(found)),
        *(*common, *job.flags()),
    ]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    (where / "train.log").write_text(ended.stdout + ended.stderr)
    if ended.returncode:
        sys.exit(f"{job}: the launch failed; its log: {where / 'train.log'}")
    row = {"recipe": job.recipe, "seed": job.seed, "fold": job.fold, **evaluated(ended.stdout)}
    row |= json.loads(found.read_text())
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def evaluated(log: str) -> dict[str, float]:
    """ "loss" and "accuracy" of the held-out fold, from the last evaluation in Megatron's log."""
    line = [line for line in log.splitlines() if "validation loss at" in line][-1]
    return {
        name: float(re.findall(rf"\| {name} value: (\S+)", line)[0])
        for name in ("loss", "accuracy")
    }


def study(args: argparse.Namespace) -> dict[str, Any]:
    """The whole result; written to args.out after each run."""
    common = common_flags(args)
    result: dict[str, Any] = {
        "what": "accuracy on held-out digits, and oscillation of the weights of the linears over "
        f"{WINDOW} steps at the end of training; see benchmarks/vit.py",
        "stamp": stamp(args.commit),
        "flags": common,
    }
    rows = resumed(args.out, result)
    have = {(row["recipe"], row["seed"]) for row in rows}
    left = [job for job in jobs(args.recipes, args.seeds) if (job.recipe, job.seed) not in have]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.processes) as pool:
        for row in pool.map(lambda job: run(job, common), left):
            rows.append(row)
            args.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    return result | {"rows": rows}


# --- the table ------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table: means over the seeds with their standard errors."""
    head = ["recipe", "accuracy, %", "minus BF16, seed by seed", "held-out loss", "r(W_Q)"]
    body = []
    base = {row["seed"]: row["accuracy"] for row in rows if row["recipe"] == "bf16"}
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        own = [row for row in rows if row["recipe"] == recipe]
        gaps = [100 * (row["accuracy"] - base[row["seed"]]) for row in own]
        of = {key: [row[key] for row in own] for key in ("accuracy", "loss", "r(W_Q)")}
        oscillating = [100 * row["oscillating"] for row in own]
        cells = [f"`{recipe}`", spread([100 * value for value in of["accuracy"]], ".2f")]
        cells += [spread(gaps, "+.2f") if recipe != "bf16" else "", spread(of["loss"], ".4f")]
        body.append([*cells, spread(of["r(W_Q)"], ".5f"), spread(oscillating, ".2f")])
    return pages.table([*head, "oscillating weights, %"], body)


def by_seed(rows: list[dict[str, Any]]) -> list[str]:
    """The accuracy of every run as a Markdown table, a column for each seed."""
    seeds = sorted({(row["seed"], row["fold"]) for row in rows})
    body = []
    found = {(row["recipe"], row["seed"]): f"{100 * row['accuracy']:.2f}" for row in rows}
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        body.append([f"`{recipe}`", *(found.get((recipe, seed), "") for seed, _ in seeds)])
    return pages.table(["recipe", *(f"seed {seed}, fold {fold}" for seed, fold in seeds)], body)


def spread(values: list[float], form: str) -> str:
    """The mean and its standard error, "a ± b"."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):{form}} ± {error:{form.lstrip('+')}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help=f"more than {WINDOW}")
    parser.add_argument("--seeds", type=int, default=5, help="seeds, and folds: at least 2")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vit.json"))
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    if args.steps <= WINDOW or args.seeds < 2:
        parser.error(f"--steps is above {WINDOW}, and --seeds at least 2")
    result = study(args)
    tables = {"table": table(result["rows"]), "by_seed": by_seed(result["rows"])}
    args.out.write_text(json.dumps(result | tables, indent=1) + "\n")
    for lines in tables.values():
        print("\n".join(lines))


if __name__ == "__main__":
    main()
