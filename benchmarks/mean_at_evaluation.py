"""What a model that was trained with `x_mean: subtracted` loses by how it is evaluated.

    python -m benchmarks.mean_at_evaluation [--steps 240] [--seeds 3]

The study's `tiny` model trains on the study's text, on a CPU, by `tetrajet` with `x_mean:
subtracted` and by `tetrajet`. Each model is then evaluated on the same held-out text in the ways of
WAYS, which differ in what is subtracted from X before it is quantized, and multiplied apart in high
precision. `earlier` and `others` tell whether a way is causal: how far the logits of the earlier
tokens of a sequence, and of the other sequences of its microbatch, move when its last token
changes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks.study.sizes import SIZES
from megatron_fp4 import Recipe
from megatron_fp4.arithmetic.token_mean import mean_of, token_sums
from testing.worlds.launch import spawn
from tools import installed_text, pages, runs
from tools.stamp import stamp

SIZE = SIZES["tiny"]
TEXT = installed_text.Text(megabytes=2, vocabulary=1024)
LEARNING_RATE = 4e-3
MICROBATCHES = 16  # of training text, over which the stored mean is taken
RESULT = Path("benchmarks/results/mean-at-evaluation.json")
MEAN = "base: tetrajet\nx_mean: subtracted\n"
WAYS = {
    "kept": "nothing, as in the package's evaluation",
    "own": "the mean of the microbatch, as in training",
    "own-of-one": "the same, with one sequence in a microbatch",
    "causal": "the mean of the token and those before it in its sequence",
    "stored": "the mean of training text, a constant",
    "bf16": "nothing, in a BF16 forward pass",
}


@dataclass
class Means:
    """Chooses what a linear subtracts from X [tokens, in], in place of the package.

    way: "own", "causal" or "stored". sequences: of the microbatch. seen: by linear, each "own" mean
    so far, in float64. stored: by linear, the mean of those that were seen before `store`.
    """

    way: str = "own"
    sequences: int = SIZE.batch
    seen: dict[str, list[Tensor]] = field(default_factory=dict)
    stored: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor, plan: Any, site: Any) -> Tensor:
        """[in], or [tokens, in] of the causal means."""
        if self.way == "causal":
            return causal_means(x, self.sequences)
        if self.way == "stored":
            return self.stored[site.name].float().to(x.dtype)
        sums = token_sums(x)
        self.seen.setdefault(site.name, []).append(sums / len(x))
        return mean_of(sums, len(x), x.dtype)

    def store(self) -> None:
        self.stored = {name: torch.stack(means).mean(0) for name, means in self.seen.items()}


def causal_means(x: Tensor, sequences: int) -> Tensor:
    """For each token the mean of it and of the earlier tokens of its sequence, like x.

    x: [tokens, features], in Megatron's order: the first token of each sequence, then the second.
    """
    by_position = x.unflatten(0, (-1, sequences))
    counts = torch.arange(1, len(by_position) + 1, dtype=torch.float64)[:, None, None]
    means = by_position.cumsum(0, dtype=torch.float64) / counts
    return means.flatten(0, 1).float().to(x.dtype)


# --- in the launch that evaluates a checkpoint ----------------------------------------------------


class Evaluation:
    """One model, evaluated in each way."""

    def __init__(self, model: Any, args: Any) -> None:
        from megatron_fp4.execution import forward
        from megatron_fp4.operands import Decoded

        self.model, self.args, self.means = model.eval(), args, Means()
        vars(forward)["_mean"] = self.means
        # The forward pass adds a dimension to the mean, which is one too many of causal means.
        vars(forward)["Decoded"] = lambda values: Decoded(values.flatten(0, -2))
        kept = vars(Recipe)["in_evaluation"].func
        own = property(lambda recipe: kept(recipe) if self.means.way == "kept" else recipe)
        Recipe.in_evaluation = own  # type: ignore[assignment]

    @torch.no_grad()
    def logits(self, tokens: Tensor, way: str) -> Tensor:
        """float32 [sequences, length, rows of the embedding]. tokens: int64 [sequences, length]."""
        self.means.way, self.means.sequences = way.removesuffix("-of-one"), len(tokens)
        self.args.fp4_eval_forward = "bf16" if way == "bf16" else "fp4"
        positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        found: Tensor = self.model(tokens, positions, None)
        return found.float()

    def loss(self, text: Tensor, way: str) -> float:
        """Nats a token. text: int64 [sequences, length + 1]."""
        losses = []
        for part in text.split(1 if way == "own-of-one" else SIZE.batch):
            logits, targets = self.logits(part[:, :-1], way).flatten(0, 1), part[:, 1:].flatten()
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        return float(torch.cat(losses).double().mean())

    def moved(self, text: Tensor, way: str) -> dict[str, float]:
        """How far logits move when the last token of the first sequence changes: at most, of its
        earlier tokens and of the other sequences."""
        tokens = text[: 1 if way == "own-of-one" else SIZE.batch, :-1]
        changed = tokens.clone()
        changed[0, -1] = (changed[0, -1] + 1) % TEXT.vocabulary
        off = (self.logits(changed, way) - self.logits(tokens, way)).abs()
        others = float(off[1:].max()) if len(off) > 1 else 0.0
        return {"earlier": float(off[0, :-1].max()), "others": others}


def evaluate() -> None:
    """Loads a checkpoint by Megatron and evaluates its model in each of WAYS, in place of training.

    This file is then the script of a launch: TEXT.pt FOUND.json <Megatron's flags>. TEXT.pt is what
    `texts` made; FOUND.json gets the losses and movements by way.
    """
    text, target = torch.load(sys.argv.pop(1)), Path(sys.argv.pop(1))
    from megatron_fp4.mcore import pretrain
    from megatron_fp4.mcore.runtime import cpu

    cpu.install()
    from megatron.training import get_args, training

    def instead(forward_step: Any, model: list[Any], *others: Any, **more: Any) -> None:
        one = Evaluation(model[0], get_args())
        for tokens in text["training"].split(SIZE.batch):
            one.logits(tokens, "own")
        one.means.store()
        held = text["held_out"]
        found = {way: {"loss": one.loss(held, way)} | one.moved(held, way) for way in WAYS}
        target.write_text(json.dumps(found))
        raise SystemExit(0)

    training.train = instead
    pretrain.main()


# --- the command ----------------------------------------------------------------------------------


def sequences(data: Path, part: str) -> Tensor:
    """int64 [sequences, length + 1]: a prepared text, of which targets are the next tokens."""
    found = numpy.fromfile(data / f"{part}_text_document.bin", dtype=numpy.uint16)
    length = SIZE.model.sequence
    return torch.from_numpy(found.astype(numpy.int64)).unfold(0, length + 1, length).contiguous()


def texts(data: Path) -> dict[str, Tensor]:
    """What is evaluated, all whole microbatches of the held-out text, and training text."""
    held_out, training = sequences(data, "valid"), sequences(data, "train")
    count = MICROBATCHES * SIZE.batch
    training = training[:: len(training) // count][:count, :-1].contiguous()
    return {"held_out": held_out[: len(held_out) // SIZE.batch * SIZE.batch], "training": training}


def measured(recipe: str, training: runs.Training, work: Path, data: Path) -> dict[str, Any]:
    """Trains a model by the recipe and evaluates it in each way; "megatron" is the held-out loss
    that Megatron's own evaluation found."""
    folder = work / f"{recipe}-{training.seed}"
    shutil.rmtree(folder, ignore_errors=True)  # a launch would go on from its checkpoint
    folder.mkdir(parents=True)
    (work / "mean.yaml").write_text(MEAN)
    files = [folder / "text.pt", folder / "found.json"]
    torch.save(texts(data), files[0])
    flags = [*SIZE.flags(training), *runs.data_flags(data), "--fp4-seed", str(training.seed)]
    mean = ["--fp4-recipe", str(work / "mean.yaml")]
    own = ["--fp4-recipe", "tetrajet"] if recipe == "kept" else mean
    save = ["--save", str(folder / "run"), "--save-interval", str(training.steps)]
    log = runs.run(runs.launch(1, [*flags, *own, *save]), folder / "train.log")
    # The model that was trained without the word is evaluated with it too.
    load = ["--load", str(folder / "run"), "--no-load-optim", "--no-load-rng", "--fp4-load-anyway"]
    done = spawn(1, Path(__file__), *map(str, files), *flags, *mean, *load, fresh=True)
    if not files[1].exists():
        raise SystemExit(done.stdout[-3000:])
    found = {"x_mean": recipe, "seed": training.seed, "megatron": log.held_out[-1][1]}
    return found | {"ways": json.loads(files[1].read_text())}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The result as a Markdown table: means over the seeds, differences from the loss with the mean
    kept, from the lowest to the highest of the seeds, and the largest movements of all models."""
    body = []
    for way, name in WAYS.items():
        cells = [f"`{way}`", name]
        for trained in ("subtracted", "kept"):
            found = [row["ways"] for row in rows if row["x_mean"] == trained]
            cells.append(f"{statistics.mean(each[way]['loss'] for each in found):.4f}")
            gaps = differences(rows, trained, way, "kept")
            gap = f"{statistics.mean(gaps):+.4f} ({min(gaps):+.4f} to {max(gaps):+.4f})"
            cells.append("" if way == "kept" else gap)
        moved = [max(row["ways"][way][part] for row in rows) for part in ("earlier", "others")]
        body.append([*cells, *(f"{each:.2g}" for each in moved)])
    head = ["evaluated", "subtracted from X", "trained with it", "minus `kept`"]
    head += ["trained without", "minus `kept`", "earlier", "others"]
    return pages.table(head, body)


def differences(rows: list[dict[str, Any]], trained: str, way: str, other: str) -> list[float]:
    """The held-out loss of each model evaluated in one way minus the same model's in another way.

    rows: of the result. trained: `x_mean` of the recipe that trained the models, "subtracted" or
    "kept"; there is one model for each seed. way, other: keys of WAYS.
    """
    found = [row["ways"] for row in rows if row["x_mean"] == trained]
    return [each[way]["loss"] - each[other]["loss"] for each in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/mean_at_evaluation"))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    work = args.work.resolve()
    described = installed_text.described(installed_text.prepare(TEXT, work / "text"))
    training = {"steps": args.steps, "batch": SIZE.batch, "learning_rate": LEARNING_RATE}
    training |= {"held_out_batches": described["held_out"]["tokens"] // SIZE.tokens}
    rows = []
    for seed in range(1, args.seeds + 1):
        for recipe in ("subtracted", "kept"):
            each = runs.Training(**training, evaluations=1, seed=seed)
            rows.append(measured(recipe, each, work, work / "text"))
            print(json.dumps(rows[-1], indent=1), file=sys.stderr, flush=True)
    settings = {"model": asdict(SIZE.model), "training": training, "text": described}
    result = {"stamp": stamp(args.commit), **settings, "stored_microbatches": MICROBATCHES}
    args.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    evaluate() if sys.argv[1:2] and sys.argv[1].endswith(".pt") else main()
