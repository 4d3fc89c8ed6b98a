"""The complete configuration of a run, and its hash, by which a finished run is found again."""

import hashlib
import json
from typing import Any

from benchmarks.study.matrix import BF16, Point
from benchmarks.study.sizes import SIZES
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from tools import runs


def configuration(point: Point, metrics_interval: int, text: dict[str, Any]) -> dict[str, Any]:
    """All that the result of a run depends on, as JSON, besides versions and the machine.

    text: of text.described(). "flags" are those of the launch but for paths and for the layout.
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
    flags = [*size.flags(training), *point.flags()]
    if point.recipe != BF16:
        flags += ["--fp4-metrics-interval", str(metrics_interval)]
    found = {"flags": flags, "text": text["sha256"], "numerics": NUMERICS_VERSION}
    return point._asdict() | found


def hash_of(configuration: dict[str, Any]) -> str:
    """16 hexadecimal digits of the SHA-256 of a configuration."""
    content = json.dumps(configuration, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def point_of(configuration: dict[str, Any]) -> Point:
    """The point of a matrix that a recorded configuration is of."""
    return Point(**{name: configuration[name] for name in Point._fields})
