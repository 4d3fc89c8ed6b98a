"""Runs the scripts of examples/ on this machine, with small models."""

import os
import re
import sys
from pathlib import Path

from testing.worlds.launch import ROOT, SCRIPTS

LAUNCH = ROOT / "examples" / "launch.sh"
SLOWLY = SCRIPTS / "pretrain_slowly.py"
# Flags that make any of the models small, and that a CPU can run.
SMALL = """
    --num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4
    --cuda-graph-impl none --vocab-size 512 --lr-warmup-iters 5 --log-interval 1 --eval-iters 1
""".split()


def settings(run: Path, **others: object) -> dict[str, str]:
    """Environment variables for examples/launch.sh: made-up data, the Python of this process.

    run: the run's folder. others: more variables by name.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {
        "DATA": "mock",
        "RUN_DIR": run,
        "VENV": sys.prefix,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in (own | others).items()}


def losses(log: Path) -> dict[int, str]:
    """The training loss of each step, as it was logged; of the last log line of a step."""
    lines = re.findall(r" iteration +(\d+)/.* lm loss: (\S+)", log.read_text())
    return {int(step): loss for step, loss in lines}
