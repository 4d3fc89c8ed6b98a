"""The last stage: a small LLaMA through pretrain_gpt.py, as a matrix of benchmarks/study."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import yaml

from tools.rows import Row
from tools.sweep.axes import TRAINING, Combination, first

NAME = "llama"
RECIPE = "tools.sweep.building:combined"
BASELINES = ["bf16", "tetrajet", "mxfp4-rht-sr"]
TEXT = {"megabytes": 100, "vocabulary": 8192, "held_out_share": 0.02}
BLOCK = {"sizes": ["3M"], "learning_rates": [1e-3], "steps": [600], "seeds": [1, 2]}


def matrix(combinations: Iterable[Combination]) -> str:
    """A matrix, as YAML, that trains these combinations and BASELINES.

    Axes of the training around the recipe are left out: Megatron's optimizer is the same for all.
    """
    recipes = dict.fromkeys(recipe(each) for each in combinations)
    found = {
        "what": "whether the small tasks of a sweep say anything of a language model",
        "text": TEXT,
        "against": BASELINES[:1],
        "runs": [{"recipes": [*BASELINES, *recipes], **BLOCK}],
    }
    return yaml.safe_dump(found, sort_keys=False, width=1000)


def recipe(combination: Combination) -> str:
    """A combination as an entry of a matrix."""
    plain = replace(combination, **{axis: first(axis) for axis in TRAINING})
    return ",".join([RECIPE, *(f"{axis}={value}" for axis, value in plain.chosen.items())])


def rows(finished: Iterable[Row], stars: dict[Combination, str]) -> list[Row]:
    """A sweep's rows of this stage, from the finished runs of a study.

    stars: of the combinations of the stage before; those that train the same recipe get its result.
    """
    losses: dict[str, dict[str, dict[str, float]]] = {}
    for row in finished:
        own = losses.setdefault(row["configuration"]["recipe"], {})
        own[str(row["configuration"]["seed"])] = {"loss": row["held_out"][-1][1]}
    found = []
    for each, star in stars.items():
        name = recipe(each) if each.quantized else BASELINES[0]
        if seeds := losses.get(name):
            row = {"stage": NAME, "star": star, "combination": each.chosen, "seeds": seeds}
            found.append(row | {"hash": f"{NAME}-{each.key}", "status": "finished"})
    return found
