"""The means of benchmarks/mean_at_evaluation.py, and docs/notes/mean-at-evaluation.md."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import mean_at_evaluation
from benchmarks.mean_at_evaluation import WAYS, Evaluation, Means, causal_means, differences
from benchmarks.study.gaps import Gap
from megatron_fp4 import Linear, Recipe, get_recipe
from megatron_fp4.execution import forward
from testing.oracles import normal

ROOT = Path(__file__).parents[2]
CAUSAL = [way for way in WAYS if not way.startswith("own")]
LENGTH, SEQUENCES, IN = 16, 4, 64
HERE = Namespace(name="linear")


def test_causal_means_against_a_loop() -> None:
    x = (normal((LENGTH, SEQUENCES, IN), 1) + 3).bfloat16()
    found = causal_means(x.flatten(0, 1), SEQUENCES).unflatten(0, (LENGTH, SEQUENCES))
    for position in range(LENGTH):
        for sequence in range(SEQUENCES):
            wanted = x[: position + 1, sequence].double().mean(0).float().bfloat16()
            assert torch.equal(found[position, sequence], wanted)
    # Negative control: the tokens of all sequences in one.
    assert not torch.equal(causal_means(x.flatten(0, 1), 1), found.flatten(0, 1))


def test_the_stored_mean_is_that_of_what_was_seen_before() -> None:
    means = Means()
    parts = [(normal((32, IN), seed) + 3).bfloat16() for seed in (1, 2, 3)]
    own = [means(part, None, HERE) for part in parts[:2]]
    means.store()
    later = means(parts[2], None, HERE)
    means.way = "stored"
    found = means(parts[2], None, HERE)
    assert torch.equal(found, torch.cat(parts[:2]).double().mean(0).float().bfloat16())
    assert not torch.equal(found, later)
    for part, mean in zip(parts, [*own, later], strict=True):
        assert torch.equal(mean, part.double().mean(0).float().bfloat16())


class Toy(nn.Module):
    """A linear of this package on embedded tokens, called as Megatron's model is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(mean_at_evaluation.TEXT.vocabulary, IN)
        self.embedding.weight.data = (normal((len(self.embedding.weight), IN), 1) + 3).bfloat16()
        recipe = replace(get_recipe("tetrajet"), x_mean="subtracted")
        self.linear = Linear(IN, IN, bias=False, recipe=recipe, dtype=torch.bfloat16)
        self.linear.weight.data.copy_(normal((IN, IN), 2))

    def forward(self, tokens: Tensor, positions: Tensor, mask: None) -> Tensor:
        y: Tensor = self.linear(self.embedding(tokens.t()))  # [length, sequences], as Megatron's
        return y.transpose(0, 1)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Evaluation:
    """Restores what an Evaluation replaces."""
    for name in ("_mean", "Decoded"):
        monkeypatch.setattr(forward, name, vars(forward)[name])
    monkeypatch.setattr(Recipe, "in_evaluation", vars(Recipe)["in_evaluation"])
    found = Evaluation(Toy(), Namespace())
    found.logits(text(3), "own")
    found.means.store()
    return found


def text(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1024, (SEQUENCES, LENGTH + 1), generator=draw)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "bf16"])
def test_only_a_causal_way_leaves_earlier_tokens_alone(toy: Evaluation, way: str) -> None:
    moved = toy.moved(text(4), way)
    assert (moved["earlier"] == 0) == (way in CAUSAL)
    assert (moved["others"] > 0) == (way == "own")


