"""Bytes that are estimated are those that were counted, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.estimate_error import sent
from benchmarks.estimate_rows import Step, result, steps
from megatron_fp4.estimate import plans, traffic
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.layout import Layout
from megatron_fp4.estimate.model import Model
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.memory import held_bytes, saved_bytes
from megatron_fp4.target import target_of

COUNTED = [step for step in steps() if step.row["sent"]]
LINEARS = ("qkv", "proj", "fc1", "fc2")


def records(file: str) -> list[dict[str, Any]]:
    """The records of docs/communication.md with the flags' defaults."""
    found = result(file)["records"]
    return [r for r in found if (r["saved_x"], r["weight_cache"]) == ("packed", "packed")]


def planned(record: dict[str, Any], file: str, scattered: bool | None = None) -> LinearPlan:
    """The plan of a record's linear. scattered: replaces its sequence parallelism."""
    shape = result(file)["shape"]
    model = Model(
        1, shape["hidden"], shape["ffn"], shape["heads"], shape["query_groups"],
        shape["hidden"] // shape["heads"], 64, shape["sequence"],
    )  # fmt: skip
    sp = record["sequence_parallel"] if scattered is None else scattered
    layout = Layout(2, 2, 2, sp, micro_batch=shape["micro_batch"], batch=6)
    linear = model.linears(False)[LINEARS.index(record["linear"])]
    target = target_of(torch.device("cpu")) if file == "bytes" else MEASURED.target
    return plans.plan(linear, model, layout, plans.recipe_named(record["recipe"]), target)


def summed(sends: list[traffic.Sent]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in sends:
        found[one.kind] = found.get(one.kind, 0) + one.sent
    return found


@pytest.mark.parametrize("file", ["bytes", "bytes-gpu"])
def test_a_linear_sends_what_was_counted(file: str) -> None:
    for record in records(file):
        plan = planned(record, file)
        assert summed(traffic.of_forward(plan)) == record["forward"], record
        assert summed(traffic.of_backward(plan)) == record["backward"], record
        assert saved_bytes(plan) == record["saved"]
        if record["recipe"] != "dge-occ":  # whose row factors are kept too
            assert held_bytes(plan) == record["kept of W"]


def test_gathers_without_sequence_parallelism_are_noticed() -> None:
    """The mistake: counting the all-gathers of sequence parallelism without it."""
    flat = [record for record in records("bytes") if not record["sequence_parallel"]]
    for record in flat:
        wrong = planned(record, "bytes", scattered=True)
        sends = summed(traffic.of_forward(wrong) + traffic.of_backward(wrong))
        assert sends != record["forward"] | record["backward"] and "all-gather" in sends


@pytest.mark.parametrize("step", COUNTED, ids=lambda s: f"{s.file}-{s.layout_name}-{s.name}")
def test_a_step_sends_what_was_counted(step: Step) -> None:
    """All but the norm of the gradients and the loss, some bytes that all ranks reduce."""
    estimate, counted = sent(step), step.row["sent"]
    for kind, size in counted.items():
        assert 0 <= size - estimate.get(kind, 0) < 64, kind
    assert estimate.keys() <= counted.keys()


def test_a_linear_at_a_thousand_ranks_sends_over_the_network_once_in_a_host() -> None:
    layout = Layout(1024, 8, tp=4, pp=2, sp=True, micro_batch=1, batch=128)
    assert traffic.ranks_of("tensor", layout) == (4, 4)
    assert traffic.ranks_of("data", layout) == (128, 2)
    assert traffic.network_share("all-gather", "tensor", layout) == 0
    assert traffic.network_share("reduce-scatter", "data", layout) == 1 / 2
    assert traffic.network_share("send", "pipeline", layout) == 1
