"""When a phase of a recipe begins layers are captured again: Megatron's code for graphs, with
pretended graphs on a CPU.

tests/gpu/test_graphs.py does the same with those of a GPU, where their memory is measured.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp4 import Recipe, get_recipe
from megatron_fp4.mcore.model import graphs
from megatron_fp4.mcore.model.run import Counters
from megatron_fp4.monitor import NonFiniteMonitor
from megatron_fp4.recipe import Phase
from testing.worlds.launch import OVERLAP, Result
from tests.mcore.test_graphs import RECIPE as TURNED
from tests.mcore.test_graphs import at
from tests.mcore.test_pipelined_graphs import (
    GRAPHS,
    PADDED_EXPERTS,
    PIPELINE,
    RECIPE,
    TENSOR,
    VIRTUAL,
    trained,
)
from tests.mcore.test_run import microbatches, run_of

__all__ = ["microbatches"]  # a fixture
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")
HERE = Path(__file__).parent
PHASES = (*RECIPE, str(HERE / "phases.yaml"))
# Evaluation after every step: in the first step of a phase right after the capture.
SIX = ("--train-iters", "6", "--eval-interval", "1")


def digests(result: Result) -> dict[tuple[str, str], str]:
    """Those of the weights, by rank and step."""
    assert result.status == 0, result.output[-4000:]
    lines = re.findall(r"weights of rank (\d+) after step (\d+): (\w+)", result.output)
    return {(rank, step): digest for rank, step, digest in lines}


def told(result: Result) -> tuple[dict[tuple[str, str], str], list[float], list[float]]:
    """The digests of all ranks' weights after each step, and the losses."""
    assert len(result.losses) == 6 and len(result.evaluations) == 8, result.output[-4000:]
    return digests(result), result.losses, result.evaluations


def pools(result: Result) -> set[str]:
    """How many pools of memory graphs used at a time, on each rank."""
    return set(re.findall(r"pools at a time: (\d+)", result.output))


def staying(result: Result) -> list[int]:
    """How many tensors of graphs stayed, whenever graphs were dropped on some rank."""
    return [int(number) for number in re.findall(r"tensors that stay: (\d+)", result.output)]


def same_training(processes: int, *flags: str, begun: int = 2) -> None:
    """With graphs and without, bit for bit. begun: how many phases begin, each with a capture."""
    replayed = trained(processes, "none", *SIX, *flags, *GRAPHS)
    assert told(replayed) == told(trained(processes, "none", *SIX, *flags))
    assert replayed.captures == 1 + begun and pools(replayed) == {"1"}


def test_each_phase_is_captured() -> None:
    same_training(1, *PHASES)


@pytest.mark.slow
def test_graphs_that_are_kept_train_by_the_recipe_before() -> None:
    """Negative control: a run whose recipe has no phases."""
    kept = trained(1, "keep", *SIX, *PHASES, *GRAPHS)
    before = trained(1, "none", *SIX, *RECIPE, "tetrajet")
    assert told(kept) == told(before) != told(trained(1, "none", *SIX, *PHASES))
    assert kept.captures == 1


@pytest.mark.slow
def test_megatron_s_own_way_to_delete_graphs_captures_nothing_again() -> None:
    """Negative control. Under pipeline parallelism it replays graphs of the recipe before."""
    deleted = trained(1, "delete", *SIX, *PHASES, *GRAPHS)
    assert told(deleted) == told(trained(1, "none", *SIX, *PHASES)) and deleted.captures == 1
    wrong, right = (trained(2, mistake, *SIX, *PIPELINE, *PHASES, *more) for mistake, more in (
        ("delete", GRAPHS), ("none", ()),
    ))  # fmt: skip
    assert told(wrong) != told(right)
    assert wrong.losses[:3] == right.losses[:3]  # without graphs in the first step of a phase


@pytest.mark.slow
def test_uses_of_a_pool_that_stay_would_be_noticed() -> None:
    """Negative control: torch keeps the memory of each phase's graphs."""
    kept = trained(1, "keep-pool", *SIX, *PHASES, *GRAPHS)
    assert digests(kept) and pools(kept) == {"3"}


@pytest.mark.slow
def test_tensors_of_graphs_are_freed_with_them() -> None:
    """Each of two layers has an output and a gradient of its input. No evaluation runs before a
    phase: after one the record of autograd is gone that keeps them in the negative control."""
    freed, kept = (
        staying(trained(1, mistake, "--train-iters", "6", *PHASES, *GRAPHS))
        for mistake in ("none", "keep-tensors")
    )
    assert freed == [0, 0] and kept == [4, 4]


