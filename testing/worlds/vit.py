"""Runs examples/vit by megatron_fp4/run.py, in torchrun worlds."""

import re
from dataclasses import dataclass
from pathlib import Path

from testing.worlds.launch import ROOT, SCRIPTS, spawn
from testing.worlds.own_megatron import RUN

PRETRAIN_VIT = ROOT / "examples" / "vit" / "pretrain_vit.py"
ON_ONE_BATCH = SCRIPTS / "vit_on_one_batch.py"
WORKER = ROOT / "benchmarks" / "vit_worker.py"


@dataclass(frozen=True)
class Trained:
    """status: the exit status. losses: of each logged step. accuracy: of each evaluation."""

    status: int
    losses: list[float]
    accuracy: list[float]
    output: str


def train(script: Path, *flags: str, processes: int = 1) -> Trained:
    """Trains the example's model in BF16 and logs each step. flags: more flags; they count."""
    done = spawn(processes, RUN, str(script), "--bf16", "--log-interval", "1", *flags)
    losses = re.findall(r"iteration .*\| loss: (\S+)", done.stdout)
    accuracy = re.findall(r"accuracy value: (\S+)", done.stdout)
    return Trained(
        done.returncode, list(map(float, losses)), list(map(float, accuracy)), done.stdout
    )
