"""The complete configuration of a run, and its hash, by which a finished run is found again."""

import hashlib
import json
from typing import Any

from benchmarks.study.entries import is_bf16, read_entry, recipe_of
from benchmarks.study.matrix import Matrix, Point
from benchmarks.study.sizes import SIZES
from megatron_fp4 import Recipe
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipes import content
from tools import runs


def configuration(matrix: Matrix, point: Point, text: dict[str, Any]) -> dict[str, Any]:
    """All that the result of a run depends on, as JSON, besides versions and the machine.

    point: of the matrix. text: of installed_text.described(). "flags" are those of the launch but
    for what Launch adds: paths, checkpoints and the end of a launch. "ranks" is there if the matrix
    says how many share the batch, "evaluate_in" if it says by which recipes the model is evaluated
    at the end, and "recipe_fields" if the recipe is a file, whose content may change under its
    name.
    """
    size = SIZES[point.size]
    training = runs.Training(
        steps=point.steps,
        batch=size.batch,
        learning_rate=point.learning_rate,
        # An evaluation reads all whole batches of the held-out text, the same for all seeds.
        held_out_batches=max(text["held_out"]["tokens"] // size.tokens, 1),
        seed=point.seed,
    )
    flags = [*size.flags(training, max(matrix.ranks, 1)), *point.flags(), *matrix.flags.split()]
    if not is_bf16(point.recipe):
        flags += ["--fp4-metrics-interval", str(matrix.metrics_interval)]
    found: dict[str, Any] = {"flags": flags, "text": text["sha256"], "numerics": NUMERICS_VERSION}
    if matrix.ranks:
        found["ranks"] = matrix.ranks
    if matrix.evaluate_in:
        found["evaluate_in"] = {entry: _content(entry) for entry in matrix.evaluate_in}
    if fields := _content(point.recipe):
        found["recipe_fields"] = fields
    return point._asdict() | found


def _content(entry: str) -> dict[str, Any]:
    """The fields of an entry's recipe if it is a file; {} of one that has a name."""
    return _fields(recipe_of(entry)) if read_entry(entry).is_file else {}


def _fields(recipe: Recipe) -> dict[str, Any]:
    """All fields of a recipe with their values, as `json.loads` returns them."""
    return content.fields_of(content.write(recipe))


def of_this_version(configuration: dict[str, Any]) -> dict[str, Any]:
    """A recorded configuration as `configuration` makes it today.

    The recipe of a file is recorded by its fields. An earlier version of the package may have had
    fewer, whose defaults are the same recipe. Fields that this version cannot read stay as they
    are.
    """
    found = dict(configuration)
    if "recipe_fields" in found:
        found["recipe_fields"] = _fields_of_this_version(found["recipe_fields"])
    if "evaluate_in" in found:
        found["evaluate_in"] = {
            entry: _fields_of_this_version(fields) if fields else fields
            for entry, fields in found["evaluate_in"].items()
        }
    return found


def _fields_of_this_version(fields: dict[str, Any]) -> dict[str, Any]:
    try:
        return _fields(content.read(json.dumps(fields)))
    except ConfigError:
        return fields


def hash_of(configuration: dict[str, Any]) -> str:
    """16 hexadecimal digits of the SHA-256 of a configuration."""
    text = json.dumps(configuration, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def point_of(configuration: dict[str, Any]) -> Point:
    """The point of a matrix that a recorded configuration is of."""
    return Point(**{name: configuration[name] for name in Point._fields})
