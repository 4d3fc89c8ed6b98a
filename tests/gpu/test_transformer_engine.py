"""On a GPU with Transformer Engine: its norm and attention around this package's linears, and its
linears with this package's quantizers."""

import importlib.util

import pytest
import torch

from benchmarks import te
from megatron_fp4.recipes import uniform_recipes
from testing.builders.small_recipes import flags_of
from testing.worlds.launch import Result, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine"
    ),
]
FLAGS = ("--bf16", "--hidden-size", "128", "--ffn-hidden-size", "256", "--train-iters", "8")


def run(processes: int, implementation: str, recipe: str | None, *flags: str) -> Result:
    chosen = () if recipe is None else flags_of(recipe)
    words = (*FLAGS, "--transformer-impl", implementation, *chosen, *flags)
    return train(processes, *words)  # its first steps compile


def test_bf16_learns() -> None:
    """Upstream's own layers, to which this package adds nothing."""
    losses = run(1, "transformer_engine", None).losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", uniform_recipes())
def test_one_gpu_learns_as_with_the_local_layers(recipe: str) -> None:
    """The same initial weights; what parts the runs is the order of sums in norm and attention."""
    local, engine = run(1, "local", recipe), run(1, "transformer_engine", recipe)
    assert "decoder.layers.*.mlp.linear_fc1" in engine.output  # the table: what is quantized
    assert engine.losses == pytest.approx(local.losses, rel=2e-3)
    assert engine.losses[-1] < engine.losses[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("recipe", uniform_recipes())
def test_two_gpus_learn(recipe: str) -> None:
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    losses = run(2, "transformer_engine", recipe, *layout).losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", ["tetrajet", "dge-occ"])
def test_its_adam_stores_moments_in_few_bits(recipe: str) -> None:
    """Upstream's --use-precision-aware-optimizer, whose Adam keeps the main weights too."""
    words = (recipe, "--use-distributed-optimizer")
    few = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16".split()
    plain, found = (run(1, "local", *words, *more).losses for more in ((), few))
    assert found[-1] < found[0] == plain[0]
    assert found == pytest.approx(plain, rel=5e-3)
    assert found != plain  # the control


# --- the rows of the benchmarks -------------------------------------------------------------------


@pytest.mark.parametrize("name", te.ROWS)
def test_a_linear_of_the_benchmarks_has_the_results_of_its_format(name: str) -> None:
    assert te.tried(name) in (te.GRAPHS, te.EAGER)


@pytest.mark.parametrize("name", te.FP8)
def test_its_fp8_learns(name: str) -> None:
    """As BF16 does, apart from rounding: the same initial weights."""
    plain = run(1, "transformer_engine", None).losses
    losses = run(1, "transformer_engine", None, *te.flags(name)).losses
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert losses == pytest.approx(plain, rel=5e-2)
    assert losses[0] != plain[0]  # the control


# --- its own linears ------------------------------------------------------------------------------

UPSTREAM = ("--fp4-format", "e2m1", "--fp4-recipe", "custom", "--fp4-quantizer-factory")


def upstream(processes: int, recipe: str, *flags: str) -> Result:
    factory = f"megatron_fp4.te.{recipe}"
    return run(processes, "transformer_engine", None, *UPSTREAM, factory, *flags)


def test_its_linears_train_as_this_package_s() -> None:
    """Nearest rounding alone: the same operands and products. dW is rounded on its way to
    main_grad, and the optimizer's steps part from there."""
    own = run(1, "transformer_engine", "mxfp4").losses
    found = upstream(1, "mxfp4").losses
    plain = run(1, "transformer_engine", None).losses
    assert found[0] == pytest.approx(own[0], rel=2e-6)
    assert found == pytest.approx(own, rel=2e-3)
    assert plain[0] != pytest.approx(own[0], rel=2e-6)  # the control: BF16


def test_its_linears_learn_under_stochastic_rounding() -> None:
    losses = upstream(1, "tetrajet").losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_its_linears_on_two_gpus() -> None:
    """As one GPU from the same weights: Megatron's draws on GPUs differ with the layout."""
    same = "--use-cpu-initialization"
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    losses = upstream(2, "mxfp4", same, *layout).losses
    assert losses == pytest.approx(upstream(1, "mxfp4", same).losses, rel=2e-3)
