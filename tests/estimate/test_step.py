"""The time of a step: its pipeline against a simulated schedule, and known mistakes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.estimate_error import time_of
from benchmarks.estimate_rows import CURRENT, Step, steps
from megatron_fp4.estimate import search, step, traffic
from megatron_fp4.estimate.gpus import GPUS, MEASURED
from megatron_fp4.estimate.layout import Layout, Parameters
from megatron_fp4.estimate.model import Model
from megatron_fp4.estimate.plans import recipe_named
from megatron_fp4.estimate.rates import RATES, UNITS

LLAMA = Model(32, 4096, 14336, 32, 8, 128, 32000, 4096)
TETRAJET = recipe_named("tetrajet")


def ratio(row: Step) -> float:
    """The estimate over the measurement."""
    return time_of(row).total * 1e3 / row.row["ms"]


def of_layout(name: str, *files: str) -> list[Step]:
    return [row for row in steps(files or CURRENT) if row.layout_name == name]


def simulated(forward: list[float], backward: list[float], microbatches: int) -> float:
    """The time of 1F1B: each stage does its passes in their order, when their inputs are there."""
    stages, done = len(forward), dict[tuple[str, int, int], float]()
    order = []
    for stage in range(stages):
        warm = min(microbatches, stages - stage - 1)
        passes = [("f", i) for i in range(warm)]
        for i in range(microbatches - warm):
            passes += [("f", warm + i), ("b", i)]
        order.append(passes + [("b", i) for i in range(microbatches - warm, microbatches)])
    free, places = [0.0] * stages, [0] * stages
    while any(place < len(order[stage]) for stage, place in enumerate(places)):
        for stage in range(stages):
            if places[stage] == len(order[stage]):
                continue
            kind, i = order[stage][places[stage]]
            before = (kind, i, stage - 1 if kind == "f" else stage + 1)
            at_end = stage == (0 if kind == "f" else stages - 1)
            if not at_end and before not in done:
                continue
            ready = done[("f", i, stage)] if at_end and kind == "b" else done.get(before, 0.0)
            taken = forward[stage] if kind == "f" else backward[stage]
            free[stage] = done[kind, i, stage] = max(free[stage], ready) + taken
            places[stage] += 1
    return max(free)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 24])
def test_a_pipeline_takes_as_long_as_the_simulated_one(stages: int, microbatches: int) -> None:
    """Stages that take the same, and a last stage that takes longer, since it has the head."""
    for last in (1.0, 1.5):
        forward = [1.0] * (stages - 1) + [last]
        exact = simulated(forward, [2 * each for each in forward], microbatches)
        each = [3 * each for each in forward]
        assert microbatches * max(each) + step.bubble(each, 1) == pytest.approx(exact, rel=0.02)
        assert microbatches * max(each) != pytest.approx(exact, rel=0.02)  # without the bubble


def test_bubble_and_microbatches_of_an_estimate() -> None:
    """Twice the microbatches take the same bubble, and virtual stages divide it."""
    layout = Layout(4, 8, pp=4, micro_batch=1, batch=16)
    times = [
        step.step_time(LLAMA, each, TETRAJET, MEASURED, RATES)
        for each in (layout, replace(layout, batch=32), replace(layout, vpp=2))
    ]
    assert times[0].bubble == pytest.approx(times[1].bubble) and times[0].bubble > 0
    assert 0.4 < times[2].bubble / times[0].bubble < 0.6


def test_steps_of_the_present_kernels() -> None:
    """Where no GPU waits for a host. The mistake: torch's kernels outside the linears."""
    for row in steps(CURRENT):
        if row.layout.gpus == 4 and not row.layout.graphs:
            continue
        assert abs(ratio(row) - 1) < 0.05
        unfused = replace(row.layout, fused_kernels=False)
        wrong = step.step_time(row.model, unfused, row.recipe, MEASURED, RATES).total
        assert wrong * 1e3 > 1.07 * row.row["ms"] and wrong > 1.08 * time_of(row).total


def test_a_forgotten_bubble_is_noticed() -> None:
    for row in of_layout("pp2"):
        time = time_of(row)
        assert abs(ratio(row) - 1) < 0.05
        assert (time.total - time.bubble) * 1e3 < 0.93 * row.row["ms"]


def test_hidden_communication_of_gradients_is_not_added() -> None:
    """The mistake: adding all of it, though the backward pass hides most."""
    wrong = RATES._replace(exposed=1.0, seconds=dict(RATES.seconds))
    for row in of_layout("dp4", "parallel_step"):
        assert abs(ratio(row) - 1) < 0.02
        assert time_of(row, wrong).total > time_of(row).total + 0.03


