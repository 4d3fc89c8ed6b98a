"""On a GPU: layers that are captured in CUDA graphs draw and count like others, and train."""

from __future__ import annotations

import re
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
from testing.worlds.launch import (
    OVERLAP,
    SCRIPTS,
    Result,
    result_of,
    spawn,
    tiny_on_mock_data,
    torchrun,
    train,
)
from tests.mcore.test_graphs import at
from tests.mcore.test_layers import microbatches, state
from tests.mcore.test_pipelined_graphs import PADDED_EXPERTS, RECIPE
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


# Weights stand still, so that what differs in one step does not grow in the next.
FLAGS = """
    --bf16 --hidden-size 128 --ffn-hidden-size 256 --train-iters 4 --lr 1e-12 --min-lr 1e-13
    --fp4-weight-cache off --fp4-recipe
""".split()
GRAPHS = ("--cuda-graph-impl", "local")
NOISY = str(Path(__file__).with_name("noisy.yaml"))
FROZEN = SCRIPTS / "pretrain_with_frozen_bits.py"
WITH_DIGESTS = SCRIPTS / "pretrain_with_digests.py"


def agree(one: Result, other: Result) -> bool:
    """As far as is printed: losses of each step and evaluation, which show the forward pass's
    random bits, and the norms of gradients, which show the others'."""
    found, wanted = ([*r.losses, *r.evaluations] for r in (one, other))
    norms = _close(gradients(one), gradients(other), abs=2e-3)
    return norms and _close(found, wanted, rel=1e-5)


def _close(
    one: list[float], other: list[float], rel: float | None = None, abs: float | None = None
) -> bool:
    return len(one) == len(other) and one == pytest.approx(other, rel=rel, abs=abs)


def gradients(result: Result) -> list[float]:
    return [float(norm) for norm in re.findall(r"grad norm: (\S+)", result.output)]


def same_training(processes: int, *flags: str) -> None:
    """With graphs and without."""
    plain, replayed = (train(processes, *FLAGS, *flags, *more) for more in ((), GRAPHS))
    assert len(plain.losses) == len(gradients(plain)) == 4 and len(plain.evaluations) == 2
    assert agree(replayed, plain)


@pytest.mark.parametrize("recipe", [NOISY, *uniform_recipes()])
def test_graphs_train_as_layers_do(recipe: str) -> None:
    same_training(1, recipe)


@pytest.mark.parametrize("recipe", [NOISY, "tetrajet"])
def test_graphs_make_codes_of_w_again_in_backward(recipe: str) -> None:
    same_training(1, recipe, "--fp4-weight-cache", "remade")


@pytest.mark.parametrize("recipe", [NOISY, "tetrajet"])
def test_other_bits_would_be_noticed(recipe: str) -> None:
    """Negative control: another seed's, in backward alone too."""
    plain, other = (train(1, *FLAGS, recipe, "--fp4-seed", seed) for seed in ("1", "2"))
    assert not agree(other, plain)


def test_the_bits_of_one_microbatch_would_be_noticed() -> None:
    """Negative control: graphs that are told of no other."""
    plain = train(1, *FLAGS, NOISY)
    frozen = torchrun(1, *FLAGS, NOISY, *GRAPHS, script=FROZEN)
    assert frozen.status == 0, frozen.output[-4000:]
    assert not agree(frozen, plain)
    assert frozen.losses[0] == plain.losses[0]  # nothing is replayed in the first step


# Four microbatches a step; rank 0 has two of them in flight, or more with virtual stages.
PIPELINE = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
VIRTUAL = (*PIPELINE, "--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")


@two_gpus
@pytest.mark.parametrize(
    "layout",
    [
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        tuple(OVERLAP),
        PIPELINE,
        VIRTUAL,
    ],
    ids=("tp2", "dp2", "pp2", "vpp2"),
)
def test_graphs_train_on_two_gpus(layout: tuple[str, ...]) -> None:
    same_training(2, NOISY, *layout)


