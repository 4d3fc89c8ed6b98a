"""The last stage: a small LLaMA through pretrain_gpt.py, as a matrix of benchmarks/study."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_fp4.plan.sizes import contracted_multiple
from megatron_fp4.recipe import GEMMS
from tools import rows as jsonl
from tools.rows import Row
from tools.sweep.axes import Combination, without_training
from tools.sweep.building import recipe_of

NAME = "llama"
WHAT = "a LLaMA of 3M parameters through pretrain_gpt.py, 300 steps of 16,384 tokens"
RESULTS = Path("benchmarks/results/study-sweep.jsonl")  # of the study of the matrix sweep.yaml
KEYS = {"status", "configuration"}
RECIPE = "tools.sweep.building:combined"
BASELINES = ["bf16", "tetrajet", "mxfp4-rht-sr"]
# Beside the best combinations. 128, the group of quartet-2, does not divide 704, the width of the
# MLP.
OTHERS = [
    *BASELINES, "ue5m3", "nvfp4-nvidia", "four-over-six", "quartet-2,hadamard=64", "dge-occ",
    "mxfp4", "fp8", "tetrajet-fp8",
]  # fmt: skip
FRESH_SEEDS = [3, 4, 5]  # none of BLOCK's
TEXT = {"megabytes": 100, "vocabulary": 8192, "held_out_share": 0.02}
# The best rates of BF16 in so many steps, of the linears and of embedding and output layer: see the
# study two-rates-3M.
BLOCK: dict[str, Any] = {
    "sizes": ["3M"], "learning_rates": [1.5e-3], "steps": [300], "seeds": [1, 2]
}  # fmt: skip
FLAGS = ["--decoupled-lr", "0.024"]
# Keys of a run's configuration, and of BLOCK, by which a run is one of the matrix.
_OF_BLOCK = [
    ("size", "sizes"), ("learning_rate", "learning_rates"), ("steps", "steps"), ("seed", "seeds"),
]  # fmt: skip
MULTIPLE = 64  # all sizes of the model are multiples of it; a block or group may not be larger


def matrix(combinations: Iterable[Combination]) -> str:
    """A matrix, as YAML, that trains BASELINES, and these combinations if they fit the model.

    Axes of the training around the recipe are left out: Megatron's optimizer is the same for all.
    """
    what = "whether the small tasks of a sweep say anything of a language model"
    return _written(what, recipes(combinations), BLOCK)


def recipes(combinations: Iterable[Combination]) -> list[str]:
    """The recipes of `matrix`."""
    return [*BASELINES, *dict.fromkeys(recipe(each) for each in combinations if _fits(each))]


def matrix_of_best(combinations: Iterable[Combination]) -> str:
    """A matrix, as YAML, that trains OTHERS and these combinations with FRESH_SEEDS."""
    what = (
        "whether the best combinations of the sweep are as good with seeds that did not choose them"
    )
    best = dict.fromkeys(recipe(each) for each in combinations)
    return _written(what, [*OTHERS, *best], BLOCK | {"seeds": FRESH_SEEDS})


def _written(what: str, recipes: list[str], block: dict[str, Any]) -> str:
    """A matrix of one block, as YAML."""
    found = {
        "what": what,
        "text": TEXT,
        "against": BASELINES[:1],
        "flags": " ".join(FLAGS),
        "runs": [{"recipes": recipes, **block}],
    }
    return yaml.safe_dump(found, sort_keys=False, width=1000)


def _fits(combination: Combination) -> bool:
    """Whether the sizes of the model are multiples of all blocks and groups of a combination."""
    found = recipe_of(combination)
    return all(MULTIPLE % contracted_multiple(found.gemm(gemm)) == 0 for gemm in GEMMS)


def recipe(combination: Combination) -> str:
    """A combination as an entry of a matrix."""
    chosen = without_training(combination).chosen
    return ",".join([RECIPE, *(f"{axis}={value}" for axis, value in chosen.items())])


def read(path: Path) -> list[Row]:
    """The rows of a study's result file; none if there is no such file.

    Raises ValueError, which names the file, the line and the keys, if a row lacks keys that this
    module needs.
    """
    found = jsonl.read(path, KEYS)
    for number, row in enumerate(found, start=1):
        lacking = {"recipe", "flags", *dict(_OF_BLOCK)} - set(row["configuration"])
        if row["status"] == "finished":
            lacking |= {"held_out", "milliseconds"} - set(row)
        if lacking:
            raise ValueError(f"{path}:{number} lacks {', '.join(sorted(lacking))}: delete the line")
    return found


def trained(study: Iterable[Row]) -> set[str]:
    """The recipes whose runs of all seeds have finished or failed, in rows of a study's results."""
    seeds: dict[str, set[int]] = {}
    for run in (row["configuration"] for row in study):
        if _of_matrix(run):
            seeds.setdefault(run["recipe"], set()).add(run["seed"])
    return {name for name, own in seeds.items() if len(own) == len(BLOCK["seeds"])}


def rows(study: Iterable[Row], stars: Mapping[Combination, str]) -> list[Row]:
    """A sweep's rows of this stage, of the recipes whose runs of all seeds have finished.

    study: rows of a study's results; those with other values than BLOCK and FLAGS do not count.
    stars: of the combinations of the stages before; those that train the same recipe get its
    result.
    """
    losses: dict[str, dict[str, dict[str, float]]] = {}
    taken: Counter[str] = Counter()  # seconds
    for row in study:
        run = row["configuration"]
        if row["status"] == "finished" and _of_matrix(run):
            own = losses.setdefault(run["recipe"], {})
            own[str(run["seed"])] = {"loss": row["held_out"][-1][1]}
            taken[run["recipe"]] += row["milliseconds"] * run["steps"] / 1000
    found = []
    for each, star in stars.items():
        name = recipe(each) if each.in_fp4 else BASELINES[0]
        seeds = losses.get(name, {})
        if len(seeds) == len(BLOCK["seeds"]):
            row = {"stage": NAME, "star": star, "combination": each.chosen, "seeds": seeds}
            row |= {"hash": f"{NAME}-{each.key}", "status": "finished", "seconds": taken[name]}
            found.append(row)
    return found


def _of_matrix(run: Mapping[str, Any]) -> bool:
    """Whether a run's configuration has values of BLOCK, and FLAGS."""
    flags, count = run["flags"], len(FLAGS)
    return all(run[key] in BLOCK[name] for key, name in _OF_BLOCK) and any(
        flags[i : i + count] == FLAGS for i in range(len(flags))
    )