def test_means_of_later_tokens_are_seen(toy: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The known mistake: the mean of a token and of the later ones."""

    def wrong(x: Tensor, sequences: int) -> Tensor:
        return causal_means(x.flip(0), sequences).flip(0)

    monkeypatch.setattr(mean_at_evaluation, "causal_means", wrong)
    assert toy.moved(text(4), "causal")["earlier"] > 0


def test_every_way_multiplies_its_mean_by_w(toy: Evaluation) -> None:
    """All Y are near the BF16 product, and those without a mean nearer."""
    tokens = text(4)[:, :-1]
    x, w = toy.model.embedding.weight[tokens].double(), toy.model.linear.weight.double()
    exact = (x @ w.t()).detach()
    off = {
        way: float((toy.logits(tokens, way) - exact).norm() / exact.norm())
        for way in ("kept", "own", "causal", "stored")
    }
    assert all(off[way] < off["kept"] for way in ("own", "causal", "stored"))


# --- the result and its page ----------------------------------------------------------------------

PAGE = ROOT / "docs/notes/mean-at-evaluation.md"
RESULT: dict[str, Any] = json.loads((ROOT / mean_at_evaluation.RESULT).read_text())
ROWS = RESULT["rows"]
SEEDS = sorted({row["seed"] for row in ROWS})


def test_the_result_is_whole_and_only_own_means_see_later_tokens() -> None:
    assert len(SEEDS) == 3 and len(ROWS) == 2 * len(SEEDS)
    assert len(RESULT["stamp"]["commit"]) == 12  # no local changes
    for row in ROWS:
        assert row["ways"].keys() == WAYS.keys()
        for way, found in row["ways"].items():
            assert (found["earlier"] == 0) == (way in CAUSAL)
            assert (found["others"] > 0) == (way == "own")
        # Megatron's evaluation shuffles the same text and cuts it elsewhere. Losses of tokens have
        # a standard deviation of less than 4, and there are 42,000: within four standard errors.
        assert abs(row["ways"]["kept"]["loss"] - row["megatron"]) < 4 * 4 / 42_000**0.5


def gap(trained: str, way: str, other: str) -> Gap:
    return Gap(dict(zip(SEEDS, differences(ROWS, trained, way, other), strict=True)))


def told(found: Gap, unit: str = "") -> str:
    low, high = min(found.by_seed.values()), max(found.by_seed.values())
    return f"{found.mean:+.4f} ({low:+.4f} to {high:+.4f}{unit})"


def test_the_figures_of_the_page_are_the_result() -> None:
    text, model, training = PAGE.read_text(), RESULT["model"], RESULT["training"]
    assert "\n".join(mean_at_evaluation.table(ROWS)) in text
    tokens = training["held_out_batches"] * training["batch"] * model["sequence"]
    kept, bf16 = (gap("subtracted", "kept", other) for other in ("own", "bf16"))
    stored = sorted(gap("subtracted", "kept", "stored").by_seed.values())
    seeds = [row["ways"]["kept"]["loss"] for row in ROWS if row["x_mean"] == "subtracted"]
    plain = [gap("kept", way, "kept") for way in ("own", "stored", "causal")]
    low, high = min(kept.by_seed.values()), max(kept.by_seed.values())
    for said in (
        f"({model['layers']} layers of {model['hidden']}) trained for {training['steps']} steps at "
        f"a learning rate of {training['learning_rate']:g} on a CPU, in {len(SEEDS)} seeds",
        f"the same {tokens:,} held-out tokens",
        f"over {RESULT['stored_microbatches']} microbatches of training text",
        f"It is {kept.mean:.4f} above that of the microbatch's own mean, by {low:.4f} to "
        f"{high:.4f} in the seeds, and {bf16.mean:.4f} above",
        f"The losses of the seeds themselves differ by {max(seeds) - min(seeds):.4f}",
        f"is near the own mean**: {told(gap('subtracted', 'stored', 'own'))}",
        f"by {stored[0]:.4f} to {stored[-1]:.4f}, which is within the spread",
        f"is {told(gap('subtracted', 'causal', 'kept'))} from the kept mean, within the spread",
        f"own mean is {told(gap('subtracted', 'own', 'bf16'))} from that of the BF16",
        "{:+.4f} with the own mean, {:+.4f} with the stored one, {:+.4f} with the causal".format(
            *(each.mean for each in plain)
        ),
    ):
        assert said in text, said
    assert kept.verdict == bf16.verdict == "higher"
    for way, other in (("stored", "kept"), ("stored", "own"), ("causal", "kept")):
        assert gap("subtracted", way, other).verdict == "within the spread"
    assert all(max(each.by_seed.values()) > 0 for each in plain)


def test_the_page_of_recipe_files_has_the_same_figures() -> None:
    text = (ROOT / "docs/recipe-files.md").read_text()
    assert f"costs {gap('subtracted', 'kept', 'own').mean:.4f} of held-out loss" in text
    found = told(gap("subtracted", "stored", "kept"), " by seed")
    assert f"changes the loss with the kept mean by {found}, within the spread" in text
