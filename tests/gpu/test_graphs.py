"""On a GPU: layers that are captured in CUDA graphs draw and count like others, and train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_fp4 import get_recipe, list_recipes
from megatron_fp4.mcore import graphs
from megatron_fp4.mcore.layers import Fp4State
from megatron_fp4.mcore.run import Run
from tests.mcore.launch import OVERLAP, train
from tests.mcore.test_graphs import at
from tests.mcore.test_layers import microbatches, state
from tests.mcore.test_run import run_of

__all__ = ["microbatches"]  # a fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
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


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 0)


@pytest.mark.parametrize("recipe", list_recipes())
def test_a_graph_computes_what_its_layer_does(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Pass(recipe)
    wanted = at_each(linear.run, linear)
    at(linear.run, *MOMENTS[-1])
    frozen = at_each(linear.run, linear.captured())
    linear.run.prepare_graphs(["layer"], torch.device("cuda"))
    monkeypatch.setattr(graphs, "captures", lambda: True)
    found = at_each(linear.run, linear.captured())
    for tensors, expected in zip(found, wanted, strict=True):
        assert all(map(torch.equal, tensors, expected))
    if any("stochastic" in repr(linear.run.recipe.gemm(gemm)) for gemm in ("dgrad", "wgrad")):
        assert not torch.equal(frozen[0][2], wanted[0][2])  # Negative control: noise stands still.
    assert all(map(torch.equal, frozen[2], wanted[2]))


def test_a_graph_counts_whenever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = Pass("tetrajet")
    monitor = linear.run.monitor
    linear()
    monitor.look()
    linear.run.prepare_graphs(["layer"], torch.device("cuda"))
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


FLAGS = ("--bf16", "--hidden-size", "128", "--ffn-hidden-size", "256", "--train-iters", "8")
GRAPHS = ("--cuda-graph-impl", "local")


def same_losses(processes: int, *flags: str) -> None:
    """With graphs and without: the order of some of torch's own sums is free."""
    plain = train(processes, *FLAGS, *flags, "--fp4-weight-cache", "off").losses
    replayed = train(processes, *FLAGS, *flags, *GRAPHS)
    assert len(plain) == 8 and plain[-1] < plain[0]
    assert replayed.losses == pytest.approx(plain, rel=2e-3)
    assert len(replayed.evaluations) == 2


@pytest.mark.parametrize("recipe", list_recipes())
def test_graphs_train_as_layers_do(recipe: str) -> None:
    same_losses(1, "--fp4-recipe", recipe)


@two_gpus
@pytest.mark.parametrize(
    "layout",
    [
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        tuple(OVERLAP),
    ],
    ids=("tp2", "dp2"),
)
def test_graphs_train_on_two_gpus(layout: tuple[str, ...]) -> None:
    same_losses(2, *layout, "--fp4-recipe", "tetrajet")


def test_graphs_resume(tmp_path: Path) -> None:
    flags = ("--fp4-recipe", "tetrajet", *GRAPHS, "--save", str(tmp_path), "--save-interval", "4")
    whole = train(1, *FLAGS, *flags).losses
    again = train(1, *FLAGS, *flags, "--load", str(tmp_path), "--ckpt-step", "4").losses
    assert again[-1] == pytest.approx(whole[-1], rel=2e-3)


@two_gpus
def test_graphs_end_where_they_are_told_to() -> None:
    layout = ("--tensor-model-parallel-size", "2", "--exit-interval", "4")
    assert len(train(2, *FLAGS, *layout, "--fp4-recipe", "tetrajet", *GRAPHS).losses) == 4


def test_graphs_recompute() -> None:
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "mlp")
    same_losses(1, *flags, "--fp4-recipe", "mxfp4-rht-sr")
