"""Checkpoints of small trainings, for tests of the checkpoint tools. Each is trained once."""

from __future__ import annotations

import functools
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from testing.worlds.checkpoints import (
    EP2,
    MOE,
    PP2,
    SHARDED,
    SMALL,
    TETRAJET,
    TP2_SP,
    saving,
)
from testing.worlds.launch import MOCK_DATA, SCRIPTS, TINY, Result, result_of, spawn

SCRIPT = SCRIPTS / "pretrain_telling_files.py"
LLAMA = f"{shlex.join([*TINY, *MOCK_DATA])} {SMALL}"
# Two layers with biases, learned positions, LayerNorm, and one matrix for embedding and head.
GPT2 = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type learned_absolute
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 4
    --train-iters 4 --lr-decay-iters 10 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --log-interval 1 --eval-interval 1000 --eval-iters 0 {shlex.join(MOCK_DATA)}
"""
EMA = "--fp4-recipe tests/mcore/ema.yaml"
TP2_PP2 = f"{TP2_SP} {PP2}"
ALL_EXPERTS = f"{MOE} --moe-shared-expert-intermediate-size 128"


@dataclass(frozen=True)
class Training:
    """A training of four steps, which saves its second and its last."""

    processes: int
    model: str
    flags: str


TRAININGS = {
    "tp2": Training(2, LLAMA, f"--bf16 {TETRAJET} {TP2_SP}"),
    "pp2": Training(2, LLAMA, f"--bf16 {TETRAJET} {PP2}"),
    "tp2-pp2": Training(4, LLAMA, f"--bf16 {TP2_PP2}"),
    "dp2": Training(2, LLAMA, f"--bf16 {TETRAJET} --use-distributed-optimizer"),
    "sharded": Training(2, LLAMA, f"--bf16 {TETRAJET} {SHARDED}"),
    "ema": Training(2, LLAMA, f"--bf16 {EMA} {SHARDED}"),
    "bf16": Training(1, LLAMA, "--bf16"),
    "fp32": Training(1, LLAMA, TETRAJET),
    "fp16": Training(1, LLAMA, f"--fp16 --initial-loss-scale 1024 {TETRAJET}"),
    "gpt2": Training(1, GPT2, "--bf16"),
    "gpt2-tp2": Training(2, GPT2, f"--bf16 {TP2_SP}"),
    "moe": Training(1, LLAMA, f"--bf16 {TETRAJET} {ALL_EXPERTS}"),
    "moe-ep2": Training(2, LLAMA, f"--bf16 {TETRAJET} {ALL_EXPERTS} {EP2} {SHARDED}"),
}
MIDDLE, LAST = "iter_0000002", "iter_0000004"


@functools.cache
def trained(folder: Path, name: str) -> Path:
    """The folder of --save of one of TRAININGS, which is under `folder`."""
    training = TRAININGS[name]
    path = folder / name
    shutil.rmtree(path, ignore_errors=True)
    result = launch(training, saving(path))
    assert result.status == 0, result.output[-4000:]
    return path


def launch(training: Training, flags: str, processes: int | None = None) -> Result:
    """Launches a training with more flags; returns its result. Raises TimeoutError."""
    words = shlex.split(f"{training.model} {training.flags} {flags}")
    return result_of(spawn(processes or training.processes, SCRIPT, *words))
