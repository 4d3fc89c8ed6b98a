"""Where metrics are written: metrics.jsonl on rank 0, and Megatron's TensorBoard and W&B writers.

A line of metrics.jsonl is one JSON object, which "kind" names: run (one for each start), step and
evaluation (what Megatron's log says), operand, weight, gradient and warning; without a recipe, the
first three. NaN and infinities are null. T stands for megatron/training.
"""

import argparse
import json
import math
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from torch import distributed as dist

from megatron_fp4 import __version__
from megatron_fp4.mcore.launch.fp4_arguments import metrics_folder
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.metrics.bands import KEPT, Bands, summary
from megatron_fp4.metrics.records import FILE, Record

VERSION = 1  # of the lines of FILE
_NUMBER = r"([-+.\deE]+|nan|inf)"
_STEP = {  # what is read of a line of the training log, by key
    "step": rf" iteration +{_NUMBER}/",
    "loss": rf" global batch size: +\d+ \| (?!loss scale)[^:|]+: {_NUMBER} \|",
    "grad_norm": rf" grad norm: {_NUMBER} \|",
    "learning_rate": rf" learning rate: {_NUMBER} \|",
    "seconds": rf" elapsed time per iteration \(ms\): {_NUMBER} \|",
    "tokens": rf" global batch size: +{_NUMBER} \|",
}
# Most lines of FILE need not be parsed to know that they are of other steps.
_REPORTED = re.compile(rb'\{"kind": "(?:operand|weight|gradient|warning)", "step": (\d+),')
_EVALUATION = re.compile(
    rf" validation\S* loss at iteration (\d+)(?: on validation set)? \| (?:[^:]+: {_NUMBER} )?"
)


@dataclass(frozen=True)
class WithoutRecipe:
    """What is logged of a launch that has no Run. start_table: what it prints when it starts."""

    args: argparse.Namespace
    start_table: str


class MetricsLog:
    """Writes records. Every rank has one; that of rank 0 writes FILE, that of the last rank to
    Megatron's writers."""

    def __init__(self, run: Run | WithoutRecipe) -> None:
        self._run = run
        self._begun = False
        self._bands = Bands()
        path = metrics_folder(run.args) if run.args.rank == 0 else None
        self._path = None if path is None else Path(path) / FILE

    def begin(self) -> None:
        """Writes the record of the run, if it was not written yet.

        A run that is resumed takes up the bands of the launches before it.
        """
        if self._begun:
            return
        self._begun = True
        args = self._run.args
        if self._path is not None and self._path.exists():
            first = args.iteration - KEPT * args.fp4_metrics_interval + 1
            try:
                self._bands.remember(reports(self._path, first, args.iteration))
            except OSError as error:
                self._end(error)
        self._append([run_record(self._run)])

    def write(self, records: list[Record]) -> None:
        """Writes the records of operands, weights and gradients, and the warnings about them."""
        self.begin()
        if self._path is not None:
            warnings = self._bands.judge(records)
            self._append([*warnings, *records])
            for line in summary(warnings):
                print(f"megatron-fp4: warning: {line}", flush=True)
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if writer is None and wandb is None:  # on all ranks but the last
            return
        step = records[0]["step"] if records else 0
        values = dict(scalars(records))
        if writer is not None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        if wandb is not None:
            wandb.log(values, step)

    def following(self, upstream: Callable[[str], None]) -> Callable[[str], None]:
        """`upstream`, T/utils's print_rank_last, which writes the log's lines as records too.

        All ranks call it with a line of the same kind. Losses are on the last rank.
        """

        @wraps(upstream)
        def print_rank_last(message: str) -> None:
            upstream(message)
            record = log_record(message, self._run.args.seq_length)
            if record is not None:
                self.begin()
                self._append([_from_last_rank(record)])

        return print_rank_last

    def _append(self, records: Iterable[Record]) -> None:
        if self._path is None:
            return
        try:
            append(self._path, records)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        sys.stderr.write(f"megatron-fp4: metrics are not written: {self._path}: {error.strerror}\n")
        self._path = None


