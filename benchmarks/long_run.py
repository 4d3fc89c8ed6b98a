"""Compares a long FP4 run under TP2 with sequence parallelism x PP2 x DP2 with one process.

    python -m benchmarks.long_run [--steps 1000] [--recipe tetrajet]

Three seeds train in one process. The same initial weights then train in eight processes, on eight
GPUs if there are as many and else on the CPU, with the same batches and microbatches. FP4 rounding
is discontinuous, so the trajectories of the two layouts differ after tens of steps. The layouts
agree if their mean held-out losses at the end differ by no more than those of two seeds do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_fp4.mcore.data import prepare_data
from tools import pages, runs
from tools.stamp import stamp

ALONE, LAYOUT = "one process", "TP2+SP x PP2 x DP2"
PROCESSES = 8
PARALLEL = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
MICRO_BATCH = 2
# A thousand steps are about one pass over the text.
TEXT = prepare_data.Options(vocab_size=1024, max_bytes=2_000_000)
MODEL = runs.Model(layers=4, hidden=64, ffn=192, heads=4, query_groups=2, sequence=64)
TRAINING = runs.Training(steps=0, batch=8)


def study(args: argparse.Namespace) -> dict[str, Any]:
    """The whole result: settings, stamp, losses of every run, and whether the layouts agree."""
    data = args.work / "data"
    manifest = prepare_data.prepare([], data, TEXT)
    # Each evaluation reads the whole held-out text, so seeds differ only by their training.
    batches = manifest["held_out"]["tokens"] // (TRAINING.batch * MODEL.sequence)
    training = replace(TRAINING, steps=args.steps, held_out_batches=batches)
    seeds = [TRAINING.seed + i for i in range(args.seeds)]
    train = partial(one, args=args, training=training)
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(partial(start, args=args, training=training), seeds))
        jobs = [(processes, seed) for processes in (PROCESSES, 1) for seed in seeds]
        logs = list(pool.map(lambda job: train(*job), jobs))
    parallel, alone = logs[: args.seeds], logs[args.seeds :]
    return {
        "what": f"{args.recipe}, {args.steps} steps: {LAYOUT} against one process",
        "stamp": stamp(args.commit),
        "model": asdict(MODEL),
        "training": asdict(training) | {"micro_batch": MICRO_BATCH, "seeds": seeds},
        "data": manifest,
        ALONE: dict(zip(map(str, seeds), map(asdict, alone), strict=True)),
        LAYOUT: dict(zip(map(str, seeds), map(asdict, parallel), strict=True)),
        **verdict(parallel, alone),
    }


def start(seed: int, args: argparse.Namespace, training: runs.Training) -> None:
    """Saves the initial weights of a seed, since each pipeline stage would draw its own.

    Megatron saves no checkpoint before the first step. So two steps are made, at a learning rate so
    small that the BF16 weights do not change.
    """
    still = replace(
        training, steps=2, seed=seed, learning_rate=1e-12, evaluations=1, held_out_batches=1
    )
    save = ["--save", str(args.work / f"start-{seed}"), "--save-interval", "2", "--no-save-optim"]
    launch(1, still, save, args, f"start-{seed}")


def one(processes: int, seed: int, args: argparse.Namespace, training: runs.Training) -> runs.Log:
    """Trains a seed from its saved initial weights."""
    load = ["--load", str(args.work / f"start-{seed}"), "--finetune"]
    load += ["--no-load-optim", "--no-load-rng"]
    layout = PARALLEL if processes > 1 else []
    log = launch(
        processes, replace(training, seed=seed), load + layout, args, f"{processes}-{seed}"
    )
    print(f"{processes} processes, seed {seed}: {log.held_out}", file=sys.stderr, flush=True)
    return log


def launch(
    processes: int, training: runs.Training, more: list[str], args: argparse.Namespace, name: str
) -> runs.Log:
    """Runs pretrain_gpt.py to its end; its log is in args.work."""
    flags = [*MODEL.flags(), *training.flags(), *runs.data_flags(args.work / "data")]
    flags += ["--micro-batch-size", str(MICRO_BATCH), "--fp4-recipe", args.recipe]
    fits = torch.cuda.device_count() >= PROCESSES
    environment = {"OMP_NUM_THREADS": "1"} if fits else runs.ENVIRONMENT
    # Later flags override earlier ones: `runs.launch` uses all processes for tensor parallelism.
    command = runs.launch(processes, flags + more)
    return runs.run(command, args.work / f"{name}.log", environment=environment)


def verdict(parallel: list[runs.Log], alone: list[runs.Log]) -> dict[str, Any]:
    """At each evaluation: how much the layouts' mean losses differ, and the most by which the
    losses of two seeds of one layout differ."""
    points = []
    for i, (step, _) in enumerate(alone[0].held_out):
        here = {
            name: [log.held_out[i][1] for log in logs]
            for name, logs in ((ALONE, alone), (LAYOUT, parallel))
        }
        means = [statistics.mean(losses) for losses in here.values()]
        spreads = {name: max(losses) - min(losses) for name, losses in here.items()}
        points.append({"step": step, "means differ by": abs(means[1] - means[0]), **spreads})
    last = points[-1]
    return {"held out": points, "within the spread": last["means differ by"] <= last[ALONE]}


def table(result: dict[str, Any]) -> list[str]:
    """The held-out losses as a Markdown table, a line for each evaluation."""
    every = [(name, seed) for name in (ALONE, LAYOUT) for seed in result[name]]
    heads = ["step", *(f"{name}, seed {seed}" for name, seed in every), "means differ by"]
    heads += [f"seeds by at most: {name}" for name in (ALONE, LAYOUT)]
    body = []
    for i, point in enumerate(result["held out"]):
        losses = [result[name][seed]["held_out"][i][1] for name, seed in every]
        apart = [point[key] for key in ("means differ by", ALONE, LAYOUT)]
        body.append([str(point["step"]), *(f"{loss:.4f}" for loss in (*losses, *apart))])
    return pages.table(heads, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", default="tetrajet")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--work", type=Path, default=Path("runs/long_run"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/long_run.json"))
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    args.work = Path(os.path.abspath(args.work))  # launches run in the repository's root
    result = study(args)
    result["table"] = table(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("held out", "within the spread")}, indent=1))


if __name__ == "__main__":
    main()
