"""What a plan says of transforms that no kernel applies."""

import pytest
import torch

from megatron_fp4 import Recipe, get_recipe
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.words import notes
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target


def lines(recipe: Recipe, kind: str = "cuda") -> list[str]:
    target = Target(kind, (9, 0) if kind == "cuda" else (0, 0))
    setting = Setting(256, 128, 128, torch.bfloat16, target, torch.bfloat16)
    return [line for line in notes(compile_plan(recipe, setting)) if "transf" in line]


SMALL = get_recipe("ue5m3", hadamard=8)  # tensor cores multiply by no matrix of 8


def test_pytorch_applies_those_that_tensor_cores_cannot() -> None:
    operands = "W of dgrad", "X of wgrad", "dY of dgrad", "dY of wgrad"
    said = [
        f"PyTorch transforms {o}, and the block scale kernel quantizes the result" for o in operands
    ]
    assert sorted(lines(SMALL)) == sorted(said)


@pytest.mark.parametrize("recipe", ["mxfp4-rht-sr", "nvfp4-nvidia", "ue5m3", "quartet-2"])
def test_others_need_no_line(recipe: str) -> None:
    """Kernels apply them; a CPU runs no kernels."""
    assert not lines(get_recipe(recipe)) and not lines(SMALL, "cpu")
