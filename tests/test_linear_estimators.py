"""Gradient estimators of X and W in a linear, against a composition in float64 that is written out
here: of the package it uses the quantizers, and nothing of estimators, plans or execution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Quantizer, Recipe, get_quantizer, get_recipe, linear
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.philox import Key, random_signs, stream_id
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from testing.oracles import normal, relative_error

TOKENS, IN, OUT = 64, 96, 64
BOUND = {torch.bfloat16: 2e-3, torch.float32: 2e-4, torch.float64: 1e-12}
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GRIDS = {"e2m1": GRID, "e1m2": np.arange(8) / 4}
CEIL, FLOOR = Quantizer(rule="ceil"), Quantizer()
VECTOR, NVFP4 = get_quantizer("vector"), get_quantizer("nvfp4")
QUANTIZERS = {
    "ceil": CEIL,
    "floor": FLOOR,  # clips
    "nvfp4": NVFP4,
    "vector": VECTOR,
    "tensor": replace(VECTOR, block=(0, 0)),
    "square": Quantizer(block=(16, 16)),
    "ue5m3": Quantizer(scale="ue5m3", block=(1, 16), rule="up"),
    "uniform": Quantizer(element="e1m2"),  # clips
    "uniform, up": Quantizer(element="e1m2", scale="ue5m3", block=(1, 16), rule="up"),
}
ESTIMATORS = {
    "dge": Estimator(),
    "sigmoid": Estimator(form="sigmoid", k=4.0),
    "spline, 0 beyond": Estimator(form="spline", width=0.3, beyond="zero"),
    "dge, absmax": Estimator(k=3.0, maximum="absmax"),
    "sigmoid, vjp": Estimator(form="sigmoid", maximum="vjp"),
    "spline, softmax": Estimator(form="spline", maximum="softmax", temperature=0.7),
    "straight through, vjp": Estimator(form="straight-through", maximum="vjp"),
    "straight through, 0 beyond": Estimator(form="straight-through", beyond="zero"),
}


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = normal((TOKENS, IN), 1) * normal((TOKENS, 1), 5).exp() + 0.2
    x[:, 11] *= 25
    x[3, :32] = 0  # whole blocks of zeros
    w = normal((OUT, IN), 2) * 0.05 * normal((OUT, 1), 6).exp()
    w[5, 64:] = 0
    return x.to(dtype), w.to(dtype), normal((TOKENS, OUT), 3).to(dtype)


# --- the composition ------------------------------------------------------------------------------


def factor(v: np.ndarray, e: Estimator, grid: np.ndarray = GRID) -> np.ndarray:
    size = np.abs(v)
    i = np.clip(np.searchsorted(grid, size, side="right") - 1, 0, 6)
    u = 2 * (size - grid[i]) / (grid[i + 1] - grid[i]) - 1
    with np.errstate(divide="ignore"):
        found = {
            "dge": lambda: np.minimum(np.abs(u) ** (1 / e.k - 1) / e.k, e.clip),
            "spline": lambda: np.where(np.abs(u) <= e.width, 1 / e.width, 0),
            "sigmoid": lambda: (  # of k u, whose ends are at the grid points
                2 * e.k * np.exp(-e.k * u) / (1 + np.exp(-e.k * u)) ** 2 / np.tanh(e.k / 2)
            ),
            "straight-through": lambda: np.ones_like(u),
        }[e.form]()
    if e.beyond != "continued":
        found[size > grid[-1] * 1.00001] = {"zero": 0, "one": 1}[e.beyond]
    return found


def block_of_each(shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """The number of the block of each element."""
    height, length = block[0] or shape[0], block[1] or shape[1]
    rows, columns = np.indices(shape)
    return (rows // height) * (shape[1] // length) + columns // length


def scaled(q: QuantizedTensor, x: Tensor) -> np.ndarray:
    scales = q.block_scales(torch.float64)
    if q.tensor_scale is not None:
        scales = scales * q.tensor_scale
    of_each = block_of_each((x.shape[0], x.shape[1]), q.quantizer.block)
    divisor = scales.flatten().numpy()[of_each]
    return np.divide(x.double().numpy(), divisor, out=np.zeros(x.shape), where=divisor > 0)


def expected(g: Tensor, q: QuantizedTensor, x: Tensor, e: Estimator, mistake: str = "") -> Tensor:
    """The gradient of x from g, that of the decoded values of q, block by block."""
    v, elements = scaled(q, x), q.elements(torch.float64).view(x.shape).numpy()
    given = g.double().numpy()
    grid = GRID if mistake == "of E2M1" else GRIDS[q.quantizer.element]
    slope = factor(x.double().numpy() if mistake == "unscaled" else v, e, grid)
    found = given * slope
    own = given * (elements - slope * v)
    blocks = block_of_each((x.shape[0], x.shape[1]), q.quantizer.block)
    for block in range(blocks.max() + 1):
        inside = blocks == block
        size, signs, terms = np.abs(v[inside]), np.sign(v[inside]), own[inside]
        if size.max() == 0:
            continue
        is_maximum = size == size.max()
        weights = np.exp((size - size.max()) / e.temperature)
        added = {
            "straight-through": 0,
            "absmax": np.where(is_maximum, terms, 0),
            "vjp": is_maximum / is_maximum.sum() * terms.sum(),
            "softmax": weights / weights.sum() * terms.sum(),
        }[e.maximum]
        if mistake == "sum to all":
            added = terms.sum()
        found[inside] += added * signs / size.max()
    return torch.from_numpy(found)


def recipe_of(quantizer: Quantizer, backward: Any, e: Estimator, which: str = "xw") -> Recipe:
    return Recipe(
        "estimated",
        fprop=GemmRecipe(quantizer, quantizer),
        backward=backward,
        estimator=e if "w" in which else None,
        x_estimator=e if "x" in which else None,
    )


def composed(
    quantizer: Quantizer, backward: str, e: Estimator, dtype: torch.dtype, mistake: str = ""
) -> dict[str, Tensor]:
    """dX and dW, with backward GEMMs in high precision."""
    x, w, dy = problem(dtype)
    qx, qw = (quantize_matrix(t, quantizer, axis=1) for t in (x, w))
    of_x, of_w = (
        t.double() if backward == "raw" else q.dequantize(torch.float64)
        for t, q in ((x, qx), (w, qw))
    )
    dx, dw = dy.double() @ of_w, dy.double().t() @ of_x
    if mistake == "swapped":
        return {"dx": dx, "dw": expected(dw, qw, w, e)}
    return {"dx": expected(dx, qx, x, e, mistake), "dw": expected(dw, qw, w, e, mistake)}


def run(recipe: Recipe, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    x, w, dy = problem(dtype)
    leaves = x.requires_grad_(), w.requires_grad_()
    y = linear(*leaves, recipe=recipe, seed=9, step=4, **options)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad}  # type: ignore[dict-item]


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(found[name], wanted[name]) for name in ("dx", "dw")}


CASES = [("ceil", "raw", name) for name in ESTIMATORS] + [
    (quantizer, "forward" if i % 2 else "raw", name)
    for i, quantizer in enumerate(QUANTIZERS)
    for name in ("sigmoid, vjp", "dge, absmax", "spline, 0 beyond")
]


@pytest.mark.parametrize(("quantizer", "backward", "name"), CASES, ids=str)
def test_against_the_composition(quantizer: str, backward: Any, name: str) -> None:
    chosen, e = QUANTIZERS[quantizer], ESTIMATORS[name]
    recipe = recipe_of(chosen, backward, e)
    found = run(recipe, torch.float64)
    wanted = composed(chosen, backward, e, torch.float64)
    for gradient, error in errors(found, wanted).items():
        assert error < BOUND[torch.float64], gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", ["raw", "forward"])
@pytest.mark.parametrize("name", ["sigmoid", "sigmoid, vjp", "spline, softmax"])
def test_in_the_dtypes_of_training(dtype: torch.dtype, backward: Any, name: str) -> None:
    """The blocks of these quantizers have scales that make scaled values exact, so that no slope is
    taken on the other side of a bend."""
    e = ESTIMATORS[name]
    found = run(recipe_of(CEIL, backward, e), dtype)
    for gradient, error in errors(found, composed(CEIL, backward, e, dtype)).items():
        # dX is rounded to BF16 before its factor and after it.
        assert error < BOUND[dtype] * (1.5 if dtype == torch.bfloat16 else 1), gradient


@pytest.mark.parametrize("mistake", ["unscaled", "sum to all", "swapped"])
@pytest.mark.parametrize("backward", ["raw", "forward"])
def test_known_mistakes_lie_outside_the_bound(mistake: str, backward: str) -> None:
    e = ESTIMATORS["sigmoid, vjp"]
    found = run(recipe_of(CEIL, backward, e), torch.float64)
    wrong = errors(found, composed(CEIL, backward, e, torch.float64, mistake))
    assert wrong["dx"] > 1e-3 and (mistake == "swapped" or wrong["dw"] > 1e-3)


@pytest.mark.parametrize("name", ["sigmoid, vjp", "dge, absmax", "spline, 0 beyond"])
def test_the_slope_of_another_grid_lies_outside_the_bound(name: str) -> None:
    chosen, e = QUANTIZERS["uniform"], ESTIMATORS[name]
    found = run(recipe_of(chosen, "raw", e), torch.float64)
    wrong = errors(found, composed(chosen, "raw", e, torch.float64, "of E2M1"))
    assert min(wrong.values()) > 1e-3


@pytest.mark.parametrize("name", QUANTIZERS)
def test_vjp_keeps_the_gradient_along_a_block(name: str) -> None:
    """A block that is multiplied by a number is decoded to that multiple, if its scale is too. So
    the sum of x times its gradient is that of the decoded values times theirs, for any form."""
    quantizer = QUANTIZERS[name]
    x, w, dy = problem(torch.float64)
    q = quantize_matrix(x, quantizer, axis=1)
    blocks = torch.from_numpy(block_of_each((TOKENS, IN), quantizer.block))

    def sums(terms: Tensor) -> Tensor:
        found = terms.new_zeros(int(blocks.max()) + 1)
        return found.index_add_(0, blocks.flatten(), terms.flatten())

    g = dy @ w
    for e in (ESTIMATORS["sigmoid, vjp"], Estimator(maximum="vjp"), ESTIMATORS["dge, absmax"]):
        dx = run(recipe_of(quantizer, "raw", e, "x"), torch.float64)["dx"]
        found, wanted = sums(x * dx), sums(q.dequantize(torch.float64) * g)
        # The elementwise form does not keep it: the control.
        assert (relative_error(found, wanted) < 1e-12) == (e.maximum == "vjp")


def test_an_estimator_of_one_leaves_the_other_gradient() -> None:
    e, plain = ESTIMATORS["sigmoid, vjp"], recipe_of(CEIL, "forward", ESTIMATORS["dge"], "")
    straight = run(plain, torch.bfloat16)
    for which, other in (("x", "dw"), ("w", "dx")):
        found = run(recipe_of(CEIL, "forward", e, which), torch.bfloat16)
        changed = "dx" if which == "x" else "dw"
        assert torch.equal(found[other], straight[other])
        assert not torch.equal(found[changed], straight[changed])
        assert torch.equal(found["y"], straight["y"])


@pytest.mark.parametrize("name", ["tetrajet", "mxfp4", "dge-occ"])
def test_on_quantized_backward_gemms(name: str) -> None:
    """What multiplies the gradients is that of fprop's operands, whatever the backward GEMMs do."""
    plain = replace(get_recipe(name), estimator=None, outliers=None)
    e = ESTIMATORS["sigmoid, vjp"]
    found = run(replace(plain, estimator=e, x_estimator=e), torch.float64)
    straight = run(plain, torch.float64)
    x, w, _ = problem(torch.float64)
    for gradient, matrix, q in (("dx", x, plain.fprop.a), ("dw", w, plain.fprop.b)):
        assert q is not None
        quantized = quantize_matrix(matrix, q, axis=1)
        wanted = expected(straight[gradient], quantized, matrix, e)
        assert relative_error(found[gradient], wanted) < 1e-12


