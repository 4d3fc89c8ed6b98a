"""On a GPU: pretrain_gpt.py trains in BF16 and with every recipe."""

import pytest
import torch

from megatron_fp4 import list_recipes
from testing.builders.small_recipes import flags_of
from testing.worlds.launch import OVERLAP, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
FLAGS = ("--bf16", "--hidden-size", "128", "--ffn-hidden-size", "256", "--train-iters", "8")


@pytest.mark.parametrize("recipe", [None, *list_recipes()], ids=str)
def test_one_gpu_learns(recipe: str | None) -> None:
    flags = () if recipe is None else flags_of(recipe)
    losses = train(1, *FLAGS, *flags).losses
    assert len(losses) == 8 and losses[-1] < losses[0]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
EXPERTS = """
    --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2
    --moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64
""".split()


@two_gpus
@pytest.mark.parametrize("recipe", list_recipes())
def test_experts_on_two_gpus_learn(recipe: str) -> None:
    losses = train(2, *FLAGS, *EXPERTS, *flags_of(recipe)).losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@two_gpus
def test_overlapped_communication_on_two_gpus_learns() -> None:
    losses = train(2, *FLAGS, *OVERLAP, "--fp4-recipe", "tetrajet").losses
    assert len(losses) == 8 and losses[-1] < losses[0]


@two_gpus
@pytest.mark.parametrize("recipe", [None, *list_recipes()], ids=str)
def test_two_gpus_learn_what_one_does(recipe: str | None) -> None:
    """Tensor and sequence parallelism with the distributed optimizer's sharding over one rank."""
    flags = () if recipe is None else flags_of(recipe)
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    losses = train(2, *FLAGS, *layout, *flags).losses
    assert len(losses) == 8 and losses[-1] < losses[0]
