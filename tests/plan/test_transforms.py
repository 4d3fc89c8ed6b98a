"""What a plan says of transforms that no kernel applies or undoes."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4 import Quantizer, Recipe, get_recipe
from megatron_fp4.arithmetic.hadamard import Hadamard
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


def forward_transformed(group: int, **fields: object) -> Recipe:
    """`tetrajet` with a transform of fprop. fields: of the quantizer of fprop's W."""
    recipe = get_recipe("tetrajet")
    w = Quantizer(rule="ceil", **fields)  # type: ignore[arg-type]
    fprop = replace(recipe.fprop, b=w, hadamard=Hadamard(group, "fixed"))
    return replace(recipe, name="transformed", fprop=fprop)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_kernels_undo_the_transform_of_fprop(group: int) -> None:
    """And quantize what they have computed, so that nothing is said."""
    target = Target("cuda", (9, 0))
    setting = Setting(256, 128, 128, torch.bfloat16, target, torch.bfloat16)
    plan = compile_plan(forward_transformed(group), setting)
    assert [line for line in notes(plan) if "ytorch" in line.lower()] == []
    assert {making.maker.name for making in plan.backward} == {"mxfp4 kernel", "block scale kernel"}


@pytest.mark.parametrize(
    "recipe", [forward_transformed(8), forward_transformed(32, row_max=1.0)], ids=["8", "outer"]
)
def test_where_pytorch_undoes_it_a_line_says_so(recipe: Recipe) -> None:
    found = [line for line in lines(recipe) if "undoes" in line]
    operands = ["W of dgrad"] + ["X of wgrad"] * (recipe.fprop.a == recipe.fprop.b)
    assert found == [f"PyTorch undoes the transform of fprop for {each}" for each in operands]
    assert not lines(recipe, "cpu")
