"""On a GPU: the same codes, scales and random bits as on the CPU, and products within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import megatron_fp4
from megatron_fp4 import (
    get_quantizer,
    get_recipe,
    linear,
    list_quantizers,
    quantize,
)
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import transform
from megatron_fp4.arithmetic.philox import Key, random_bits16
from megatron_fp4.execution.call import Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.recipes import uniform_recipes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def _input(kind: str, dtype: torch.dtype) -> Tensor:
    x = torch.randn(160, 320, generator=torch.Generator().manual_seed(5))
    if kind == "outliers":
        x[:, ::37] *= 200
    elif kind == "denormals":
        x *= 1e-39
    elif kind == "zeros":
        x[:, 32:96] = 0.0
        x[:, 64:80] = -0.0
    elif kind == "non-finite":
        x[3, 40], x[7, 100], x[9, 9] = float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


@pytest.mark.parametrize("axis", [0, 1], ids=["columns", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "outliers", "denormals", "zeros", "non-finite"])
@pytest.mark.parametrize("name", list_quantizers())
def test_codes_and_scales_equal_the_cpus(
    name: str, kind: str, dtype: torch.dtype, axis: int
) -> None:
    x = _input(kind, dtype)
    here, there = (quantize(t, get_quantizer(name), axis=axis, seed=3) for t in (x, x.cuda()))
    assert torch.equal(here.codes, there.codes.cpu())
    assert torch.equal(here.scales.nan_to_num(-1.0), there.scales.cpu().nan_to_num(-1.0))


def test_random_bits_equal_the_cpus() -> None:
    here, there = (random_bits16(77, 130, Key(2**63 + 5, 9), 77, device=d) for d in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())


def test_codes_after_a_hadamard_transform_differ_in_at_most_1e_4() -> None:
    x = torch.randn(4096, 1024).bfloat16()
    codes = [quantize(transform(t, 64).bfloat16(), "mxfp4").codes.cpu() for t in (x, x.cuda())]
    nibbles = torch.stack([(codes[0] ^ codes[1]) & 15, (codes[0] ^ codes[1]) >> 4])
    assert (nibbles != 0).float().mean() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mxfp4", "tetrajet", "dge-occ"])
def test_forward_product_is_within_bounds_of_float64(name: str, dtype: torch.dtype) -> None:
    recipe = get_recipe(name, **({"occ": False} if name == "dge-occ" else {}))
    x = torch.randn(512, 1024, device="cuda").to(dtype)
    w = torch.randn(768, 1024, device="cuda").to(dtype)
    y = linear(x, w, recipe=recipe)
    assert recipe.fprop.a is not None and recipe.fprop.b is not None
    operands = [
        quantize(t, q).dequantize(torch.float64)
        for t, q in ((x, recipe.fprop.a), (w, recipe.fprop.b))
    ]
    exact = operands[0] @ operands[1].t()
    error = ((y.double() - exact).norm() / exact.norm()).item()
    assert error < (2e-3 if dtype == torch.bfloat16 else 2e-4)


@pytest.mark.parametrize("name", uniform_recipes())
def test_a_layer_trains_as_on_the_cpu(name: str) -> None:
    """Gradients of a float32 layer agree with the CPU's but for codes that a product's own
    summation order moved."""
    results = []
    for device in ("cpu", "cuda"):
        layer = megatron_fp4.Linear(256, 128, recipe=name, device=device)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(128, 256, generator=generator))
        x = torch.randn(128, 256, generator=generator).to(device).requires_grad_()
        layer(x).backward(torch.randn(128, 128, generator=generator).to(device))
        assert x.grad is not None and layer.weight.grad is not None
        results.append((x.grad.cpu(), layer.weight.grad.cpu()))
    for here, there in zip(*results, strict=True):
        assert (here - there).norm() / here.norm() < 2e-2


@pytest.mark.parametrize("name", uniform_recipes())
def test_dw_is_added_to_a_float32_main_grad_unrounded(name: str) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    x, w, dy = (
        torch.randn(size, device="cuda", generator=generator).bfloat16()
        for size in ((256, 512), (384, 512), (256, 384))
    )
    gradients = []
    for fuses in (True, False):
        weight = w.clone().requires_grad_()
        if fuses:
            weight.main_grad = torch.zeros(384, 512, device="cuda")  # type: ignore[attr-defined]
        for _ in range(2):
            site = Site(fuses=fuses)
            quantized_linear(x, weight, None, get_recipe(name), site).backward(dy)
        assert weight.grad is not None
        gradients.append(weight.main_grad if fuses else weight.grad)  # type: ignore[attr-defined]
    main, rounded = (g.double() for g in gradients)
    assert 1e-4 < (main - rounded).norm() / main.norm() < 4e-3  # one rounding, and then another


@pytest.mark.parametrize("name", ["mxfp4", "tetrajet", "dge-occ"])
def test_dge_multiplies_each_element_of_dw(name: str) -> None:
    """dW of a recipe with the estimator is dW without it, times the factor of each weight."""
    recipe = get_recipe(name, **({"occ": False} if name == "dge-occ" else {}))
    generator = torch.Generator("cuda").manual_seed(1)
    x, w, dy = (
        torch.randn(size, device="cuda", generator=generator).bfloat16()
        for size in ((256, 512), (384, 512), (256, 384))
    )
    found = []
    for estimator in (None, Estimator()):
        weight = w.clone().requires_grad_()
        main_grad = weight.main_grad = torch.zeros(384, 512, device="cuda")  # type: ignore[attr-defined]
        own = replace(recipe, estimator=estimator)
        quantized_linear(x, weight, None, own, Site(fuses=True)).backward(dy)
        found.append(main_grad.double())
    assert recipe.fprop.b is not None
    factor = Estimator().factor(quantize(w, recipe.fprop.b).grid_coordinates(w)).double()
    assert (found[1] - found[0] * factor).norm() / found[1].norm() < 1e-6
    assert (found[1] - found[0]).norm() / found[1].norm() > 0.1
