"""On a GPU: pretrain_gpt.py trains in BF16 and with every recipe."""

from pathlib import Path

import pytest
import torch

from megatron_fp4 import list_recipes
from testing.builders.small_recipes import flags_of
from testing.worlds.launch import OVERLAP, Result, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
FLAGS = ("--bf16", "--hidden-size", "128", "--ffn-hidden-size", "256", "--train-iters", "8")


def learn(processes: int, *flags: str) -> Result:
    """Trains with FLAGS and `flags`; the first launch on a machine compiles for some minutes."""
    return train(processes, *FLAGS, *flags)


@pytest.mark.parametrize("recipe", [None, *list_recipes()], ids=str)
def test_one_gpu_learns(recipe: str | None) -> None:
    flags = () if recipe is None else flags_of(recipe)
    losses = learn(1, *flags).losses
    assert len(losses) == 8 and losses[-1] < losses[0]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
EXPERTS = """
    --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2
    --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64
""".split()


@two_gpus
@pytest.mark.parametrize("recipe", list_recipes())
def test_experts_on_two_gpus_learn(recipe: str) -> None:
    losses = learn(2, *EXPERTS, *flags_of(recipe)).losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@two_gpus
def test_overlapped_communication_on_two_gpus_learns() -> None:
    losses = learn(2, *OVERLAP, "--fp4-recipe", "tetrajet").losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@two_gpus
@pytest.mark.parametrize("recipe", [None, *list_recipes()], ids=str)
def test_two_gpus_learn_what_one_does(recipe: str | None) -> None:
    """Tensor and sequence parallelism with the distributed optimizer's sharding over one rank."""
    flags = () if recipe is None else flags_of(recipe)
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    losses = learn(2, *layout, *flags).losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", list_recipes())
def test_products_in_bf16_are_those_of_the_same_codes(recipe: str) -> None:
    """--fp4-multiplier bf16: the forward pass of the first step differs by rounding alone."""
    first = learn(1, *flags_of(recipe)).losses
    other = learn(1, *flags_of(recipe), "--fp4-multiplier", "bf16").losses
    assert other[0] == pytest.approx(first[0], rel=1e-3) and other[-1] < other[0]


def test_a_phase_trains_as_its_recipe_would(tmp_path: Path) -> None:
    """Half of the run in TetraJet and half in FP8, in C++: as two runs, bit for bit."""
    path = tmp_path / "phases.yaml"
    path.write_text("base: tetrajet\nphases: [{after: 0.5, recipe: fp8}]\n")
    saved = ("--save", str(tmp_path / "run"), "--save-interval", "4")
    first = learn(1, "--fp4-recipe", "tetrajet", *saved)
    load = ("--load", str(tmp_path / "run"), "--ckpt-step", "4", "--fp4-load-anyway")
    second = learn(1, "--fp4-recipe", "fp8", *load)
    turned = learn(1, "--fp4-recipe", str(path))
    assert turned.losses == first.losses[:4] + second.losses
    assert turned.losses[4:] != first.losses[4:]
