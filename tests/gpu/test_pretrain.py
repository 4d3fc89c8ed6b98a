"""On a GPU: pretrain_gpt.py trains in BF16 and with every recipe."""

import pytest
import torch

from megatron_fp4 import list_recipes
from tests.mcore.launch import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
FLAGS = ("--bf16", "--hidden-size", "128", "--ffn-hidden-size", "256", "--train-iters", "8")


@pytest.mark.parametrize("recipe", [None, *list_recipes()], ids=str)
def test_one_gpu_learns(recipe: str | None) -> None:
    flags = () if recipe is None else ("--fp4-recipe", recipe)
    losses = train(1, *FLAGS, *flags).losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("recipe", [None, *list_recipes()], ids=str)
def test_two_gpus_learn_what_one_does(recipe: str | None) -> None:
    """Tensor and sequence parallelism with the distributed optimizer's sharding over one rank."""
    flags = () if recipe is None else ("--fp4-recipe", recipe)
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    losses = train(2, *FLAGS, *layout, *flags).losses
    assert len(losses) == 8 and losses[-1] < losses[0]
