"""Bytes that are estimated are those that were counted, to the byte."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.estimate_error import sent
from benchmarks.estimate_rows import Step, result, steps
from megatron_fp4.arithmetic.messages import FORMS
from megatron_fp4.estimate import plans, traffic
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.layout import Layout, linears, parameters, stages
from megatron_fp4.estimate.memory import gradient_buffers
from megatron_fp4.estimate.model import Model, Parameters
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.memory import held_bytes, saved_bytes
from megatron_fp4.recipe import Phase
from megatron_fp4.target import target_of
from testing.worlds.checkpoints import SMALL
from testing.worlds.launch import MOCK_DATA, SCRIPTS, TINY, spawn

COUNTED = [step for step in steps() if step.row["sent"]]
TETRAJET = plans.recipe_named("tetrajet")
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
        once = summed(traffic.of_held_weight(plan)).get("all-reduce", 0)
        assert once == record["sent once a step"], record
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
    """All but the norm of the gradients and the loss, some bytes that all ranks reduce. Messages of
    weights in codes are padded to the longest, as the estimate's are not."""
    estimate, counted = sent(step), step.row["sent"]
    for kind, size in counted.items():
        padding = size // 1000 if step.layout.sent_w and kind == "all-gather" else 0
        assert 0 <= size - estimate.get(kind, 0) < 64 + padding, kind
    assert estimate.keys() <= counted.keys()


# --- gradients in few bits ---------------------------------------------------------------------

TINY_MODEL = Model(2, 64, 128, 4, 2, 16, 512, 64)  # TINY of testing.worlds.launch, with SMALL
TENSORS, PADDING = 12, 64  # parameters, and most elements that Megatron pads one with in a shard


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("element", ["e4m3", "bf16"])
def test_gradients_send_what_was_counted(element: str, sharded: bool) -> None:
    """But for what pads the parameters in the distributed optimizer's shards, and for scales of
    blocks that are not full."""
    layout = Layout(2, batch=4, sharded=sharded, gradients=element)
    flags = " ".join(layout.flags(False)).split()
    words = ["traffic", *TINY, *MOCK_DATA, *SMALL.split(), "--bf16", *flags]
    done = spawn(2, SCRIPTS / "pretrain_exchanging.py", *words)
    assert done.returncode == 0, done.stdout[-3000:]
    steps = {line for line in re.findall("^traffic: (.*)$", done.stdout, re.MULTILINE)}
    [counted] = [json.loads(line) for line in steps]
    [stage] = stages(TINY_MODEL, layout)
    sends = traffic.of_step(TINY_MODEL, layout, TETRAJET, stage)
    estimate = summed([one for one in sends if one.kind in counted])
    assert counted.keys() == {"all-to-all"} | ({"all-gather"} if not sharded else set())
    bytes_each = FORMS[element].bits / 8
    for kind, size in counted.items():
        unequal = PADDING * TENSORS * bytes_each if sharded else 2 * bytes_each
        assert abs(size - estimate[kind]) <= unequal + 2 * TENSORS
    # Negative control: float32 by Megatron's collectives.
    plain = summed(traffic.of_step(TINY_MODEL, replace(layout, gradients=None), TETRAJET, stage))
    assert "all-to-all" not in plain
    assert plain["reduce-scatter" if sharded else "all-reduce"] > 1.9 * estimate["all-to-all"]


def test_gradients_in_few_bits_beside_float32() -> None:
    """Bits of a parameter that a rank of many sends: 32 by reduce-scatter, 64 by all-reduce."""
    layout = Layout(256, batch=256)
    [stage] = stages(TINY_MODEL, layout)
    count = parameters(TINY_MODEL, layout, stage).total * 255 / 256
    for element, sharded, bits in [
        (None, False, 64), (None, True, 32 + 16),
        ("e4m3", False, 2 * 8.0625), ("e5m2", True, 8.0625 + 16), ("bf16", True, 16 + 16),
    ]:  # fmt: skip
        each = replace(layout, sharded=sharded, gradients=element)
        sends = traffic.of_step(TINY_MODEL, each, TETRAJET, stage)
        assert sum(one.sent for one in sends) == pytest.approx(count * bits / 8, rel=1e-12)