ONE_GPU = ("--distributed-backend", "gloo")


def of_two_ranks(mistake: str, *flags: str) -> tuple[list[str], list[float], list[float]]:
    """The digests of both ranks' weights after each step, and the losses."""
    sizes = "--bf16 --hidden-size 128 --ffn-hidden-size 256".split()
    result = result_of(spawn(2, WITH_DIGESTS, mistake, *tiny_on_mock_data(*sizes, *flags)))
    assert result.status == 0, result.output[-4000:]
    digests = sorted(re.findall(r"weights of rank .*", result.output))
    assert len(digests) == 8 and len(result.losses) == 4 and len(result.evaluations) == 2
    return digests, result.losses, result.evaluations


@pytest.mark.parametrize("layout", [PIPELINE, VIRTUAL], ids=("pp2", "vpp2"))
@pytest.mark.parametrize(
    "recipe",
    [(), *((*RECIPE, name) for name in (NOISY, "tetrajet"))],
    ids=("bf16", "noisy", "tetrajet"),
)
def test_graphs_train_in_a_pipeline_on_one_gpu(
    recipe: tuple[str, ...], layout: tuple[str, ...]
) -> None:
    """Bit for bit, and without a recipe too."""
    flags = (*recipe, *layout, *ONE_GPU)
    assert of_two_ranks("none", *flags, *GRAPHS) == of_two_ranks("none", *flags)


def test_one_clock_for_all_microbatches_would_be_noticed() -> None:
    """Negative control: backward passes that draw the bits of a later microbatch."""
    flags = (*RECIPE, NOISY, *PIPELINE, *ONE_GPU)
    (wrong, losses, _), (right, wanted, _) = (
        of_two_ranks(mistake, *flags, *GRAPHS) for mistake in ("one-clock", "none")
    )
    assert losses[0] == wanted[0] and losses[2:] != wanted[2:] and wrong != right


FEW_BITS = {
    "gradients": ("tetrajet", *OVERLAP, "--fp4-grad-comm", "fp8"),
    "gradients, plain DDP": ("tetrajet", "--overlap-grad-reduce", "--fp4-grad-comm", "fp8"),
    "weights": ("tetrajet", *OVERLAP, "--fp4-param-gather"),
    "averaged weights": ("tetrajet-ema", *OVERLAP, "--fp4-param-gather"),
    "all": (
        *("tetrajet", *OVERLAP, "--fp4-grad-comm", "bf16", "--fp4-param-gather"),
        *("--fp4-optimizer-state", "m=fp8,v=fp16"),
    ),
}


@two_gpus
@pytest.mark.parametrize("flags", FEW_BITS.values(), ids=FEW_BITS)
def test_graphs_train_with_few_bits_between_two_gpus(flags: tuple[str, ...]) -> None:
    """Bit for bit: each exchange waits for the graphs of backward, and each replay for a gather."""
    flags = ("--fp4-weight-cache", "off", "--ddp-bucket-size", "20000", "--fp4-recipe", *flags)
    assert of_two_ranks("none", *flags, *GRAPHS) == of_two_ranks("none", *flags)


def test_graphs_train_padded_experts() -> None:
    same_training(1, NOISY, *PADDED_EXPERTS)


def test_graphs_resume(tmp_path: Path) -> None:
    flags = (*FLAGS, NOISY, *GRAPHS, "--save", str(tmp_path), "--save-interval", "2")
    whole = train(1, *flags)
    again = train(1, *flags, "--load", str(tmp_path), "--ckpt-step", "2")
    assert _close(again.evaluations, whole.evaluations, rel=1e-5)
    assert _close(gradients(again), gradients(whole)[2:], abs=2e-3)


@two_gpus
def test_graphs_end_where_they_are_told_to() -> None:
    layout = ("--tensor-model-parallel-size", "2", "--exit-interval", "3")
    assert len(train(2, *FLAGS, NOISY, *layout, *GRAPHS).losses) == 3


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
