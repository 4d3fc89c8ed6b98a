"""Launches pretrain_gpt.py: builds the command, runs it, and reads Megatron's log.

log = run(launch(2, Model().flags() + Training().flags() + data_flags(path)), Path("run.log"))
print(log.train[-1], log.held_out[-1])
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_ITERATION = re.compile(
    r"iteration +(\d+)/ *(\d+) \|.* elapsed time per iteration \(ms\): ([\d.]+) \|"
    r"(?:.* lm loss: (\S+) \|)?"  # Megatron's line has no loss where the loss is NaN
)
_GRAD_NORM = re.compile(r"\| grad norm: (\S+) \|")
_HELD_OUT = re.compile(r"validation loss at iteration (\d+).* \| lm loss value: (\S+) \|")
_RANK = re.compile(r"\[rank\d+\]:")
_WARNING = re.compile(r"\[rank\d+\]:\[W\d{4} ")  # of torch's C++ code
_LAUNCHER = re.compile(r"^[EW]\d{4} .*\btorch/distributed/")


class RunFailed(RuntimeError):
    """A launch failed; the message has the last lines of its log."""


@dataclass(frozen=True)
class Model:
    """A small LLaMA: RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases.

    Every dimension of a linear is a multiple of 64 under two-way tensor parallelism.
    """

    layers: int = 4
    hidden: int = 256
    ffn: int = 768
    heads: int = 4
    query_groups: int = 2
    sequence: int = 256

    def flags(self) -> list[str]:
        """Megatron's flags for this model."""
        return [
            *_flags(
                num_layers=self.layers,
                hidden_size=self.hidden,
                ffn_hidden_size=self.ffn,
                num_attention_heads=self.heads,
                num_query_groups=self.query_groups,
                seq_length=self.sequence,
                max_position_embeddings=self.sequence,
                normalization="RMSNorm",
                position_embedding_type="rope",
            ),
            "--group-query-attention",
            "--swiglu",
            "--disable-bias-linear",
            "--untie-embeddings-and-output-weights",
            *_flags(attention_dropout=0, hidden_dropout=0),
        ]