def test_buffers_of_gradients_are_bounded() -> None:
    small, large = Parameters(1000, 0), Parameters(10**10, 10**11)
    layout = Layout(8, gradients="e4m3", ep=8)
    assert gradient_buffers(small, layout) == 4 * 1000 * 8.0625 / 8
    assert gradient_buffers(large, layout) == 4 * 2**26 * 8.0625 / 8
    assert gradient_buffers(large, replace(layout, gradients="bf16")) == 4 * 2**26
    assert gradient_buffers(Parameters(0, 10**11), layout) == 0  # each expert is on one rank
    assert gradient_buffers(large, replace(layout, gradients=None)) == 0


def test_a_linear_at_a_thousand_ranks_sends_over_the_network_once_in_a_host() -> None:
    layout = Layout(1024, 8, tp=4, pp=2, sp=True, micro_batch=1, batch=128)
    assert traffic.ranks_of("tensor", layout) == (4, 4)
    assert traffic.ranks_of("data", layout) == (128, 2)
    assert traffic.network_share("all-gather", "tensor", layout) == 0
    assert traffic.network_share("reduce-scatter", "data", layout) == 1 / 2
    assert traffic.network_share("send", "pipeline", layout) == 1


@pytest.mark.parametrize("ep", [2, 4, 8, 16])
def test_what_experts_send(ep: int) -> None:
    """Rank r of 64, 8 to a host, has the experts of rank r % ep. A rank sends as many of its tokens
    to each rank of its group; the gradients of experts go over the ranks that have the same."""
    model = Model(2, 64, 160, 4, 2, 16, 512, 64, experts=16, expert_ffn=128, top_k=4)
    layout = Layout(64, 8, ep=ep, micro_batch=2, batch=128)
    group = [rank for rank in range(64) if rank // ep == 0]
    away = [rank for rank in group if rank // 8 != 0]
    share = traffic.network_share("all-to-all", "expert", layout)
    assert share == pytest.approx(len(away) / (ep - 1))
    copies = [rank for rank in range(64) if rank % ep == 0]
    on_host = [rank for rank in copies if rank < 8]
    assert traffic.ranks_of("expert data", layout) == (len(copies), len(on_host))
    tokens = 2 * 64 * 4 * (ep - 1) / ep  # those that do not stay, to 4 experts each
    there_and_back = traffic.of_experts(model, layout)
    assert [each.sent for each in there_and_back] == [pytest.approx(tokens * 64 * 2)] * 2


def test_weights_that_are_gathered_as_codes() -> None:
    """Those of linears take 4.25 bits, all others 16; expert weights among their own ranks."""
    model = Model(2, 64, 160, 4, 2, 16, 512, 64, experts=4, expert_ffn=128, moe_every=2)
    layout = Layout(8, 8, ep=2, micro_batch=1, batch=8, sharded=True)
    [stage] = stages(model, layout)
    recipe, own = plans.recipe_named("tetrajet"), linears(model, layout, stage)
    plain, coded = (
        {one.group: one.sent for one in traffic.of_step(model, each, recipe, stage)
         if one.kind == "all-gather"}
        for each in (layout, replace(layout, gathers_codes=True))
    )  # fmt: skip
    groups: list[tuple[traffic.Group, int, int]] = [
        ("data", 8, own.dense), ("expert data", 4, own.experts)
    ]  # fmt: skip
    for group, ranks, count in groups:
        saved = (16 - 4.25) / 8 * count * (ranks - 1) / ranks
        assert plain[group] - coded[group] == pytest.approx(saved) and count > 0
    # The longest phase decides, and reads other codes than those of the first, which are gathered.
    floor = plans.recipe_named("tetrajet", rule="floor")
    late = replace(recipe, phases=(Phase(0.3, floor),))
    assert traffic.of_step(model, replace(layout, gathers_codes=True), late, stage) == (
        traffic.of_step(model, layout, late, stage)
    )
    # Without a distributed optimizer nothing is gathered.
    whole = replace(layout, sharded=False, gathers_codes=True)
    assert traffic.of_step(model, whole, recipe, stage) == traffic.of_step(
        model, replace(whole, gathers_codes=False), recipe, stage
    )
