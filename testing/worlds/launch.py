"""Runs training scripts in torchrun worlds on this machine's CPU, and reads what they logged."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from testing.worlds.world import world

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "testing" / "scripts"

# Two LLaMA layers of 64 on four sequences of 64 tokens a step; flags given later win.
TINY = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --train-iters 4 --lr-decay-iters 10
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --log-interval 1 --eval-interval 1000 --eval-iters 1 --global-batch-size 4
""".split()
# Megatron's own layers, which are its default only where Transformer Engine is absent.
LOCAL = "--transformer-impl local --no-rope-fusion".split()
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
# Seconds after which a launch is taken to hang; on a busy machine the longest needs some 300.
HANGS_S = 900
MOCK_DATA = "--tokenizer-type NullTokenizer --vocab-size 512 --mock-data".split()


@dataclass(frozen=True)
class Result:
    status: int  # torchrun's exit status
    losses: list[float]  # of each logged iteration
    evaluations: list[float]  # losses on held-out data, in the order of the log
    output: str  # standard output and standard error

    @property
    def captures(self) -> int:
        """How often Megatron captured layers in CUDA graphs, as rank 0 says."""
        return self.output.count("cuda graph(s) in")

    @property
    def has_traceback(self) -> bool:
        """Whether a rank printed a Python traceback; that of torchrun itself does not count."""
        return '.py", line' in self.output.split("multiprocessing/api.py")[0]


def torchrun(
    processes: int,
    *flags: str,
    script: Path = ROOT / "pretrain_gpt.py",
    fresh: bool = False,
) -> Result:
    """Trains with TINY and `flags` in `processes` processes of one thread each; see `spawn`.

    Mock data is used if no flag names a dataset. Raises TimeoutError.
    """
    words = tiny_on_mock_data(*flags)
    return result_of(spawn(processes, script, *words, fresh=fresh))


def tiny_on_mock_data(*flags: str) -> list[str]:
    """All flags of a launch that trains the model TINY with `flags`, of which later ones win.

    Unless `flags` has --transformer-impl, the layers are Megatron's own (LOCAL). Unless it names a
    dataset, the data are Megatron's mock data.
    """
    data = [] if any(flag.endswith("data-path") for flag in flags) else MOCK_DATA
    # Megatron takes this schedule or --global-batch-size, which comes last.
    tiny = TINY[:-2] if "--step-batch-size-schedule" in flags else TINY
    layers = [] if "--transformer-impl" in flags else LOCAL
    return [*tiny, *layers, *data, *flags]


def result_of(done: subprocess.CompletedProcess[str]) -> Result:
    """The exit status and the losses of a training script that has ended."""
    return Result(
        done.returncode,
        [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)],
        [float(loss) for loss in re.findall(r"lm loss value: (\S+)", done.stdout)],
        done.stdout,
    )


def spawn(
    processes: int, script: Path, *arguments: str, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs any script in a torchrun world, with one thread for each process.

    The result's stdout has standard output and standard error. Raises TimeoutError if the script is
    still running after HANGS_S seconds, and RuntimeError if the world itself could not start.

    fresh: launch torchrun for this script alone, if the script depends on the launcher, on the
    environment or on what is imported first. Otherwise it runs in forks of a world that keeps
    running (world.py), which takes a fraction of the time. Where there is a GPU, every launch is
    fresh: a fork cannot use a GPU once CUDA has been initialized.
    """
    if fresh or torch.cuda.is_available():
        return _launch(processes, script, *arguments)
    status, output = world(processes).run(script, list(arguments), HANGS_S)
    return subprocess.CompletedProcess([str(script), *arguments], status, output)


def _launch(processes: int, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.Popen(
        [*command, "--nproc-per-node", str(processes), str(script), *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = run.communicate(timeout=HANGS_S)
    except subprocess.TimeoutExpired as error:
        run.terminate()  # torchrun then ends its ranks, which would keep the pipe open
        output, _ = run.communicate(timeout=60)
        raise TimeoutError(f"still running after {HANGS_S} s: {output[-4000:]}") from error
    finally:
        run.kill()
    return subprocess.CompletedProcess(run.args, run.returncode, output)


def train(processes: int, *flags: str) -> Result:
    """As `torchrun`; asserts that the exit status is 0."""
    result = torchrun(processes, *flags)
    assert result.status == 0, result.output[-4000:]
    return result
