"""What plans say of the mean of X: who makes and multiplies what, what is kept, in which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fp4 import Recipe, get_recipe
from megatron_fp4.cpp.following import refusal
from megatron_fp4.description import describe
from megatron_fp4.estimate.gpus import GPUS
from megatron_fp4.estimate.work import of_linear
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.memory import saved_bytes
from megatron_fp4.plan.show import show
from megatron_fp4.plan.words import notes
from megatron_fp4.recipe import HIGH_PRECISION
from megatron_fp4.setting import Setting, column_parallel
from megatron_fp4.target import Target, target_of

CPU, H200 = target_of(torch.device("cpu")), Target("cuda", (9, 0))
TETRAJET, MXFP4 = get_recipe("tetrajet"), get_recipe("mxfp4")


def mean_of(recipe: Recipe) -> Recipe:
    return replace(recipe, x_mean="subtracted")


def plan(recipe: Recipe, target: Target = H200, **fields: Any) -> LinearPlan:
    return compile_plan(
        recipe, Setting(256, 128, 64, torch.bfloat16, target, torch.bfloat16, **fields)
    )


@pytest.mark.parametrize("name", ["tetrajet", "mxfp4", "fp8"])
def test_kernels_and_products_stay(name: str) -> None:
    """On Hopper the rest of X is made by the kernels, and multiplied in FP8, as X is."""
    kept, made = plan(get_recipe(name)), plan(mean_of(get_recipe(name)))
    assert [gemm.multiplier.name for gemm in made.gemms] == ["hopper"] * 3
    for one, other in zip(kept.makings, made.makings, strict=True):
        assert one.maker is other.maker and len(one.operands) == len(other.operands)
    assert made.fprop.a.source == "centered" and made.mean_in_y is not None
    assert made.mean_in_y.name == "bf16" and made.mean_in_dw
    assert not kept.subtracts_mean


def test_a_line_says_that_no_kernel_subtracts() -> None:
    line = "no kernel subtracts the mean of X: PyTorch does, from X as a matrix"
    assert line in list(notes(plan(mean_of(TETRAJET))))
    assert line not in list(notes(plan(TETRAJET)))
    assert list(notes(plan(mean_of(TETRAJET), CPU))) == list(notes(plan(TETRAJET, CPU)))


def test_the_plan_in_words() -> None:
    sharding = column_parallel(2, sequence_parallel=True)
    text = show(plan(mean_of(TETRAJET), sharding=sharding))
    assert "X        without its mean over tokens, E2M1" in text
    assert (
        "mean of X  by pytorch, summed over the ranks, in bfloat16; times W^T by bf16, added to Y; "
        "times the sum of dY by pytorch, added to dW" in text
    )
    assert "the mean of X, 256 B" in text
    unpacked = show(plan(mean_of(MXFP4), packs_x=False))
    assert "X without its mean, " in unpacked and "summed over the ranks" not in unpacked
    assert "mean of X" not in show(plan(TETRAJET))
    words = describe(mean_of(TETRAJET))
    assert [line for line in words[1:] if line not in describe(TETRAJET)] == [
        "  mean of X over tokens: subtracted before X is quantized, and multiplied in high "
        "precision; not in evaluation",
    ]


def test_what_reads_x_in_high_precision_reads_its_mean_too() -> None:
    fprop = plan(mean_of(replace(MXFP4, wgrad=HIGH_PRECISION)))
    assert fprop.wgrad is not None and fprop.wgrad.b.source == "model" and not fprop.mean_in_dw
    wgrad = plan(mean_of(replace(MXFP4, fprop=HIGH_PRECISION)))
    assert wgrad.fprop.a.source == "model" and wgrad.mean_in_y is None and wgrad.mean_in_dw
    frozen = plan(mean_of(replace(MXFP4, fprop=HIGH_PRECISION)), dw=False)
    assert not frozen.subtracts_mean


@pytest.mark.parametrize("main_grad", [None, torch.float32, torch.bfloat16], ids=str)
def test_dw_is_rounded_once(main_grad: torch.dtype | None) -> None:
    """A product is added to a float32 main_grad at once, as the mean then is."""
    wgrad = plan(mean_of(TETRAJET), main_grad=main_grad).wgrad
    assert wgrad is not None
    assert wgrad.product.adds == (main_grad == torch.float32)
    assert wgrad.product.out_dtype == torch.float32


def test_what_comes_before_x_is_a_matrix() -> None:
    for fields in ({"swiglu": "after"}, {"normed": True}):
        made, kept = plan(mean_of(TETRAJET), **fields), plan(TETRAJET, **fields)
        assert made.compute_x is not None and kept.compute_x is None
        assert made.fprop.a.source == "centered" and made.saves_x == kept.saves_x == "operand"


def test_what_the_mean_takes() -> None:
    made, kept = plan(mean_of(TETRAJET)), plan(TETRAJET)
    assert saved_bytes(made) - saved_bytes(kept) == 2 * 128
    assert refusal(made) is None  # C++ repeats its sums and products
    gpu = GPUS["h200"]
    costs = [of_linear(each, gpu) for each in (made, kept)]
    forward, backward = (
        getattr(costs[0], name).gpu["byte quantized"]
        - getattr(costs[1], name).gpu["byte quantized"]
        for name in ("forward", "backward")
    )
    x, w, dy = 256 * 128, 64 * 128, 256 * 64
    assert (forward, backward) == (2 * (3 * x + w), 2 * dy + 8 * w)
