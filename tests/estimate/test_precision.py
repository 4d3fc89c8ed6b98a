"""The precision in which the cost model multiplies two formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_fp4 import GemmRecipe, Quantizer, get_quantizer
from megatron_fp4.estimate.costs import Cost, costs
from megatron_fp4.estimate.gpus import MEASURED, Gpu
from megatron_fp4.estimate.overhead import DEVICES, plan_of, setting_of
from megatron_fp4.estimate.plans import BF16

TOKENS, IN, OUT = 256, 128, 384
BLACKWELL = DEVICES["blackwell"]


def of_fprop(a: Any, b: Any, gpu: Gpu) -> Sequence[Cost]:
    recipe = replace(BF16, fprop=GemmRecipe(a, b))
    each = costs(plan_of(recipe, setting_of(gpu, IN, OUT, TOKENS), gpu), gpu)
    return [cost for cost in each if cost.gemm == "fprop"]


def precision(a: Any, b: Any, gpu: Gpu) -> Any:
    [product] = [cost for cost in of_fprop(a, b, gpu) if cost.technique == "product"]
    return product.precision


def test_the_precision_of_products() -> None:
    """FP8 is exact for powers of two and for scales that are left out of the product. No FP4 tensor
    core has an instruction for UE5M3 scales."""
    e4m3, rows = get_quantizer("nvfp4"), get_quantizer("vector")
    fp8, ue5m3 = replace(rows, element="e4m3"), replace(e4m3, scale="ue5m3")
    for a, b, hopper, blackwell in (
        (Quantizer(), Quantizer(block=(1, 16)), "fp8", "fp4"),
        (Quantizer(), e4m3, "bf16", "fp4"),
        (ue5m3, e4m3, "bf16", "bf16"),
        (ue5m3, ue5m3, "bf16", "bf16"),
        (replace(ue5m3, rule="mse-fp8"), Quantizer(), "fp8", "fp8"),
        (rows, rows, "fp8", "fp4"),
        (fp8, rows, "fp8", "fp8"),
        (fp8, e4m3, "bf16", "fp8"),
        (replace(Quantizer(), row_max=1.0), Quantizer(), "fp8", "fp4"),
        (replace(e4m3, tensor_max=0.0, row_max=448.0), Quantizer(), "bf16", "fp4"),
        (Quantizer(scale="fp32", rule="absmax"), Quantizer(), "fp8", "fp4"),
        (Quantizer(), None, "bf16", "bf16"),
    ):
        assert precision(a, b, MEASURED) == hopper
        assert precision(a, b, BLACKWELL) == blackwell


@pytest.mark.parametrize("gpu", [MEASURED, BLACKWELL], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "vector"])
def test_uniform_elements_are_multiplied_in_bf16(name: str, gpu: Gpu) -> None:
    """Alone and beside E2M1: both operands are written in two bytes for each element."""
    plain = get_quantizer(name)
    uniform = replace(plain, element="e1m2")
    for a, b in ((uniform, uniform), (plain, uniform), (uniform, plain)):
        assert precision(a, b, gpu) == "bf16"
        forms = [cost.written for cost in of_fprop(a, b, gpu) if cost.technique == "form"]
        assert sorted(forms) == sorted([2 * TOKENS * IN, 2 * OUT * IN])
    hopper = "bf16" if name == "nvfp4" else "fp8"  # the control
    assert precision(plain, plain, gpu) == ("fp4" if gpu is BLACKWELL else hopper)