@dataclass(frozen=True)
class Training:
    """How to train: AdamW in BF16, with a warm-up and a cosine decay of the learning rate to a
    tenth of its maximum.

    steps: optimizer steps. batch: sequences in a step. evaluations: about how many are made during
    training. held_out_batches: batches in each evaluation.
    """

    steps: int
    batch: int = 8
    learning_rate: float = 2e-3
    evaluations: int = 4
    held_out_batches: int = 16
    seed: int = 1234

    def flags(self) -> list[str]:
        """Megatron's flags for this training."""
        # Megatron always evaluates after the last step, so no interval should end there.
        first = self.steps // self.evaluations + 1
        interval = next(i for i in range(first, self.steps + 2) if self.steps % i)
        return [
            "--bf16",
            *_flags(
                train_iters=self.steps,
                micro_batch_size=self.batch,
                global_batch_size=self.batch,
                lr=self.learning_rate,
                min_lr=self.learning_rate / 10,
                lr_decay_style="cosine",
                lr_warmup_iters=max(self.steps // 10, 1),
                weight_decay=0.1,
                adam_beta2=0.95,
                clip_grad=1.0,
                eval_interval=interval,
                eval_iters=self.held_out_batches,
                log_interval=max(self.steps // 50, 1),
                seed=self.seed,
            ),
        ]


def recipe_flags(entry: str) -> list[str]:
    """The flags of a recipe, perhaps with options ("dge-occ,occ=false"); none of "bf16"."""
    name, *options = entry.split(",")
    if name == "bf16":
        return []
    return ["--fp4-recipe", name, *(w for each in options for w in ("--fp4-recipe-option", each))]


def data_flags(prepared: Path) -> list[str]:
    """Megatron's flags for the directory `prepared`, which tools/prepare_data.py has written."""
    return _flags(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=prepared / "tokenizer.model",
        train_data_path=prepared / "train_text_document",
        valid_data_path=prepared / "valid_text_document",
    )


def _flags(**options: object) -> list[str]:
    """The flags "--some-option value" for the keywords some_option=value."""
    return [
        word
        for name, value in options.items()
        for word in (
            f"--{name.replace('_', '-')}",
            f"{value:g}" if isinstance(value, float) else str(value),
        )
    ]


def launch(processes: int, flags: list[str]) -> list[str]:
    """The command that pretrains on this machine in `processes` processes.

    They are one tensor-parallel group with sequence parallelism. flags: more of Megatron's flags.
    """
    torchrun = os.path.relpath(Path(sys.executable).with_name("torchrun"), ROOT)
    command = [torchrun, "--standalone", "--nproc-per-node", str(processes), "pretrain_gpt.py"]
    if processes > 1:
        command += ["--tensor-model-parallel-size", str(processes), "--sequence-parallel"]
    return command + flags


# Runs are on the CPU, even where there is a GPU, so that results are the same everywhere. Each
# process has one thread, since more threads would compete for the two cores of a small machine.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def shown(command: list[str]) -> str:
    """The command as text that can be pasted into a shell in the repository's root."""
    lines = [" ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())]
    for words in re.split(r" (?=--)", shlex.join(command)):  # a flag stays with its value
        if len(lines[-1]) + len(words) > 95:
            lines.append("   ")
        lines[-1] += f" {words}"
    return " \\\n".join(lines)


@dataclass
class Log:
    """The figures in the lines of a training log of Megatron's, as far as it was read.

    train, held_out: (step, loss) of each line about training and about the held-out text.
    grad_norms: (step, norm of the gradient) of each line about training.
    step, steps: the latest step that has a line, and the number of steps of the training.
    milliseconds: the time of that step.
    """

    train: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    grad_norms: list[tuple[int, float]] = field(default_factory=list)
    step: int = 0
    steps: int = 0
    milliseconds: float = 0.0  # without the time of evaluations

    def read(self, line: str) -> bool:
        """Reads a line of the log; returns whether it had figures."""
        if match := _ITERATION.search(line):
            self.step, self.steps = int(match[1]), int(match[2])
            self.milliseconds = float(match[3])
            if match[4]:
                self.train.append((self.step, float(match[4])))
            if norm := _GRAD_NORM.search(line):
                self.grad_norms.append((self.step, float(norm[1])))
        elif match := _HELD_OUT.search(line):
            self.held_out.append((int(match[1]), float(match[2])))
        return match is not None


def run(
    command: list[str],
    path: Path,
    watch: Callable[[Log], None] = lambda log: None,
    environment: Mapping[str, str] = ENVIRONMENT,
) -> Log:
    """Runs a launch and returns what its log said.

    command: from `launch`. path: where its output is written. watch: called with the Log whenever
    it has new figures. Raises RunFailed if the launch ends with an error or without a held-out
    loss.
    """
    log = Log()
    path.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    try:
        with path.open("w", buffering=1) as file:
            for line in process.stdout:
                file.write(line)
                if log.read(line):
                    watch(log)
        status = process.wait()
    finally:
        process.terminate()  # after an interrupt; does nothing if the process has ended
        process.wait()
    if status != 0 or not log.held_out:
        raise RunFailed(f"{_tail(path)}\nThe launch failed (exit status {status}); its log: {path}")
    return log


def _tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log that explain a failure.

    torchrun's own report, which does not name the cause, and warnings are cut off. If ranks raised,
    only lines of the first rank that raised are returned: the errors of the others mostly follow
    from it.
    """
    text = path.read_text().splitlines()
    end = next((i for i, line in enumerate(text) if i and _LAUNCHER.match(line)), len(text))
    text = [line for line in text[:end] if not _WARNING.match(line)]
    if raised := next(filter(None, map(_RANK.match, text)), None):
        text = [line for line in text if line.startswith(raised[0])]
    return "\n".join(text[-lines:])
