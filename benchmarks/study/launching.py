"""One run of a study: launches pretrain_gpt.py, from its checkpoint if it has one; its row."""

from __future__ import annotations

import math
import re
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.study.configuration import hash_of
from benchmarks.study.entries import is_bf16
from benchmarks.study.sizes import SIZES
from megatron_fp4.metrics import records
from megatron_fp4.metrics.weights import window
from megatron_fp4.report import reading
from tools import runs
from tools.rows import Row

# For each group of metrics ("weight", "fprop.w") and metric: (step, mean over the linears).
Metrics = dict[str, dict[str, list[tuple[int, float]]]]
MARGIN = 0.5  # minutes of a launch in which it does not train: imports, its last checkpoint
_INTERVAL = "--fp4-metrics-interval"
_STOPPED = "exiting program after"  # Megatron's line at the end of --exit-duration-in-mins
# The folders of an absolute path without spaces, which is no part of a URL or of a relative path.
_FOLDERS = re.compile(r"""(?<![\w.~:*/])/(?:[^\s'":/]+/)*(?=[^\s'"/])""")


@dataclass(frozen=True)
class Launch:
    """A run, as it is launched.

    configuration: of configuration(). work: the folder of the study's runs. data: the prepared
    data's folder. devices: GPUs as CUDA_VISIBLE_DEVICES names them, such as "0,1"; "" for the CPU.
    processes: of the run.
    """

    configuration: dict[str, Any]
    work: Path
    data: Path
    devices: str
    processes: int = 1

    @property
    def folder(self) -> Path:
        """The folder of the run: logs, metrics, and the checkpoint until it has finished."""
        return self.work / hash_of(self.configuration)

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def _saved_step(self) -> str:
        """The step of the run's last checkpoint, as Megatron writes it; "" if it has none."""
        path = self._checkpoints / "latest_checkpointed_iteration.txt"
        return path.read_text().strip() if path.exists() else ""

    def flags(self, minutes: float | None) -> list[str]:
        """All flags. minutes: after so many a checkpoint is saved and the launch ends."""
        size = SIZES[self.configuration["size"]]
        flags = self._with_data(self.configuration["flags"])
        flags += ["--save", str(self._checkpoints), "--save-interval", str(size.save_interval)]
        if self._saved_step:
            flags += ["--load", str(self._checkpoints)]
        if minutes is not None:
            flags += ["--exit-duration-in-mins", str(math.floor(minutes - MARGIN))]
        return flags

    def _with_data(self, own: list[str]) -> list[str]:
        """The flags `own` of a launch, on this run's text."""
        # runs.launch shards tensors over all processes. Here it is the configuration that says so.
        flags = ["--tensor-model-parallel-size", "1", *own, *runs.data_flags(self.data)]
        # Runs side by side would write the same file if they shared a cache of shuffled indices.
        return [*flags, "--data-cache-path", str(self.folder / "cache")]

    def run(self, minutes: float | None) -> Row | None:
        """Trains to the end, or for `minutes`; the row of the result, None if there is more to do.

        The checkpoint of a run that has finished is removed.
        """
        deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
        try:
            held_out = self._trained(minutes)
            if held_out is None:
                return None
            if not math.isfinite(held_out):
                return self._failed(f"the held-out loss is {held_out}")
            evaluated = self._evaluated(deadline)
        except runs.RunFailed as failure:
            return self._failed(error_line(failure))
        if evaluated is None:
            return None
        found = curves(self._logs()) | {"evaluated": evaluated}
        return (
            self._row("finished") | found | {"window": self._window(), "metrics": self._collected()}
        )

    def _logs(self) -> list[Path]:
        """The logs of the run's training launches, the first launch first."""
        found = self.folder.glob("train-*.log")
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def _trained(self, minutes: float | None) -> float | None:
        """Trains what is left, for `minutes`; nothing if an earlier launch trained the last step.

        Returns the held-out loss after the last step, or None if steps are left. Raises RunFailed
        if the launch fails.
        """
        earlier, steps = self._logs(), self.configuration["steps"]
        if earlier and self._saved_step == str(steps):
            held_out = held_out_at(earlier[-1], steps)
            if held_out is not None and math.isfinite(held_out):
                return held_out
        for evaluation in self.folder.glob("evaluation-*.log"):
            evaluation.unlink()  # of an earlier model: _evaluated takes what it finds
        path = self.folder / f"train-{len(earlier) + 1:02}.log"
        try:
            self._launch(self.flags(minutes), path)
        except runs.RunFailed:
            if _STOPPED in path.read_text(errors="replace"):
                return None
            raise
        return held_out_at(path, steps)

    def _evaluated(self, deadline: float) -> dict[str, float] | None:
        """Evaluates the trained model in each recipe of the configuration's "evaluate_in".

        Returns the held-out loss by entry; None if the deadline, of time.monotonic(), has passed
        before all have begun. Those that an earlier call made are not made again. Raises RunFailed
        if an evaluation fails.
        """
        found = {}
        for number, entry in enumerate(self.configuration.get("evaluate_in", [])):
            path = self.folder / f"evaluation-{number + 1:02}.log"
            held_out = held_out_at(path, self.configuration["steps"]) if path.exists() else None
            if held_out is None or not math.isfinite(held_out):
                if time.monotonic() >= deadline:
                    return None
                held_out = self._evaluation(entry, path)
            found[entry] = held_out
        return found

    def _evaluation(self, entry: str, path: Path) -> float:
        """Evaluates the trained model in the recipe `entry`; returns its held-out loss.

        path: the file that the launch's log is written to. Raises RunFailed if the launch fails or
        the loss is not finite.
        """
        flags = self._with_data(evaluation_flags(self.configuration["flags"], entry))
        held_out = self._launch([*flags, "--load", str(self._checkpoints)], path).held_out[-1][1]
        if not math.isfinite(held_out):
            raise runs.RunFailed(f"the held-out loss in {entry} is {held_out}")
        return held_out

    def _launch(self, flags: list[str], path: Path) -> runs.Log:
        environment = {"CUDA_VISIBLE_DEVICES": self.devices, "OMP_NUM_THREADS": "1"}
        return runs.run(runs.launch(self.processes, flags), path, environment=environment)

    def _failed(self, error: str) -> Row:
        return self._row("failed") | {"error": error}

    def _row(self, status: str) -> Row:
        return {
            "hash": hash_of(self.configuration),
            "status": status,
            "configuration": self.configuration,
            "processes": self.processes,
        }

    def _window(self) -> int:
        """The number of steps over which r(W), r(W_Q) and R_w are measured; 0 for a run without
        metrics."""
        flags = self.configuration["flags"]
        return window(int(flags[flags.index(_INTERVAL) + 1])) if _INTERVAL in flags else 0

    def _collected(self) -> Metrics:
        """The metrics of a run that has finished; removes what it does not need any more."""
        kept = self.folder / records.FILE
        if (written := self._checkpoints / records.FILE).exists():
            written.replace(kept)
        for name in ("checkpoints", "cache"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        return averaged(kept) if kept.exists() else {}


def evaluation_flags(flags: list[str], entry: str) -> list[str]:
    """The flags of a launch that evaluates a trained model in another precision without training.

    flags: the flags of the model's training, whose `--fp4-...` flags are left out. entry: the
    recipe of the evaluation, as matrices name it, or BF16.
    """
    kept, is_fp4 = [], False
    for word in flags:
        is_fp4 = word.startswith("--fp4") if word.startswith("--") else is_fp4
        kept += [] if is_fp4 else [word]
    own = [] if is_bf16(entry) else [*runs.recipe_flags(entry), "--fp4-load-anyway"]
    return [*kept, *own, "--skip-train"]


def curves(paths: list[Path]) -> dict[str, Any]:
    """What the logs of a run's launches say, in their order: the last of each step counts.

    "train", "held_out" and "grad_norms" are lists of (step, number). Numbers that are not finite
    are left out, since JSON has none. "milliseconds" is the median time of a step.
    """
    log, times = runs.Log(), []
    for path in paths:
        for line in path.read_text(errors="replace").splitlines():
            evaluations = len(log.held_out)
            if log.read(line) and len(log.held_out) == evaluations:
                times.append(log.milliseconds)
    found: dict[str, Any] = {}
    for name in ("held_out", "train", "grad_norms"):
        last = dict(getattr(log, name))
        found[name] = sorted(each for each in last.items() if math.isfinite(each[1]))
    return found | {"milliseconds": statistics.median(times)}


def held_out_at(path: Path, step: int) -> float | None:
    """The held-out loss of a step in a launch's log; None if the log has none."""
    log = runs.Log()
    for line in path.read_text(errors="replace").splitlines():
        log.read(line)
    return dict(log.held_out).get(step)


def averaged(path: Path) -> Metrics:
    """For each metric in a run's metrics.jsonl, (step, mean over the linears) of each report.

    Numbers that are not finite do not count. Histograms are left out.
    """
    found: Metrics = {}
    for (group, metric), points in reading.read(path).maps.items():
        # What a resumed run wrote again replaces what was there.
        last = dict(zip(zip(points.steps, points.layers, strict=True), points.values, strict=True))
        by_step: dict[int, list[float]] = {}
        for (step, _), value in last.items():
            if math.isfinite(value):
                by_step.setdefault(step, []).append(value)
        means = [(step, sum(own) / len(own)) for step, own in sorted(by_step.items())]
        found.setdefault(group, {})[metric] = means
    return found


def error_line(failure: runs.RunFailed) -> str:
    """The last line of a failed launch's log, without the machine's folders.

    Result files are committed, so they name no folder of a machine. A path in the checkout becomes
    relative to it, and of any other absolute path the last part stays.
    """
    *log, closing = str(failure).splitlines()  # the last one says how the launch ended
    lines = [line for line in log or [closing] if line.strip()]
    line = lines[-1] if lines else "no output"
    return _FOLDERS.sub("", line.replace(f"{runs.ROOT}/", "")).strip()[:300]
