"""metrics.jsonl, which rank 0 of a run writes, as a Run.

Each line is a JSON object with a "kind": run (one for each start), step, evaluation, operand,
weight, gradient or warning. Lines of other kinds and keys that are not known are skipped. What was
written again for the same step, as by a run that was resumed, replaces what was there.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fp4.errors import ConfigError
from megatron_fp4.metrics.records import FILE

_MOST_BINS = 1024  # the exponents of float32 are a quarter of these
_STEPS = range(2**53)  # integers that JavaScript tells apart


@dataclass
class Points:
    """Values of one metric, in the order of the file: the last of a layer and step counts.

    layers: indices into `Run.layers`. values: NaN where the file has null.
    """

    layers: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, layer: int, step: int, value: float | None) -> None:
        """Adds a value; None is one that is missing."""
        self.layers.append(layer)
        self.steps.append(step)
        self.values.append(math.nan if value is None else value)


class Histogram(NamedTuple):
    """counts[i] elements are in the bin that begins at first + i * width."""

    first: float
    width: float
    counts: array[float]


@dataclass
class Run:
    """What metrics.jsonl says.

    Groups of metrics are operands, "fprop.w", and "weight" and "gradient".

    starts: each start of the run: time, step, recipe ("" without one), lines (the start table),
        environment and arguments, all as text but the step.
    steps: loss, grad_norm, learning_rate and tokens_per_second of each step; None is not known.
    evaluations: the held-out loss by step.
    layers: the index of each layer's name.
    maps: metrics that are a number, by group and name.
    histograms: metrics that are histograms, by group and name, then by layer and step.
    warnings: step, layer, operand, metric and line, by their first four, in the order of the steps.
    unreadable: the number of lines that were left out because they are damaged.
    """

    name: str
    starts: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[int, dict[str, float | None]] = field(default_factory=dict)
    evaluations: dict[int, float | None] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    maps: dict[tuple[str, str], Points] = field(default_factory=lambda: defaultdict(Points))
    histograms: dict[tuple[str, str], dict[tuple[int, int], Histogram]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    warnings: dict[tuple[int, str, str, str], dict[str, Any]] = field(default_factory=dict)
    unreadable: int = 0


def metrics_file(run: Path) -> Path:
    """The metrics.jsonl of `run`, a folder or the file itself. Raises ConfigError."""
    file = run / FILE if run.is_dir() else run
    if not file.exists():
        raise ConfigError(
            f"{file}: no such file or folder; give the folder in which a run wrote {FILE}, or that "
            "file"
        )
    return file


def read(run: Path) -> Run:
    """Reads the metrics of `run`, a folder or the file itself.

    Raises ConfigError if there is no such file, or nothing in it that the page could show.
    """
    file = metrics_file(run)
    found = Run(name=str(run))
    known = 0
    for record in _records(file, found):
        try:
            known += _add(found, record)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            found.unreadable += 1
    if not known:
        reason = "is empty" if file.stat().st_size == 0 else "has no line of a run's metrics"
        raise ConfigError(f"{file} {reason}; give the {FILE} of a run that has logged a step")
    found.warnings = dict(sorted(found.warnings.items(), key=lambda warning: warning[0][0]))
    return found


def _records(file: Path, run: Run) -> Iterator[dict[str, Any]]:
    """The objects of the lines. A last line that is cut off is skipped, not counted as damaged."""
    try:
        with file.open("rb") as lines:
            for line in lines:
                record = _parsed(line)
                if record is not None:
                    yield record
                elif line.endswith(b"\n") and line.strip():
                    run.unreadable += 1
    except OSError as error:
        raise ConfigError(f"{file}: not readable: {error.strerror}") from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    # A run that was killed while it wrote a line leaves its beginning, and the resumed run's first
    # line may follow it without a line break: the object that ends the line is read.
    for start in (0, max(line.rfind(b'{"kind"'), 0)):
        try:
            record = json.loads(line[start:], parse_constant=lambda name: None)  # NaN, Infinity
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return record
    return None


def _add(run: Run, record: dict[str, Any]) -> bool:
    """Adds a line's object to `run`; returns whether its kind is known."""
    add = _ADD.get(str(record.get("kind")))
    if add is not None:
        add(run, record)
    return add is not None


def _add_run(run: Run, record: dict[str, Any]) -> None:
    run.starts.append(
        {
            "time": _text(record.get("time", "")),
            "step": _step(record),
            "recipe": _text(record.get("recipe") or ""),
            "lines": [_text(line) for line in record.get("lines", [])],
            "environment": _texts(record.get("environment", {})),
            "arguments": _texts(record.get("arguments", {})),
        }
    )


def _add_step(run: Run, record: dict[str, Any]) -> None:
    seconds, tokens = _number(record.get("seconds")), _number(record.get("tokens"))
    run.steps[_step(record)] = {
        **{name: _number(record.get(name)) for name in ("loss", "grad_norm", "learning_rate")},
        "tokens_per_second": _number(tokens / seconds) if tokens is not None and seconds else None,
    }


def _add_evaluation(run: Run, record: dict[str, Any]) -> None:
    run.evaluations[_step(record)] = _number(record.get("loss"))


def _add_metrics(run: Run, record: dict[str, Any]) -> None:
    group = str(record["kind"])
    if group == "operand":
        group = f"{_text(record['gemm'])}.{_text(record['operand'])}"
    step = _step(record)
    layer = run.layers.setdefault(_text(record["layer"]), len(run.layers))
    for metric, value in record["metrics"].items():
        if isinstance(value, dict):
            if histogram := _histogram(value):
                run.histograms[group, metric][layer, step] = histogram
        elif value is None or isinstance(value, int | float):
            run.maps[group, metric].add(layer, step, _number(value))


def _add_warning(run: Run, record: dict[str, Any]) -> None:
    step = _step(record)
    layer, operand, metric, line = (
        _text(record.get(name, "")) for name in ("layer", "operand", "metric", "line")
    )
    run.warnings[step, layer, operand, metric] = {
        "step": step,
        "layer": layer,
        "operand": operand,
        "metric": metric,
        "line": line or f"step {step}: {metric} of {operand} in {layer} is unusual",
    }


_ADD: dict[str, Callable[[Run, dict[str, Any]], None]] = {
    "run": _add_run,
    "step": _add_step,
    "evaluation": _add_evaluation,
    "operand": _add_metrics,
    "weight": _add_metrics,
    "gradient": _add_metrics,
    "warning": _add_warning,
}


def _step(record: dict[str, Any]) -> int:
    step = record["step"]
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"a step is an integer, not {step!r}")
    if step not in _STEPS:
        raise ValueError(f"no run has a step {step}")
    return step


def _number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _histogram(value: dict[str, Any]) -> Histogram | None:
    first, width = _number(value.get("first")), _number(value.get("width", 1))
    counts = value.get("counts")
    if first is None or width is None or not isinstance(counts, list):
        return None
    if width <= 0 or max(abs(first / width), len(counts)) > _MOST_BINS:
        return None
    try:
        found = array("d", counts)
    except TypeError:  # some count is null
        found = array("d", (_number(count) or 0.0 for count in counts))
    return Histogram(first, width, found)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in values.items()}
