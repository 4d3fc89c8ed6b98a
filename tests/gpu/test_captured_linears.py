"""On a GPU: linears that are captured in CUDA graphs draw and count like others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_fp4 import ConfigError, Linear, get_recipe
from megatron_fp4.execution.call import Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.mcore.model import graphs
from megatron_fp4.mcore.model.layers import Fp4State
from megatron_fp4.mcore.model.run import Run
from megatron_fp4.recipes import uniform_recipes
from tests.mcore.test_graphs import at
from tests.mcore.test_layers import microbatches, state
from tests.mcore.test_run import run_of

__all__ = ["microbatches"]  # a fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SIZE, MOMENTS = 256, [(2, 0), (2, 1), (3, 0)]


def matrix(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().cuda()


class Pass:
    """Forward and backward of one linear: Y, dX, and dW in main_grad."""

    def __init__(self, recipe: str) -> None:
        self.run: Run = run_of(get_recipe(recipe), fp4_weight_cache="off")
        self.layer: Fp4State = state(self.run)
        self.x = matrix(1, 128, 2, SIZE).requires_grad_()
        self.w = torch.nn.Parameter(matrix(2, SIZE, SIZE))
        self.w.main_grad = torch.zeros(SIZE, SIZE, device="cuda")  # type: ignore[attr-defined]
        self.dy = matrix(3, 128, 2, SIZE)

    def __call__(self) -> tuple[Tensor, ...]:
        self.w.main_grad.zero_()  # type: ignore[attr-defined]
        y = self.layer.product(self.x, self.w, None, True)
        (dx, _) = torch.autograd.grad(y, (self.x, self.w), self.dy)
        return y, dx, self.w.main_grad  # type: ignore[attr-defined]

    def captured(self) -> Callable[[], tuple[Tensor, ...]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = self()

        def replayed() -> tuple[Tensor, ...]:
            graph.replay()
            return made

        return replayed


def at_each(run: Run, call: Callable[[], tuple[Tensor, ...]]) -> list[list[Tensor]]:
    found = []
    for step, microbatch in MOMENTS:
        at(run, step, microbatch)
        found.append([tensor.detach().clone() for tensor in call()])
    return found


@pytest.mark.parametrize("recipe", ["tetrajet", "mxfp4-rht-sr"])
def test_a_module_s_steps_are_counted_in_its_graph(recipe: str) -> None:
    x, dy = matrix(1, 128, SIZE).requires_grad_(), matrix(2, 128, SIZE)

    def layer(steps: int | Tensor) -> Linear:
        torch.manual_seed(0)
        options: dict[str, Any] = {"replica": 2, "device": "cuda", "dtype": torch.bfloat16}
        made = Linear(SIZE, SIZE, recipe=recipe, **options)
        made.steps = steps
        return made

    def gradients(module: Linear) -> list[Tensor]:
        return list(torch.autograd.grad(module(x), (x, module.weight), dy))

    plain, counted = layer(0), layer(torch.tensor(0, device="cuda"))
    wanted = [gradients(plain) for _ in range(4)]
    assert all(map(torch.equal, gradients(counted), wanted[0]))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(counted)
    for tensors in wanted[1:]:
        graph.replay()
        assert all(map(torch.equal, found, tensors))
    assert int(counted.steps) == 4
    # Negative control: another step's bits are others.
    assert not torch.equal(wanted[1][0], wanted[2][0])
    with pytest.raises(ConfigError, match="int64 tensor"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gradients(plain)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 0)


@pytest.mark.parametrize("recipe", uniform_recipes())
def test_a_graph_computes_what_its_layer_does(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Pass(recipe)
    wanted = at_each(linear.run, linear)
    at(linear.run, *MOMENTS[-1])
    with monkeypatch.context() as unseen:
        # Outside the harness for graphs the monitor would read the tallies at once.
        unseen.setattr(linear.run.monitor, "observe", lambda *told: None)
        frozen = at_each(linear.run, linear.captured())
    linear.run.prepare_graphs(1, torch.device("cuda"))
    monkeypatch.setattr(graphs, "captures", lambda: True)
    found = at_each(linear.run, linear.captured())
    for tensors, expected in zip(found, wanted, strict=True):
        assert all(map(torch.equal, tensors, expected))
    if linear.run.recipe.draws:
        assert not torch.equal(frozen[0][2], wanted[0][2])  # Negative control: one step for all.
    assert all(map(torch.equal, frozen[2], wanted[2]))


def test_a_graph_counts_whenever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Pass("tetrajet")
    monitor = linear.run.monitor
    linear()
    monitor.look()
    linear.run.prepare_graphs(1, torch.device("cuda"))
    monkeypatch.setattr(graphs, "captures", lambda: True)
    replayed, x = linear.captured(), linear.x.detach().clone()
    spread = x.clone()
    spread[0] *= torch.exp2(torch.linspace(-60, 0, SIZE, device="cuda")).bfloat16()
    counts = []
    for step, (values, times) in enumerate([(x, 2), (spread, 1), (spread, 2), (x * torch.nan, 1)]):
        monitor.start_step(step)
        linear.x.data.copy_(values)
        for _ in range(times):
            replayed()
        seen = monitor.look()
        counts.append(monitor.rounding.elements if monitor.rounding else 0)
        assert (seen is not None) == (step == 3)
    assert counts[0] == 0 < counts[1] and counts[2] == 2 * counts[1]


def test_a_graph_reads_the_average_of_each_step() -> None:
    """A weight's average lies at one address; a replay rounds towards what lies there then."""
    recipe = get_recipe(str(Path(__file__).parents[1] / "mcore" / "ema.yaml"))
    x, w, dy = (matrix(seed, 128, 128) for seed in (1, 2, 3))
    x.requires_grad_()
    w.requires_grad_()
    average = w.detach().float()
    site = Site("fc1", average=average)

    def passes() -> tuple[Tensor, ...]:
        y = quantized_linear(x, w, None, recipe, site)
        return y, *torch.autograd.grad(y, (x, w), dy)

    passes()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = passes()
    outputs = []
    for factor in (1.0, 0.8, 1.3):
        average.copy_(w.detach().float() * factor)
        graph.replay()
        assert all(map(torch.equal, found, passes()))
        outputs.append(found[0].clone())
    assert not torch.equal(outputs[0], outputs[1])  # Negative control: the average matters.