def append(path: Path, records: Iterable[Record]) -> None:
    """Appends records to a file. A last line that was cut off, as in a killed run, is removed."""
    text = "".join(json.dumps(finite(record), allow_nan=False) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        end = file.seek(0, 2)
        while end and _byte(file, end - 1) != b"\n":
            end -= 1
        file.truncate(end)
        file.write(text.encode())


def reports(path: Path, first: int, last: int) -> list[Record]:
    """The records of operands, weights, gradients and warnings of the steps from `first` to `last`,
    in the order of the steps. Of what was written again for a step, the last counts."""
    found: dict[tuple[Any, ...], Record] = {}
    with path.open("rb") as file:
        for line in file:
            start = _REPORTED.match(line)
            if start is None or not first <= int(start[1]) <= last:
                continue
            try:
                record = json.loads(line)
            except ValueError:  # a line that was cut off
                continue
            names = [record.get(key) for key in ("kind", "layer", "gemm", "operand", "metric")]
            found[record["step"], *names] = record
    return sorted(found.values(), key=lambda each: (each["step"], each["kind"] != "warning"))


def _byte(file: Any, place: int) -> bytes:
    file.seek(place)
    found: bytes = file.read(1)
    return found


def finite(value: Any) -> Any:
    """`value` as JSON can write it: numbers that are not finite are None, unknown objects text."""
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def run_record(run: Run | WithoutRecipe) -> Record:
    """The record of a start of the run. With --fp4-format its recipe is upstream's."""
    gpu = torch.cuda.is_available()
    return {
        "kind": "run",
        "version": VERSION,
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "step": run.args.iteration,
        "recipe": run.recipe.name if isinstance(run, Run) else run.args.fp4_recipe,
        "lines": run.start_table.splitlines(),
        "environment": {
            "megatron-fp4": __version__,
            "megatron-core": version("megatron-core"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if gpu else "CPU",
            "ranks": dist.get_world_size(),
        },
        "arguments": vars(run.args),
    }


def log_record(line: str, sequence: int) -> Record | None:
    """The record of a line of Megatron's log; None if it is neither of a step nor an evaluation.

    sequence: the length of a sequence in tokens.
    """
    if (found := _EVALUATION.match(line)) is not None:
        loss = None if found[2] is None else float(found[2])
        return {"kind": "evaluation", "step": int(found[1]), "loss": loss}
    read = {key: re.search(pattern, line) for key, pattern in _STEP.items()}
    if read["step"] is None or read["seconds"] is None:
        return None
    record: Record = {"kind": "step"}
    record |= {key: None if found is None else float(found[1]) for key, found in read.items()}
    record["step"] = int(record["step"])
    record["seconds"] /= 1000
    record["tokens"] = int(record["tokens"]) * sequence
    return record


def _from_last_rank(record: Record) -> Record:
    """The last rank's record, of the same keys; all ranks must call it."""
    numbers = [
        float("nan") if record[key] is None else record[key] for key in record if key != "kind"
    ]
    sent = torch.tensor(numbers, dtype=torch.float64, device=_device())
    dist.broadcast(sent, dist.get_world_size() - 1)
    of_last = iter(sent.tolist())
    kept = {key: value if key == "kind" else next(of_last) for key, value in record.items()}
    for key in ("step", "tokens"):
        if key in kept:
            kept[key] = int(kept[key])
    return kept


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def scalars(records: Iterable[Record]) -> Iterable[tuple[str, float]]:
    """(name, value) of each number in the records; histograms are left out."""
    for record in records:
        operand = f"/{record['gemm']}.{record['operand']}" if "gemm" in record else ""
        for metric, value in record["metrics"].items():
            if isinstance(value, int | float):
                yield f"fp4-{metric}/{record['layer']}{operand}", value