@pytest.mark.parametrize("signs", ["none", "random"])
@pytest.mark.parametrize("backward", ["raw", "forward"])
@pytest.mark.parametrize("name", ["sigmoid", "sigmoid, vjp", "dge, absmax"])
def test_after_a_hadamard_transform(name: str, backward: Any, signs: Any) -> None:
    """fprop multiplies transformed operands; their gradients are estimated and transformed back."""
    g, e = 32, ESTIMATORS[name]
    transformed = GemmRecipe(CEIL, CEIL, Hadamard(g, signs))
    recipe = replace(recipe_of(CEIL, backward, e), fprop=transformed)
    found = run(recipe, torch.float64)
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(g)] for i in range(g)]
    h = torch.tensor(rows, dtype=torch.float64)
    drawn = random_signs(g, Key(9, 4), stream_id("linear:fprop")).double()
    s = torch.block_diag(
        *[torch.diag(drawn if signs == "random" else h[0]) @ h / g**0.5] * (IN // g)
    )
    x, w, dy = problem(torch.float64)
    turned = [(matrix @ s).bfloat16() for matrix in (x, w)]
    qx, qw = (quantize_matrix(matrix, CEIL, axis=1) for matrix in turned)
    of_x, of_w = x, w
    if backward == "forward":
        of_x, of_w = (q.dequantize(torch.float64) @ s.t() for q in (qx, qw))
    straight = {"dx": dy @ of_w, "dw": dy.t() @ of_x}
    for gradient, q, matrix in (("dx", qx, turned[0]), ("dw", qw, turned[1])):
        wanted = expected(straight[gradient] @ s, q, matrix, e) @ s.t()
        assert relative_error(found[gradient], wanted) < BOUND[torch.float64]
        for wrong in (
            expected(straight[gradient], q, matrix, e),  # nothing is transformed
            expected(straight[gradient] @ s, q, matrix, e),  # and not back
        ):
            assert relative_error(found[gradient], wrong) > 0.1
