"""What a layer that Megatron captures reads from memory, and what it counts there; on a CPU, where
nothing is captured, by saying that it is."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from megatron_fp4 import Recipe
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.mcore.model import graphs
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.recipe import GemmRecipe
from testing.kernels import pretend_graphs
from testing.kernels.pretend_graphs import Graph, capturing
from testing.worlds.launch import torchrun
from tests.mcore.test_layers import activation, microbatches, state, weight
from tests.mcore.test_run import STOCHASTIC, run_of

__all__ = ["microbatches"]  # a fixture
TURNED = GemmRecipe(STOCHASTIC, STOCHASTIC, Hadamard(32, "random"))
RECIPE = Recipe("turned", fprop=TURNED, dgrad=TURNED, wgrad=TURNED)


def captured_run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(graphs, "captures", lambda: True)
    run = run_of(RECIPE, fp4_weight_cache="off")
    run.prepare_graphs(2, torch.device("cpu"))
    return run


def at(run: Run, step: int, microbatch: int) -> None:
    """Come to a microbatch of a step as Megatron would."""
    run.args.curr_iteration = step
    run._counts.clear()
    start = run.counting(lambda data, model: None)
    for _ in range(microbatch + 1):
        start(iter(()), types.SimpleNamespace(vp_stage=None, training=True))


def gradients(run: Run, step: int, microbatch: int) -> list[Tensor]:
    """Y, dX and dW of a microbatch."""
    x, w = activation().requires_grad_(), weight()
    at(run, step, microbatch)
    y = state(run).product(x, w, None, True)
    return [y, *torch.autograd.grad(y.square().sum(), (x, w))]


def test_a_captured_layer_draws_by_step_and_microbatch_in_memory(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_of(RECIPE, fp4_weight_cache="off")
    wanted = {(s, m): gradients(plain, s, m) for s in (2, 3) for m in (0, 1)}
    run = captured_run(monkeypatch)
    for (step, microbatch), tensors in wanted.items():
        assert all(map(torch.equal, gradients(run, step, microbatch), tensors))
    for i in range(3):  # Negative control: no two moments draw the same.
        values = [tensors[i] for tensors in wanted.values()]
        assert all(not torch.equal(values[0], other) for other in values[1:])


class Captured:
    """The graphs of a microbatch: those of its forward and of its backward pass."""

    def __init__(self, run: Run) -> None:
        self._forward, self._backward = Graph(), Graph()
        x, w = activation().requires_grad_(), weight()
        with capturing(self._forward):
            self._y = state(run).product(x, w, None, True)
            loss = self._y.square().sum()
        with capturing(self._backward):
            self._gradients = torch.autograd.grad(loss, (x, w))

    def forward(self) -> list[Tensor]:
        self._forward.replay()
        return [self._y.detach().clone()]

    def backward(self) -> list[Tensor]:
        self._backward.replay()
        return [gradient.clone() for gradient in self._gradients]


def in_1f1b(run: Run, step: int) -> list[list[Tensor]]:
    """Y, dX and dW of three microbatches, two of which are in flight at a time."""
    captured = [Captured(run) for _ in range(3)]
    found: list[list[Tensor]] = []
    for microbatch, each in enumerate(captured):
        at(run, step, microbatch)
        found.append(each.forward())
        if microbatch:
            found[microbatch - 1] += captured[microbatch - 1].backward()
    found[-1] += captured[-1].backward()
    return found


def test_a_backward_pass_draws_by_the_microbatch_of_its_forward_pass(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_of(RECIPE, fp4_weight_cache="off")
    wanted = [gradients(plain, 2, microbatch) for microbatch in range(3)]
    run = captured_run(monkeypatch)
    for found, tensors in zip(in_1f1b(run, 2), wanted, strict=True):
        assert all(map(torch.equal, found, tensors))

    # Negative control: one clock for all microbatches in flight. Only the last one is right.
    def of_the_latest(clock: graphs.Clock) -> tuple[Tensor, ...]:
        return tuple(clock._words[:, 0])

    monkeypatch.setattr(graphs.Clock, "read", of_the_latest)
    pairs = list(zip(in_1f1b(run, 2), wanted, strict=True))
    assert all(torch.equal(found[0], tensors[0]) for found, tensors in pairs)  # Y
    of_dw = [torch.equal(found[2], tensors[2]) for found, tensors in pairs]
    assert of_dw == [False, False, True]


def test_what_graphs_count_is_told_of_by_step_and_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    run = captured_run(monkeypatch)
    monitor, layer, w = run.monitor, state(run), weight()
    monitor.start_step(7)
    for x in (activation(), activation() * torch.nan, activation()):
        layer.product(x, w, None, True)
    monitor.start_step(8)
    layer.product(activation(), w, None, True)
    seen: list[Any] = [monitor.start_step(9), monitor.start_step(10)]
    assert [s and (s.step, s.module, s.gemm, s.operand) for s in seen] == [
        (7, "layer", "fprop", "x"),
        None,
    ]


def test_what_a_layer_warms_up_on_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = captured_run(monkeypatch)
    for warms_up in (True, False):
        monkeypatch.setattr(graphs, "warms_up", lambda told=warms_up: told)
        run.monitor.start_step(7)
        state(run).product(activation() * torch.nan, weight(), None, True)
        assert (run.monitor.look() is None) == warms_up


def test_what_graphs_count_stands_in_the_order_in_which_they_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = captured_run(monkeypatch)
    first, second = (state(run, name) for name in ("z", "a"))
    run.monitor.start_step(7)
    x, w = (activation() * torch.nan).requires_grad_(), weight()
    second.product(first.product(x, w, None, True), w, None, True).sum().backward()
    order = list(dict.fromkeys(label[:2] for label in run.monitor._rows))
    assert order == [
        ("z", "fprop"), ("a", "fprop"),
        ("a", "dgrad"), ("a", "wgrad"), ("z", "dgrad"), ("z", "wgrad"),
    ]  # fmt: skip
    seen = run.monitor.look()
    assert seen is not None and (seen.module, seen.gemm, seen.operand) == ("z", "fprop", "x")


def test_more_may_be_counted_than_fits_an_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = captured_run(monkeypatch).monitor
    monitor.start_step(7)
    for _ in range(3):
        monitor.add("layer", "fprop", "x", torch.tensor([2**30, 0], dtype=torch.int32))
    monitor.look()
    assert monitor.rounding is not None and monitor.rounding.elements == 3 * 2**30


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal is a CPU's")
def test_without_a_gpu_graphs_are_refused() -> None:
    result = torchrun(1, "--fp4-recipe", "tetrajet", "--cuda-graph-impl", "local")
    assert result.status and not result.has_traceback
    assert "--cuda-graph-impl local needs a GPU" in result.output


def of_collectives() -> list[float]:
    """Of one rank: the sums of a captured reduce-scatter and all-reduce, of other numbers than it
    was captured with, and a number that the capture wrote over."""
    x, before, graph = torch.ones(2), torch.tensor([7.0, 7.0]), Graph()
    with capturing(graph):
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, x * 2)
        dist.all_reduce(total := x * 3)
        dist.all_gather_into_tensor(before, x)
    kept = before[0].item()
    x.fill_(5)
    graph.replay()
    return [part[0].item(), total[0].item(), kept]


def test_pretended_graphs_run_collectives(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_collectives() == [10, 15, 7]
    # Negative control: Gloo's own copies are recorded, which write what the capture computed.
    monkeypatch.setattr(pretend_graphs, "_waited", lambda tree: tree)
    assert of_collectives()[0] == 2
