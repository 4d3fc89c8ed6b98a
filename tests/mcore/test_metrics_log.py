"""What TensorBoard and Weights & Biases get of a report, and which ranks write what."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from megatron_fp4.mcore.loop import metrics_log
from megatron_fp4.mcore.loop.metrics_log import MetricsLog
from testing.worlds.metrics import kinds, read

LAYER = "decoder.layers.0.mlp.linear_fc1"
OPERAND = {
    "kind": "operand", "step": 200, "layer": LAYER, "gemm": "fprop", "operand": "w",
    "metrics": {"zeros": 0.25, "gain": None, "scales": {"first": -3, "counts": [1, 2]}},
}  # fmt: skip
WEIGHT = {
    "kind": "weight", "step": 200, "layer": LAYER,
    "metrics": {"oscillating": 0.5, "confidences": {"first": 0.0, "width": 0.1, "counts": [4]}},
}  # fmt: skip
GRADIENT = {"kind": "gradient", "step": 200, "layer": LAYER, "metrics": {"norm": 2.0}}
RECORDS: list[dict[str, Any]] = [OPERAND, WEIGHT, GRADIENT]
# Numbers by name; histograms and missing values are left out.
SCALARS = {
    f"fp4-zeros/{LAYER}/fprop.w": 0.25,
    f"fp4-oscillating/{LAYER}": 0.5,
    f"fp4-norm/{LAYER}": 2.0,
}


class Wandb:
    """In place of the wandb module, which Megatron's writer is."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))


def log_of(rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> MetricsLog:
    args = Namespace(
        rank=rank, save=str(folder), tensorboard_dir=None, iteration=0, fp4_metrics_interval=100
    )
    monkeypatch.setattr(metrics_log, "run_record", lambda run: {"kind": "run"})
    return MetricsLog(Namespace(args=args))  # type: ignore[arg-type]


def writers(tensorboard: Any, wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "get_tensorboard_writer", lambda: tensorboard)
    monkeypatch.setattr(metrics_log, "get_wandb_writer", lambda: wandb)


def test_the_last_rank_writes_to_megatrons_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorboard, wandb = SummaryWriter(str(tmp_path / "events")), Wandb()
    writers(tensorboard, wandb, monkeypatch)
    log = log_of(1, tmp_path, monkeypatch)
    log.write(RECORDS)
    log.write([each | {"step": 300} for each in RECORDS])
    tensorboard.close()
    assert wandb.logged == [(SCALARS, 200), (SCALARS, 300)]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(SCALARS)
    for name, value in SCALARS.items():
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(200, value), (300, value)]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_rank_0_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writers(None, None, monkeypatch)
    log = log_of(0, tmp_path, monkeypatch)
    for step in range(6):
        log.write([each | {"step": 100 * step} for each in RECORDS])
    rising = OPERAND | {"step": 600, "metrics": {"zeros": 0.75}}
    log.write([rising, WEIGHT, GRADIENT])
    records = read(tmp_path)
    assert records[0] == {"kind": "run"} and len(records) == 1 + 7 * 3 + 1
    [warning] = kinds(records, "warning")
    assert (warning["step"], warning["operand"]) == (600, "fprop.w")
    assert capsys.readouterr().out == f"megatron-fp4: warning: {warning['line']}\n"


def test_a_run_on_one_rank_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is no scalar."""
    wandb = Wandb()
    writers(None, wandb, monkeypatch)
    log = log_of(0, tmp_path, monkeypatch)
    for step in range(5):
        log.write([OPERAND | {"step": step}])
    log.write([OPERAND | {"step": 5, "metrics": {"zeros": 0.75}}])
    assert len(kinds(read(tmp_path), "warning")) == 1
    assert wandb.logged[-1] == ({f"fp4-zeros/{LAYER}/fprop.w": 0.75}, 5)
