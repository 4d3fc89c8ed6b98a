"""A matrix of runs: read from YAML, and expanded to the configuration of every run."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.study.entries import BF16, is_bf16, read_entry, recipe_of
from benchmarks.study.errors import StudyError
from benchmarks.study.sizes import SIZES
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.data.errors import DataError
from tools import runs
from tools.installed_text import Text

FOLDER = Path(__file__).parent


class Point(NamedTuple):
    """A point of a matrix, which is one run.

    recipe: an entry. size: a name of SIZES. seed: of weights and of the order of the data.
    rounding_seed: of the random bits of FP4; None for BF16, which has none.
    """

    recipe: str
    size: str
    learning_rate: float
    steps: int
    seed: int
    rounding_seed: int | None

    def flags(self) -> list[str]:
        """The flags of the recipe."""
        entry = read_entry(self.recipe)
        if entry.is_bf16:
            return [*entry.flags]
        recipe = runs.recipe_flags(self.recipe.split()[0])
        return [*recipe, "--fp4-seed", str(self.rounding_seed), *entry.flags]


def ranks_of_model(flags: Sequence[str]) -> int:
    """The processes among which flags divide a model, by tensor and by pipeline parallelism.

    Raises StudyError for a size that is no positive integer.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
    sizes = [parser.add_argument(name, type=int, default=1).dest for name in names]
    try:
        found, _ = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise StudyError(str(error)) from error
    ranks = [getattr(found, size) for size in sizes]
    for name, size in zip(names, ranks, strict=True):
        if size < 1:
            raise StudyError(f"{name} is {size}: give 1 or more")
    return math.prod(ranks)


@dataclass(frozen=True)
class Block:
    """A part of a matrix: all combinations of its values.

    rounding_seeds: without any, a run's rounding seed is its seed.
    """

    recipes: list[str]
    sizes: list[str]
    learning_rates: list[float]
    steps: list[int]
    seeds: list[int]
    rounding_seeds: list[int] | None = None

    def points(self) -> list[Point]:
        """Every run once, seed by seed, so that an interrupted study has whole seeds."""
        found = []
        for size, seed, steps, rate, recipe in itertools.product(
            self.sizes, self.seeds, self.steps, self.learning_rates, self.recipes
        ):
            own: list[int | None] = [None]
            if not is_bf16(recipe):
                own = [*(self.rounding_seeds or [seed])]
            found += [Point(recipe, size, rate, steps, seed, rounding) for rounding in own]
        return found


@dataclass(frozen=True)
class Matrix:
    """A study.

    what: its question. against: the recipes that the others are compared with.
    metrics_interval: --fp4-metrics-interval of the runs in FP4; 0: no metrics. flags: further flags
    of every run. ranks: the data-parallel ranks of each run, which share its batch, on a GPU each;
    0: as many as the GPUs and the size allow, with the same results. evaluate_in: recipes, or BF16,
    in which each trained model is evaluated once more at the end.
    """

    name: str
    what: str
    text: Text
    runs: list[Block]
    against: list[str] = field(default_factory=lambda: [BF16])
    metrics_interval: int = 0
    flags: str = ""
    ranks: int = 0
    evaluate_in: list[str] = field(default_factory=list)

    def points(self) -> list[Point]:
        """Every run once."""
        return list(dict.fromkeys(point for block in self.runs for point in block.points()))


