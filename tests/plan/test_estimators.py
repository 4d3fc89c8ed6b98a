"""What plans say of gradient estimators: what applies them, what is kept, and in which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_quantizer, get_recipe
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.cpp.following import refusal
from megatron_fp4.description import describe
from megatron_fp4.plan.compiler import compile_plan
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.plan.memory import operand_bytes, saved_bytes
from megatron_fp4.plan.show import show
from megatron_fp4.plan.words import notes
from megatron_fp4.recipes.files import recipe_of_fields
from megatron_fp4.setting import Setting, Sharding, column_parallel, row_parallel
from megatron_fp4.target import Target, target_of

CPU, H200 = target_of(torch.device("cpu")), Target("cuda", (9, 0))
MX, VECTOR, NVFP4 = Quantizer(), get_quantizer("vector"), get_quantizer("nvfp4")
ROWS_OR_BLOCKS = "takes a float32 scale for each row, or E8M0 scales for blocks of a row"
SQUARE = replace(MX, block=(32, 32))
ROW_SCALES = replace(NVFP4, tensor_max=0.0, row_max=448.0)
VJP = Estimator(form="sigmoid", maximum="vjp")
OUTER = Estimator(form="straight-through", outer_scale="vjp")


def plan(recipe: Recipe, target: Target = H200, **fields: Any) -> LinearPlan:
    return compile_plan(
        recipe, Setting(256, 128, 64, torch.bfloat16, target, torch.bfloat16, **fields)
    )


def recipe(quantizer: Quantizer, **fields: Any) -> Recipe:
    return Recipe("r", fprop=GemmRecipe(quantizer, quantizer), **fields)


@pytest.mark.parametrize("quantizer", [VECTOR, MX, replace(MX, block=(1, 16), rule="ceil")])
@pytest.mark.parametrize("backward", ["raw", "forward"])
def test_the_kernel_applies_dge_to_w(backward: Any, quantizer: Quantizer) -> None:
    made = plan(recipe(quantizer, backward=backward, estimator=Estimator()))
    assert made.estimates_w is not None and made.estimates_w.name == "dge kernel"
    assert "not used: dge kernel" not in "\n".join(notes(made))
    on_cpu = plan(recipe(quantizer, backward=backward, estimator=Estimator()), CPU)
    assert on_cpu.estimates_w is not None and on_cpu.estimates_w.name == "pytorch"


@pytest.mark.parametrize(
    ("quantizer", "fields", "name", "why"),
    [
        (VECTOR, {"estimator": VJP}, "dW", "has no sigmoid"),
        (
            VECTOR,
            {"estimator": Estimator(maximum="vjp")},
            "dW",
            "multiplies by the factor of dge alone",
        ),
        (
            VECTOR,
            {"estimator": Estimator(beyond="zero")},
            "dW",
            "multiplies by the factor of dge alone",
        ),
        (VECTOR, {"x_estimator": Estimator()}, "dX", "is for W alone"),
        (NVFP4, {"estimator": Estimator()}, "dW", ROWS_OR_BLOCKS),
        (SQUARE, {"estimator": Estimator()}, "dW", ROWS_OR_BLOCKS),
        (
            replace(VECTOR, element="e1m2"),
            {"estimator": Estimator()},
            "dW",
            "has the grid of E2M1 alone",
        ),
    ],
)
def test_the_start_table_says_why_pytorch_applies_one(
    quantizer: Quantizer, fields: dict[str, Any], name: str, why: str
) -> None:
    said = "\n".join(notes(plan(recipe(quantizer, **fields))))
    assert f"not used: dge kernel: {why}; PyTorch applies the estimator to {name}" in said


def test_what_is_kept() -> None:
    """fprop's codes beside X and W themselves, where an estimator reads both."""
    both = {"estimator": VJP, "x_estimator": VJP}
    for backward in ("raw", "forward"):
        made = plan(recipe(MX, backward=backward, **both))
        assert (made.saves_x, made.saves_w) == ("operand", "operand")
        x = 256 * 128 * 2
        assert saved_bytes(made) == x + operand_bytes(made.fprop.a) + operand_bytes(made.fprop.b)
        assert "X itself, which its estimator reads" in show(made)
    frozen = plan(recipe(MX, **both), dx=False)  # dX has no factor then
    assert frozen.estimates_x is None and frozen.saves_x == "model"
    frozen = plan(recipe(MX, **both), dw=False)
    assert frozen.estimates_w is None and (frozen.saves_x, frozen.saves_w) == ("operand", "model")