def test_a_single_rank_converts_no_gradient() -> None:
    """Nor does the only rank that has an expert. Without the distributed optimizer sums are
    converted too, each by the rank that made it."""
    held = Parameters(1000, 300)
    assert step.encoded(held, Layout(1, gradients="e4m3")) == 0
    layout = Layout(8, gradients="e4m3", ep=8, sharded=True)
    assert (layout.dp, layout.expert_dp) == (8, 1)
    assert step.encoded(held, layout) == 1000
    assert step.encoded(held, replace(layout, ep=4)) == 1300
    assert step.encoded(held, replace(layout, ep=4, sharded=False)) == 1000 * 9 / 8 + 300 * 3 / 2


def test_a_host_that_takes_no_time_is_noticed() -> None:
    """Under TP4 without graphs GPUs wait for launches. A collective takes the host what every step
    leaves for it, so no step is estimated longer than it took. The mistake: GPU time alone."""
    fast = {unit: 0.0 if UNITS[unit].limit == "host" else s for unit, s in RATES.seconds.items()}
    waiting = [row for row in of_layout("tp4-sp", "parallel-four") if not row.layout.graphs]
    assert len(waiting) == 4
    for row in waiting:
        assert 0.7 < ratio(row) < 1.02
    [ours] = [row for row in waiting if row.name == "tetrajet"]
    assert abs(ratio(ours) - 1) < 0.02
    assert time_of(ours, RATES._replace(seconds=fast)).total * 1e3 < 0.8 * ours.row["ms"]


def test_recomputation_takes_another_forward_pass() -> None:
    layout = Layout(1, micro_batch=1, batch=8)
    model = replace(LLAMA, layers=4)
    plain, again = (
        step.step_time(model, each, TETRAJET, MEASURED, RATES)
        for each in (layout, replace(layout, recompute=True))
    )
    # A third of the operations of the layers, and none of the head's.
    assert 1.2 < again.gemm / plain.gemm < 4 / 3
    assert again.attention / plain.attention == pytest.approx(4.5 / 3.5)


def test_the_network_takes_longer_than_nvlink() -> None:
    layout = Layout(16, 8, micro_batch=1, batch=16, sharded=True)
    [gradients] = [
        each for each in traffic.of_step(LLAMA, layout, TETRAJET, step.stages(LLAMA, layout)[0])
        if each.kind == "reduce-scatter"
    ]  # fmt: skip
    near = step.sent_seconds([gradients], replace(layout, node=16), MEASURED, RATES.seconds)
    far = step.sent_seconds([gradients], replace(layout, node=1), MEASURED, RATES.seconds)
    # A host of one GPU sends all bytes through one adapter, at 80% of 50 GB/s.
    assert far == pytest.approx(gradients.sent / 40e9) and far > near


def test_a_thousand_gpus_are_searched_and_marked() -> None:
    model = replace(LLAMA, layers=80, hidden=8192, ffn=28672, heads=64)
    job = search.Job(model, TETRAJET, GPUS["b200"], 1024, 8, 1024)
    found = search.search(job, search.Fixed(micro_batch=1, recompute=False, sp=True))
    times = [each.time.total for each in found]
    assert times == sorted(times) and all(math.isfinite(each) and each > 0 for each in times)
    for each in found:
        assert each.layout.tp * each.layout.pp * each.layout.dp == 1024
        words = " ".join(each.extrapolated)
        assert "b200 was never measured" in words and "beyond that extrapolated" in words


def test_a_measured_layout_has_no_mark() -> None:
    def marks(recipe: str, gpus: int) -> dict[tuple[int, int, bool], tuple[str, ...]]:
        model = replace(LLAMA, layers=8)
        job = search.Job(model, recipe_named(recipe), MEASURED, gpus, gpus, 64)
        fixed = search.Fixed(vpp=1, micro_batch=2, recompute=False, graphs=False)
        found = search.search(job, fixed)
        layouts = [(each.layout, each.extrapolated) for each in found]
        return {(layout.tp, layout.pp, layout.sp): notes for layout, notes in layouts}

    two, four = marks("tetrajet", 2), marks("tetrajet", 4)
    waits = "TP without CUDA graphs may take longer: GPUs can wait for the slowest host process"
    assert two[1, 1, False] == two[1, 2, False] == four[1, 1, False] == ()
    assert two[2, 1, True] == four[4, 1, True] == four[2, 2, True] == (waits,)
    assert four[4, 1, False] == (waits, "TP was measured with SP only")
    assert "PP was measured up to 2" in four[1, 4, False]
    assert four[1, 2, False] == ("of TP, PP and DP together only TP2 with PP2 was measured",)
    assert marks("mxfp4", 1)[1, 1, False] == ()
    alone = "steps of mxfp4 were measured on one GPU alone"
    assert marks("mxfp4", 2)[1, 1, False] == (alone,)
    gain = "scales that are corrected to a gain of 1 take longer than is estimated"
    assert marks("quartet-2", 1)[1, 1, False] == (gain,)
