"""Both operands of a product are transformed along the axis that it contracts, so that it does not
change. The plan says along which axis; nothing is rounded here."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.hadamard import FIXED_SIGNS
from megatron_fp4.makers.base import Given, OperandPlan
from megatron_fp4.makers.pytorch import before_quantizer
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.setting import Setting
from megatron_fp4.target import Target

TOKENS, INPUTS, OUTPUTS = 128, 256, 384  # the axes cannot be taken for one another
GEMMS = [
    (recipe, gemm)
    for recipe in ("ue5m3", "mxfp4-rht-sr", "quartet-2")
    for gemm in ("dgrad", "wgrad")
]


def error(recipe: str, gemm: str, wrong: bool = False) -> float:
    """The relative error of a GEMM of transformed operands in float32. wrong: the second operand is
    transformed along its other axis."""
    setting = Setting(TOKENS, INPUTS, OUTPUTS, torch.float32, Target("cpu", (0, 0)), torch.float32)
    plan = compile_plan(get_recipe(recipe), setting)
    planned = {"dgrad": plan.dgrad, "wgrad": plan.wgrad}[gemm]
    assert planned is not None
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (TOKENS, INPUTS), "w": (OUTPUTS, INPUTS), "dy": (TOKENS, OUTPUTS)}
    matrices = {each: torch.randn(shape, generator=generator) for each, shape in shapes.items()}
    a, b = planned.a, planned.b
    assert a.group == b.group > 0

    def product(transforms: bool) -> Tensor:
        found = []
        for each in (a, b):
            x = matrices[each.letter].double()
            if transforms:
                x = transformed(matrices[each.letter], each, each.axis ^ (wrong and each is b))
            found.append(x.double().movedim(each.axis, -1))
        return found[0] @ found[1].t()

    exact = product(False)
    return float((product(True) - exact).norm() / exact.norm())


def transformed(x: Tensor, operand: OperandPlan, axis: int) -> Tensor:
    unquantized = replace(operand, quantizer=None, axis=axis)
    return before_quantizer(x, unquantized, Given(signs=FIXED_SIGNS))


@pytest.mark.parametrize(("recipe", "gemm"), [*GEMMS, ("nvfp4-nvidia", "wgrad")])
def test_a_product_of_transformed_operands_is_the_product(recipe: str, gemm: str) -> None:
    assert error(recipe, gemm) < 1e-6
    assert error(recipe, gemm, wrong=True) > 1  # the known mistake