@pytest.mark.parametrize(
    ("quantizer", "sharding", "share"),
    [
        (MX, row_parallel(2), ""),
        (NVFP4, row_parallel(2), ""),  # ranks share the tensor scale, which is held fixed
        (VECTOR, row_parallel(2), "xw"),
        (VECTOR, column_parallel(2, sequence_parallel=True), ""),
        (replace(VECTOR, block=(0, 0)), column_parallel(2, sequence_parallel=True), "xw"),
        (replace(VECTOR, block=(0, 0)), column_parallel(2, sums_dx=True), "w"),
    ],
    ids=str,
)
def test_ranks_that_share_a_block_sum_over_it(
    quantizer: Quantizer, sharding: Sharding, share: str
) -> None:
    made = plan(recipe(quantizer, estimator=VJP, x_estimator=VJP), sharding=sharding)
    for letter, estimates in (("x", made.estimates_x), ("w", made.estimates_w)):
        assert estimates is not None and estimates.takes_ranks == (letter in share)
    factor = Estimator(form="sigmoid")  # sums over nothing
    made = plan(recipe(quantizer, estimator=factor, x_estimator=factor), sharding=sharding)
    assert made.estimates_x is not None and not made.estimates_x.takes_ranks


@pytest.mark.parametrize(
    ("quantizer", "sharding", "share"),
    [
        (NVFP4, row_parallel(2), "xw"),
        (NVFP4, column_parallel(2, sequence_parallel=True), "xw"),
        (NVFP4, column_parallel(2, sums_dx=True), "w"),
        (ROW_SCALES, row_parallel(2), "xw"),
        (ROW_SCALES, column_parallel(2, sequence_parallel=True), ""),
    ],
    ids=str,
)
def test_ranks_that_share_an_outer_scale_sum_over_it(
    quantizer: Quantizer, sharding: Sharding, share: str
) -> None:
    both = {"estimator": OUTER, "x_estimator": OUTER}
    made = plan(recipe(quantizer, **both), sharding=sharding)
    for name, estimates in (("x", made.estimates_x), ("w", made.estimates_w)):
        assert estimates is not None and not estimates.takes_ranks
        assert estimates.takes_outer_ranks == (name in share)
        line = next(
            line for line in show(made).splitlines() if line.startswith(f"d{name.upper()} ")
        )
        assert "and through the outer scale" in line
        assert ("sums over the ranks" in line) == (name in share)
    ignored = replace(OUTER, form="sigmoid", outer_scale="straight-through")
    made = plan(recipe(quantizer, estimator=ignored, x_estimator=ignored), sharding=sharding)
    assert made.estimates_x is not None and not made.estimates_x.takes_outer_ranks
    one = plan(recipe(quantizer, **both))
    assert one.estimates_x is not None and not one.estimates_x.takes_outer_ranks


def test_random_signs_that_pytorch_draws_are_not_recorded() -> None:
    """They would stay those of the recorded step. Negative control: kernels draw fprop's own."""
    turned = GemmRecipe(MX, MX, Hadamard(32))
    plain = Recipe("r", fprop=turned, dgrad=GemmRecipe(MX, MX), wgrad=GemmRecipe(MX, MX))
    assert refusal(plan(plain)) is None
    for fields in ({"estimator": VJP}, {"x_estimator": VJP}):
        found = refusal(plan(replace(plain, **fields)))  # type: ignore[arg-type]
        assert found == "PyTorch draws the random signs of fprop"
    constant = replace(plain, fprop=GemmRecipe(MX, MX, Hadamard(32, "none")), estimator=VJP)
    assert refusal(plan(constant)) is None


def test_descriptions() -> None:
    words = describe(
        recipe(
            MX,
            estimator=Estimator(form="spline", width=0.25, beyond="zero"),
            x_estimator=Estimator(form="straight-through", maximum="softmax", temperature=2.0),
        )
    )
    assert words[-2:] == [
        "  gradient of W: times the slope of a spline (width 0.25), 0 beyond the grid",
        "  gradient of X: straight through, and through the maximum of a block (softmax at "
        "temperature 2)",
    ]
    [*_, last] = describe(recipe(NVFP4, x_estimator=OUTER))
    assert last == "  gradient of X: straight through, and through the outer scale"


def test_a_recipe_that_a_checkpoint_recorded_before_there_were_forms() -> None:
    content = {
        "name": "old",
        "fprop": {"a": "vector", "b": "vector"},
        "backward": "forward",
        "estimator": {"k": 3.0, "clip": 2.0},
    }
    assert recipe_of_fields(content, "a checkpoint").estimator == Estimator(k=3.0, clip=2.0)
    assert get_recipe("dge-occ").estimator == Estimator(form="dge", k=5.0, clip=3.0)
