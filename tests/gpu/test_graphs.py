"""On a GPU: layers that are captured in CUDA graphs train as others do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

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
from tests.mcore.test_pipelined_graphs import PADDED_EXPERTS, RECIPE, TENSOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four GPUs")

# Weights stand still, so that what differs in one step does not grow in the next.
FLAGS = """
    --bf16 --hidden-size 128 --ffn-hidden-size 256 --train-iters 4 --lr 1e-12 --min-lr 1e-13
    --fp4-weight-cache off --fp4-recipe
""".split()
GRAPHS = ("--cuda-graph-impl", "local")
NOISY = str(Path(__file__).with_name("noisy.yaml"))
FROZEN = SCRIPTS / "pretrain_with_frozen_bits.py"
WITH_DIGESTS = SCRIPTS / "pretrain_with_digests.py"
GRAPH_MEMORY = SCRIPTS / "pretrain_telling_graph_memory.py"


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
        TENSOR,
        tuple(OVERLAP),
        PIPELINE,
        VIRTUAL,
    ],
    ids=("tp2", "dp2", "pp2", "vpp2"),
)
def test_graphs_train_on_two_gpus(layout: tuple[str, ...]) -> None:
    same_training(2, NOISY, *layout)


@four_gpus
@pytest.mark.parametrize("layout", [PIPELINE, VIRTUAL], ids=("pp2", "vpp2"))
def test_graphs_train_under_tensor_and_pipeline_parallelism(layout: tuple[str, ...]) -> None:
    same_training(4, NOISY, *TENSOR, *layout)


ONE_GPU = ("--distributed-backend", "gloo")


def of_two_ranks(mistake: str, *flags: str) -> tuple[list[str], list[float], list[float]]:
    """The digests of both ranks' weights after each step, and the losses."""
    sizes = "--bf16 --hidden-size 128 --ffn-hidden-size 256".split()
    result = result_of(spawn(2, WITH_DIGESTS, mistake, *tiny_on_mock_data(*sizes, *flags)))
    assert result.status == 0, result.output[-4000:]
    found = told(result)
    assert len(found[0]) == 8 and len(result.losses) == 4 and len(result.evaluations) == 2
    return found


def told(result: Result) -> tuple[list[str], list[float], list[float]]:
    """The digests of all ranks' weights after each step, and the losses."""
    digests = sorted(re.findall(r"weights of rank .*", result.output))
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
    "weights, by phases": (
        *("tetrajet", *OVERLAP, "--fp4-param-gather"),
        *("--fp4-bf16-after", "0.5"),
    ),
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


# --- recipes with phases --------------------------------------------------------------------------

PHASES = str(Path(__file__).parents[1] / "mcore" / "phases.yaml")  # begin with steps 3 and 5 of 6


def of_phases(processes: int, steps: int, *flags: str) -> Result:
    """A training with an evaluation after each step, which in the first step of a phase is right
    after the capture."""
    sizes = "--bf16 --hidden-size 128 --ffn-hidden-size 256 --num-layers 4".split()
    length = ("--train-iters", str(steps), "--eval-interval", "1")
    words = tiny_on_mock_data(*sizes, *length, *RECIPE, *flags)
    result = result_of(spawn(processes, WITH_DIGESTS, "none", *words))
    assert result.status == 0, result.output[-4000:]
    digests, losses, evaluations = told(result)
    assert len(digests) == processes * steps
    assert len(losses) == steps and len(evaluations) == steps + 2
    return result


def same_phases(processes: int, steps: int, begun: int, *flags: str) -> None:
    """With graphs and without, bit for bit. begun: how many phases begin, each with a capture."""
    replayed = of_phases(processes, steps, *flags, *GRAPHS)
    assert told(replayed) == told(of_phases(processes, steps, *flags))
    assert replayed.captures == 1 + begun


def test_graphs_train_each_phase_of_auto() -> None:
    """The last fifth of ten steps is a phase: the ninth runs without graphs, the tenth is a
    replay."""
    same_phases(1, 10, 1, "auto")


def test_graphs_train_each_phase_of_three_recipes() -> None:
    same_phases(1, 6, 2, PHASES)


def test_graphs_train_the_phase_of_bf16() -> None:
    same_phases(1, 6, 1, "tetrajet", "--fp4-bf16-after", "0.5")


def test_another_phase_would_be_noticed() -> None:
    """Negative control: what graphs would train that were kept when the phase begins."""
    kept = of_phases(1, 6, "tetrajet", *GRAPHS)
    phased = of_phases(1, 6, PHASES, *GRAPHS)
    (before, losses, _), (wanted, right, _) = told(kept), told(phased)
    assert before[:2] == wanted[:2] and losses[:2] == right[:2]
    assert not set(before[2:]) & set(wanted[2:])


@pytest.mark.parametrize("layout", [PIPELINE, VIRTUAL], ids=("pp2", "vpp2"))
def test_graphs_train_each_phase_in_a_pipeline_on_one_gpu(layout: tuple[str, ...]) -> None:
    same_phases(2, 6, 2, PHASES, *layout, *ONE_GPU)


@two_gpus
@pytest.mark.parametrize(
    "layout",
    [TENSOR, tuple(OVERLAP), PIPELINE],
    ids=("tp2", "dp2", "pp2"),
)
def test_graphs_train_each_phase_on_two_gpus(layout: tuple[str, ...]) -> None:
    same_phases(2, 6, 2, PHASES, *layout)


def memory_of_graphs(
    mistake: str, recipe: str, ranks: int, *layout: str
) -> tuple[list[int], list[int]]:
    """(after each of six steps, whenever graphs were dropped) the bytes that are reserved for
    graphs on rank 0, of layers whose tensors are larger than what GEMMs need beside them."""
    sizes = """
        --bf16 --num-layers 4 --hidden-size 1024 --ffn-hidden-size 4096
        --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 --train-iters 6
    """.split()
    words = tiny_on_mock_data(*sizes, *RECIPE, recipe, *GRAPHS, *layout)
    result = result_of(spawn(ranks, GRAPH_MEMORY, mistake, *words))
    assert result.status == 0, result.output[-4000:]
    steps, dropped = (
        [int(size) for size in re.findall(rf"memory of graphs, {when}: (\d+)", result.output)]
        for when in ("step", "dropped")
    )
    assert len(steps) == 6 and len(dropped) == 2 and result.captures == 3
    return steps, dropped


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, ()), pytest.param(2, PIPELINE, marks=two_gpus)],
    ids=("one", "pp2"),
)
def test_each_phase_gives_the_memory_of_graphs_back(
    ranks: int, layout: tuple[str, ...], tmp_path: Path
) -> None:
    """The third phase is the first recipe again, so that its graphs take as much as the first."""
    path = tmp_path / "again.yaml"
    phases = "{after: 0.3, recipe: mxfp4}, {after: 0.6, recipe: tetrajet}"
    path.write_text(f"base: tetrajet\nphases: [{phases}]\n")
    steps, dropped = memory_of_graphs("none", str(path), ranks, *layout)
    first = steps[0]
    assert first > 200 << 20  # else the test would see buffers of GEMMs alone
    assert steps[1] == first  # replays take nothing
    assert all(size < first / 4 for size in dropped)
    assert all(size < 1.25 * first for size in steps)
    assert steps[5] == pytest.approx(first, rel=0.1)
    # Negative control: memory that stays, of three captures.
    steps, dropped = memory_of_graphs("keep-pool", str(path), ranks, *layout)
    assert dropped[0] > 0.75 * first and steps[5] > 2 * first


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