def names() -> list[str]:
    """The matrices of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(given: str) -> Matrix:
    """The matrix of a name of names(), or of a YAML file. Raises StudyError."""
    path = FOLDER / f"{given}.yaml" if given in names() else Path(given)
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StudyError(f"{given} is neither a file nor a matrix: {', '.join(names())}") from error
    except yaml.YAMLError as error:
        raise StudyError(f"{path.name} is not YAML: {' '.join(str(error).split())}") from error
    try:
        return _matrix(path.stem, found)
    except (StudyError, ConfigError, DataError) as error:
        raise StudyError(f"{path.name}: {error}") from error


def _matrix(name: str, found: Any) -> Matrix:
    if isinstance(found, dict) and "name" in found:
        raise StudyError("the matrix has no key name: its file's name is its name")
    values = _checked("the matrix", Matrix, found, name=name)
    amounts = _checked("text", Text, values["text"])
    for key, value in amounts.items():
        if not isinstance(value, int | float):
            raise StudyError(f"{key} is a number, not {value!r}")
    text = Text(**amounts)
    _ = text.options  # out of range: DataError
    for key in ("metrics_interval", "ranks"):
        if type(number := values.get(key, 0)) is not int or number < 0:
            raise StudyError(f"{key} is an integer from 0 on, not {number!r}")
    for key in ("what", "flags"):
        if not isinstance(values.get(key, ""), str):
            raise StudyError(f"{key} is a text, not {values[key]!r}")
    if not isinstance(values["runs"], list):
        raise StudyError("runs is a list of blocks")
    for key in ("against", "evaluate_in"):
        _check_entries(key, values.get(key, []))
    matrix = Matrix(**values | {"text": text, "runs": [_block(each) for each in values["runs"]]})
    _check_points(matrix)
    _check_evaluations(matrix)
    if "against" in values:
        _check_against(matrix)
    return matrix


def _check_entries(key: str, found: Any) -> None:
    """Raises StudyError if `found` is no list of entries."""
    if not isinstance(found, list):
        raise StudyError(f"{key} is a list, such as [{found}]")
    for each in found:
        if not isinstance(each, str) or not each.split():
            raise StudyError(f"{key}: {each!r} is no recipe: give a name, a recipe file or {BF16}")


def _check_points(matrix: Matrix) -> None:
    """Raises StudyError for flags that divide a model wrongly and for ranks that do not divide a
    batch, and ConfigError for a recipe that does not exist."""
    for point in matrix.points():
        ranks_of_model([*read_entry(point.recipe).flags, *matrix.flags.split()])
        if (batch := SIZES[point.size].batch) % max(matrix.ranks, 1):
            raise StudyError(
                f"ranks: {matrix.ranks} do not divide the batch of {point.size}, which has {batch} "
                "sequences"
            )
    entries = [*matrix.against, *matrix.evaluate_in, *(point.recipe for point in matrix.points())]
    for entry in dict.fromkeys(entries):
        recipe_of(entry)


def _check_evaluations(matrix: Matrix) -> None:
    """Raises StudyError if an entry of `evaluate_in` has flags, or if `evaluate_in` lacks BF16,
    which the losses of the other evaluations are compared with."""
    for recipe in matrix.evaluate_in:
        if read_entry(recipe).flags:
            raise StudyError(f"evaluate_in: {recipe} has flags, and takes a recipe alone")
    if matrix.evaluate_in and BF16 not in matrix.evaluate_in:
        raise StudyError(f"evaluate_in needs {BF16}, which the others are compared with: add it")


def _check_against(matrix: Matrix) -> None:
    """Raises StudyError for a recipe in `against` that no run of another recipe is paired with."""
    runs = [(p.recipe, p._replace(recipe="", rounding_seed=None)) for p in matrix.points()]
    for recipe in matrix.against:
        own = {place for name, place in runs if name == recipe}
        if not any(place in own for name, place in runs if name != recipe):
            raise StudyError(
                f"against: no other recipe has a run with the size, learning rate, steps and seed "
                f"of a run of {recipe}: add {recipe} to the block of those that it is compared with"
            )


def _block(found: Any) -> Block:
    values = _checked("runs", Block, found)
    for key, each in values.items():
        if not isinstance(each, list):
            raise StudyError(f"runs: {key} is a list, such as [{each}]")
        if not each:
            raise StudyError(f"runs: {key} is empty: give one value or more")
    _check_entries("runs: recipes", values["recipes"])
    for key in ("steps", "seeds", "rounding_seeds"):
        if wrong := [each for each in values.get(key, []) if type(each) is not int]:
            raise StudyError(f"runs: {wrong[0]} in {key} is no integer")
    if any(each < 1 for each in values["steps"]):
        raise StudyError("runs: steps are 1 or more")
    if unknown := [size for size in values["sizes"] if size not in [*SIZES]]:
        raise StudyError(f"runs: no size is called {unknown[0]}; there are {', '.join(SIZES)}")
    try:  # YAML 1.1 reads 2e-3, without a point, as text
        rates = [float(rate) for rate in values["learning_rates"]]
    except (TypeError, ValueError) as error:
        raise StudyError(f"runs: a learning rate is no number: {error}") from error
    if wrong := [rate for rate in rates if not 0 < rate < math.inf]:
        raise StudyError(f"runs: {wrong[0]} is no learning rate: give a number above 0")
    return Block(**values | {"learning_rates": rates})


def _checked(where: str, kind: Any, found: Any, **given: Any) -> dict[str, Any]:
    """The mapping `found` with `given`, if its keys are those of the dataclass `kind`."""
    if not isinstance(found, dict):
        raise StudyError(f"{where} is a mapping of keys to values")
    values = found | given
    known = [field.name for field in fields(kind)]
    if unknown := [key for key in values if key not in known]:
        raise StudyError(f"{where} has no key {unknown[0]}; there are {', '.join(known)}")
    needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
    if missing := [key for key in needed if key not in values]:
        raise StudyError(f"{where} needs the key {missing[0]}")
    return values
