"""The demo: pretrains a small LLaMA in FP4 and in BF16 on real text, and compares the two.

    make demo [TEXT=path] [TOKENS=n] [RECIPE=name]

Both runs see the same text in the same order and start from the same weights. The curves, the
logs and the figures land in runs/demo.
"""

import importlib.util
import json
import math
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_fp4 import get_recipe
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.data import prepare_data
from tools import runs

OUTPUT = Path("runs/demo")
TOKENS = 150_000  # 73 steps: both curves have fallen far, and FP4 on a CPU is slow
FEWEST_STEPS = 20  # with fewer there are no curves to compare
HELD_OUT_BATCHES = 8  # of an evaluation: 16,384 tokens, the same for both runs
PROCESSES = 2
BASELINE = "bf16"  # the name of the run without FP4


class Progress:
    """Prints how far a run is: on a terminal one line that is rewritten, else a line at each tenth
    of the run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()
        self._tenth = 0

    def __call__(self, log: runs.Log) -> None:
        """Prints the state of the log. Call it whenever the log has new figures."""
        if not log.train:
            return
        left = (log.steps - log.step) * log.milliseconds / 1000
        held_out = f", held out {log.held_out[-1][1]:.3f}" if log.held_out else ""
        line = (
            f"  {self._name:9} {log.step / log.steps:4.0%}  step {log.step}/{log.steps}  "
            f"loss {log.train[-1][1]:.3f}{held_out}  {log.milliseconds:.0f} ms a step, "
            f"about {_clock(left)} left"
        )
        if sys.stdout.isatty():
            print(f"\r\033[K{line}", end="", flush=True)
        elif (tenth := 10 * log.step // log.steps) > self._tenth:
            self._tenth = tenth
            print(line, flush=True)

    def close(self, log: runs.Log) -> None:
        """Replaces the line by the run's result."""
        start = "\r\033[K" if sys.stdout.isatty() else ""
        seconds = time.monotonic() - self._began
        print(
            f"{start}  {self._name:9} done in {_clock(seconds)}, {log.milliseconds:.0f} ms a step, "
            f"held-out loss {log.held_out[-1][1]:.4f}\n",
            flush=True,
        )


def prepare(text: list[Path], output: Path) -> dict[str, Any]:
    """Prepares the text, with a smaller vocabulary if the text is too short for the default one.

    Returns the manifest of the data. Raises DataError.
    """
    try:
        return prepare_data.prepare(text, output, prepare_data.Options())
    except prepare_data.VocabularyTooLarge as error:
        print(f"The text is short: the vocabulary has {error.most} tokens", flush=True)
        return prepare_data.prepare(text, output, prepare_data.Options(vocab_size=error.most))


def train(name: str, flags: list[str]) -> runs.Log:
    """Pretrains with these flags of Megatron's and returns the log. Raises runs.RunFailed."""
    progress = Progress(name)
    log = runs.run(runs.launch(PROCESSES, flags), OUTPUT / f"{name}.log", progress)
    progress.close(log)
    return log


def run_name(recipe: str) -> str:
    """The name of the recipe's run and of its log: the recipe's name, without characters that have
    a meaning in a path. Raises ConfigError for an unknown recipe."""
    name = re.sub(r"[^\w.-]+", "-", get_recipe(recipe).name).strip(".-")
    return name if name not in ("", BASELINE) else f"fp4-{name}"


def tokens_per_step() -> int:
    """The tokens of all sequences of a step."""
    return runs.Training.batch * runs.Model().sequence


def train_both(name: str, recipe: str, tokens: int, data: Path) -> dict[str, runs.Log]:
    """The logs of a run in FP4 and of the same run in BF16. Raises runs.RunFailed."""
    model = runs.Model()
    steps = tokens // tokens_per_step()
    training = runs.Training(steps, held_out_batches=HELD_OUT_BATCHES)
    flags = model.flags() + training.flags() + runs.data_flags(data)
    fp4 = ["--fp4-recipe", recipe]
    print(f"Pretraining in FP4 ({recipe}):\n\n{runs.shown(runs.launch(PROCESSES, fp4 + flags))}\n")
    logs = {name: train(name, fp4 + flags)}
    print(f"Pretraining in BF16: the same command without {' '.join(fp4)}\n")
    return logs | {BASELINE: train(BASELINE, flags)}


def plot(logs: dict[str, runs.Log], ratio: float, path: Path) -> None:
    """Draws each run's training loss as a line and its held-out losses as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for (name, log), color in zip(logs.items(), ("#dd5533", "#4c72b0"), strict=True):
        axes.plot(
            *zip(*log.train, strict=True), color=color, linewidth=1.6, label=f"{name}, training"
        )
        label = f"{name}, held out: {log.held_out[-1][1]:.3f} at the end"
        axes.plot(
            *zip(*log.held_out, strict=True), "o", color=color, markeredgecolor="white", label=label
        )
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.set_title(f"The same small LLaMA twice: FP4's perplexity is {ratio:.3f} times BF16's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _clock(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02}"


def demo(text: list[Path], tokens: int, recipe: str) -> None:
    """Prepares the text, trains twice, and reports both held-out losses.

    Raises DataError, ConfigError or RunFailed. Mistakes in the options are found before any work is
    done.
    """
    fewest = FEWEST_STEPS * tokens_per_step()
    if tokens < fewest:
        raise prepare_data.DataError(
            f"--tokens {tokens} is too few: give {fewest} or more, {FEWEST_STEPS} steps"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the curves need matplotlib: pip install matplotlib")
    name = run_name(recipe)
    began = time.monotonic()
    manifest = prepare(text, OUTPUT / "data")
    print()
    logs = train_both(name, recipe, tokens, OUTPUT / "data")
    losses = {name: log.held_out[-1][1] for name, log in logs.items()}
    ratio = math.exp(losses[name] - losses[BASELINE])
    plot(logs, ratio, OUTPUT / "curves.png")
    seconds = time.monotonic() - began
    result = {
        "recipe": recipe,
        "held_out_loss": losses,
        "perplexity_ratio": ratio,
        "seconds": seconds,
        "data": manifest,
        "logs": {name: asdict(log) for name, log in logs.items()},
    }
    (OUTPUT / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    width = max(map(len, losses))
    for name, loss in losses.items():
        print(f"{name:{width}}  held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f}")
    print(f"FP4's perplexity is {ratio:.4f} times BF16's.")
    print(f"It took {_clock(seconds)}. Curves: {OUTPUT}/curves.png, figures: {OUTPUT}/result.json")


def main() -> int:
    """Runs the demo as the command line asks; returns the exit status."""
    parser = prepare_data.OneLineParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", nargs="+", type=Path, default=[], help="your own text")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="to train on (%(default)s)")
    parser.add_argument("--recipe", default="tetrajet", help="the FP4 recipe (%(default)s)")
    try:
        given = parser.parse_args()
        demo(given.text, given.tokens, given.recipe)
    except (prepare_data.DataError, ConfigError, runs.RunFailed, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