OWN_LAYERS = ("--fp4-module-recipe", "*layers.0.*=tetrajet", "--fp4-module-recipe", "*.1.*fc2=bf16")


LAUNCHES = {  # processes, flags, how many phases begin
    "pp2": (2, (*PIPELINE, *PHASES), 2),
    "vpp2": (2, (*VIRTUAL, *PHASES), 2),
    "tp2-pp2": (4, (*TENSOR, *PIPELINE, *PHASES), 2),
    "dp2": (2, (*OVERLAP, *PHASES), 2),
    "experts": (1, (*PHASES, *PADDED_EXPERTS), 2),
    "modules": (1, (*PHASES, *OWN_LAYERS), 2),
    "bf16-after": (1, (*RECIPE, "tetrajet", "--fp4-bf16-after", "0.5"), 1),
    "auto": (1, (*RECIPE, "auto", "--num-layers", "4"), 1),
}
MOST = "vpp2", "tp2-pp2", "auto"  # the others are run by make test-outside


@pytest.mark.parametrize(
    "launch",
    [pytest.param(x, marks=getattr(pytest.mark, "slow" if x in MOST else "outside"))
     for x in LAUNCHES],
)  # fmt: skip
def test_each_phase_is_captured_in_other_launches(launch: str) -> None:
    processes, flags, begun = LAUNCHES[launch]
    same_training(processes, *flags, begun=begun)


@pytest.mark.parametrize(
    "step",
    [pytest.param("2", marks=pytest.mark.outside), pytest.param("3", marks=pytest.mark.slow)],
    ids=["at its begin", "in its middle"],
)
def test_a_run_that_resumes_in_a_phase_captures_it(step: str, tmp_path: Path) -> None:
    """And captures the next one, as a run without a break."""
    folder = ("--save", str(tmp_path), "--save-interval", "1", "--fp4-metrics-interval", "0")
    whole = trained(1, "none", *SIX, *PHASES, *folder, *GRAPHS)
    again = trained(
        *(1, "none", *SIX, *PHASES, *folder, *GRAPHS), "--load", str(tmp_path), "--ckpt-step", step
    )
    wanted, found = digests(whole), digests(again)
    assert len(found) == 6 - int(step) and found.items() <= wanted.items()
    assert whole.captures == 3 and again.captures == 2
    assert again.evaluations == whole.evaluations[int(step) :]


# --- when graphs are dropped ----------------------------------------------------------------------


def phased() -> Recipe:
    return replace(TURNED, phases=(Phase(0.3, get_recipe("fp8")), Phase(0.6, get_recipe("mxfp4"))))


@pytest.mark.parametrize(
    ("first", "wanted"), [(0, [3, 6]), (3, [6]), (4, [6])], ids=["whole", "at a begin", "within"]
)
def test_graphs_are_dropped_where_a_phase_begins(
    one_rank: None, first: int, wanted: list[int]
) -> None:
    """first: the first step of a launch, in which nothing was captured yet."""
    run, dropped = run_of(phased(), fp4_weight_cache="off"), list[int]()
    run.drop_graphs = lambda: dropped.append(run.args.curr_iteration)
    for step in range(first, 10):
        for microbatch in (0, 1):
            at(run, step, microbatch)
    assert dropped == wanted


def test_a_layer_is_captured_in_the_recipe_of_the_step(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read the step from memory, but the recipe is chosen when the layer is captured."""
    monkeypatch.setattr(graphs, "captures", lambda: True)
    recipe = phased()
    run = run_of(recipe, fp4_weight_cache="off")
    run.prepare_graphs(2, torch.device("cpu"))
    held = []
    for step in (2, 3, 6):
        at(run, step, 0)
        counters = run.now()
        assert isinstance(counters, Counters) and isinstance(counters.step, torch.Tensor)
        held.append(run.in_force(recipe, counters))
    assert held == list(recipe.in_turn)


def test_what_is_captured_again_is_told_in_its_own_order() -> None:
    """The first phase quantizes dY alone, the second X before it."""

    def first_nan(forgets: bool) -> Any:
        monitor, nan = NonFiniteMonitor(), torch.tensor([0, 1], dtype=torch.int32)
        monitor.expect(4, torch.device("cpu"))
        monitor.start_step(1)
        monitor.add("layer", "dgrad", "dy", nan)
        monitor.start_step(2)
        if forgets:
            monitor.forget_graphs()
        for gemm, operand in (("fprop", "x"), ("dgrad", "dy")):
            monitor.add("layer", gemm, operand, nan)
        seen = [monitor.start_step(3), monitor.look()]
        assert [each and each.step for each in seen] == [1, 2]
        return seen[1]

    assert (first_nan(True).gemm, first_nan(False).gemm) == ("fprop", "dgrad")
