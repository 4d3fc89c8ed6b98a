"""The gradient through the rounding of block scales in a linear, by numpy in float64.

What goes through the maximum of a block is, of a scale S that is proportional to the maximum, known
from the estimators without `scale_form`. It is multiplied here by f'(w) w/S, with w computed from
the tensor, and f' from the neighbours of w among the scales that ml_dtypes decodes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_quantizer, get_recipe, linear
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.description import estimator_words
from testing.oracles import relative_error, ue5m3_value
from tests.test_linear_estimators import BOUND, problem, run

NVFP4 = get_quantizer("nvfp4")
QUANTIZERS = {
    "e8m0": Quantizer(rule="nearest"),
    "e8m0, rows": Quantizer(rule="nearest", row_max=1.0),
    "nvfp4": NVFP4,
    "inflated": get_quantizer("nvfp4-17-16"),
    "prescaled": replace(NVFP4, prescale=0.75),
    "ue5m3": Quantizer(scale="ue5m3", block=(1, 16), rule="nearest"),
    "square": Quantizer(block=(16, 16), rule="nearest"),
    "uniform": Quantizer(element="e1m2", scale="ue5m3", block=(1, 16), rule="nearest"),
}


def numbers(scale: str) -> NDArray[np.float64]:
    """All finite scales of a format."""
    codes = np.arange(255).astype(np.uint8)
    if scale == "ue5m3":
        values = (ue5m3_value(code) for code in range(255))
        return np.array([float(value) for value in values if value is not None])
    dtype = {"e8m0": ml_dtypes.float8_e8m0fnu, "e4m3": ml_dtypes.float8_e4m3fn}[scale]
    found = codes.view(dtype).astype(np.float64)
    return np.unique(found[np.isfinite(found) & (found >= 0)])


def changes(x: Tensor, quantizer: Quantizer, e: Estimator) -> Tensor:
    """dS/dm times m/S, for each element of x [rows, columns] by its block."""
    q = quantize_matrix(x, quantizer, axis=1)
    height, length = quantizer.block
    rows, columns = x.shape
    blocks = x.double().abs().view(rows // height, height, columns // length, length)
    outer = 1.0 if q.tensor_scale is None else q.tensor_scale.double()
    largest = {"e2m1": 6, "e1m2": 1.75}[quantizer.element]
    w = (blocks.amax((1, 3)) / (largest * outer) * quantizer.inflate).numpy()
    grid, s = numbers(quantizer.scale), q.block_scales(torch.float64).numpy().reshape(w.shape)
    i = np.clip(np.searchsorted(grid, w, side="right") - 1, 0, len(grid) - 2)
    u = 2 * (w - grid[i]) / (grid[i + 1] - grid[i]) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = {
            "dge": lambda: np.minimum(np.abs(u) ** (1 / e.k - 1) / e.k, e.clip),
            "spline": lambda: np.where(np.abs(u) <= e.width, 1 / e.width, 0),
            "sigmoid": lambda: e.k / 2 / np.cosh(e.k * u / 2) ** 2 / np.tanh(e.k / 2),
        }[e.scale_form]()
        found = np.where(s > 0, slope * w / s, 0)
    return torch.from_numpy(found.repeat(height, 0).repeat(length, 1))


@pytest.mark.parametrize(
    ("form", "maximum", "scale_form"),
    [
        ("dge", "vjp", "dge"),
        ("sigmoid", "vjp", "spline"),
        ("straight-through", "softmax", "sigmoid"),
        ("spline", "absmax", "sigmoid"),
    ],
)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_against_the_gradient_of_a_proportional_scale(
    name: str, form: Any, maximum: Any, scale_form: Any
) -> None:
    quantizer = QUANTIZERS[name]
    e = Estimator(form, maximum=maximum, scale_form=scale_form)
    found = run(estimated(quantizer, e), torch.float64)
    proportional = run(
        estimated(quantizer, replace(e, scale_form="straight-through")), torch.float64
    )
    # Without the maximum: of a form that is straight through there is then no estimator.
    slope = Estimator(form) if form != "straight-through" else None
    plain = run(estimated(quantizer, slope), torch.float64)
    x, w, _ = problem(torch.float64)
    for gradient, tensor in (("dx", x), ("dw", w)):
        through = proportional[gradient] - plain[gradient]
        wanted = plain[gradient] + through * changes(tensor, quantizer, e)
        assert relative_error(found[gradient], wanted) < BOUND[torch.float64], gradient
        assert relative_error(proportional[gradient], wanted) > 1e-4, gradient  # the control
        other = replace(e, scale_form="spline" if scale_form != "spline" else "sigmoid")
        mistaken = plain[gradient] + through * changes(tensor, quantizer, other)
        assert relative_error(mistaken, wanted) > 1e-4, gradient


def estimated(quantizer: Quantizer, e: Estimator | None) -> Recipe:
    """A recipe with an estimator of both operands; None is no estimator."""
    gemm = GemmRecipe(quantizer, quantizer, correction=quantizer.prescale**-2)
    return Recipe("estimated", fprop=gemm, backward="raw", estimator=e, x_estimator=e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_the_dtypes_of_training(dtype: torch.dtype) -> None:
    e = Estimator("sigmoid", maximum="vjp", scale_form="sigmoid")
    recipe = estimated(QUANTIZERS["e8m0"], e)
    found, wide = run(recipe, dtype), problem(dtype)
    assert all(bool(found[name].isfinite().all()) for name in ("dx", "dw"))
    x, w, dy = (t.double() for t in wide)
    exact = run_of(recipe, x, w, dy)
    for name in ("dx", "dw"):
        assert relative_error(found[name], exact[name]) < 1.5 * BOUND[dtype], name


def run_of(recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    leaves = x.requires_grad_(), w.requires_grad_()
    linear(*leaves, recipe=recipe, seed=9, step=4).backward(dy)
    return {"dx": x.grad, "dw": w.grad}  # type: ignore[dict-item]


def test_a_recipe_file_has_it(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "base: mxfp4\noptions: {rule: nearest}\n"
        "estimator: {form: sigmoid, k: 4, maximum: vjp, scale_form: spline, width: 0.25}\n"
    )
    found = get_recipe(str(file)).estimator
    assert found == Estimator("sigmoid", k=4.0, maximum="vjp", scale_form="spline", width=0.25)
    assert estimator_words(found) == (
        "times the slope of a sigmoid (k 4), and through the maximum of a block (vjp, "
        "times the slope of a spline (width 0.25) of its scale)"
    )
