"""What a plan says of transforms that no kernel computes."""

import pytest
import torch

from megatron_fp4 import get_recipe
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.setting import Setting
from megatron_fp4.plan.words import notes
from megatron_fp4.target import Target


def lines(recipe: str, kind: str = "cuda") -> list[str]:
    target = Target(kind, (9, 0) if kind == "cuda" else (0, 0))
    setting = Setting(256, 128, 128, torch.bfloat16, target, torch.bfloat16)
    return [line for line in notes(compile_plan(get_recipe(recipe), setting)) if "transf" in line]


@pytest.mark.parametrize(
    ("recipe", "operands"),
    [
        ("nvfp4-nvidia", ["X of wgrad", "dY of wgrad"]),
        ("ue5m3", ["W of dgrad", "X of wgrad", "dY of dgrad", "dY of wgrad"]),
        ("quartet-2", ["W of dgrad", "X of wgrad", "dY of dgrad", "dY of wgrad"]),
    ],
)
def test_pytorch_computes_those_before_small_float_scales(recipe: str, operands: list[str]) -> None:
    assert sorted(lines(recipe)) == sorted(
        f"PyTorch transforms {each}, and the block scale kernel quantizes the result"
        for each in operands
    )


def test_others_need_no_line() -> None:
    """A kernel transforms before E8M0 scales, and a CPU runs no kernels."""
    assert not lines("mxfp4-rht-sr") and not lines("nvfp4-nvidia", "cpu")
