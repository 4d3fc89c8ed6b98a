"""On a Hopper GPU: FP8 carriers and products, against ml_dtypes and float64."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fp4 import Quantizer, get_quantizer, get_recipe, linear
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution.call import Site
from megatron_fp4.linear import quantized_linear
from megatron_fp4.makers.base import Given
from megatron_fp4.makers.mxfp4 import Mxfp4Kernel
from megatron_fp4.monitor import NonFinite, NonFiniteMonitor
from megatron_fp4.multipliers import choose
from megatron_fp4.multipliers.base import Product
from megatron_fp4.multipliers.hopper import Hopper
from megatron_fp4.multipliers.reference import Reference
from megatron_fp4.operands import Carriers, Decoded, Form, Made
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import uniform_recipes
from megatron_fp4.target import target_of
from testing.builders.operand_plans import plan
from testing.oracles import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="no Hopper GPU",
    ),
]
SHAPES = [(256, 512, 1024), (16, 48, 32), (1024, 4096, 14336), (208, 4112, 96)]


CEIL = get_quantizer("mxfp4-ceil")


def quantized(
    rows: int, columns: int, spread: float, seed: int, quantizer: Quantizer = CEIL
) -> QuantizedTensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    scale = torch.randn(rows, columns // 32, generator=generator, device="cuda")
    x *= torch.exp(spread * scale).repeat_interleave(32, 1)
    return quantize_matrix(x.bfloat16(), quantizer, axis=1)


def float64(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    return a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()


def decoded(a: Made, b: Made, gradient: bool = False) -> tuple[Form, Form]:
    """As they are multiplied."""
    letters = "dy" if gradient else "x", "w"
    first, second = Hopper().decode([a, b], letters, torch.bfloat16)
    return first, second


def test_carriers_are_ml_dtypes() -> None:
    from testing.kernels.compare_carriers import beside, differences, in_fp8, with_row_scales

    wrong = [*differences("cuda"), *beside("cuda"), *in_fp8("cuda"), *with_row_scales("cuda")]
    assert wrong == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_products(shape: tuple[int, int, int], gradient: bool) -> None:
    m, n, k = shape
    a, b = quantized(m, k, 0.7, 1), quantized(n, k, 0.7, 2)
    backend, expected = Hopper(), float64(a, b)
    forms = decoded(Made(a), Made(b), gradient)
    for form in forms:
        assert isinstance(form, Carriers) and not form.tally.any()
        assert form.element in (torch.float8_e5m2, torch.float8_e4m3fn)
    assert relative_error(backend.multiply(*forms, 1.0, torch.bfloat16), expected) < 2e-3
    assert relative_error(backend.multiply(*forms, 16 / 9, torch.float32), expected * 16 / 9) < 2e-4
    into = torch.full((m, n), 3.0, device="cuda")
    found = backend.multiply(*forms, 1.0, torch.bfloat16, into)
    assert found is into
    assert relative_error(found - 3.0, expected) < 3e-4  # the sum with 3 is rounded too
    narrow = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
    assert backend.multiply(*forms, 1.0, torch.bfloat16, narrow) is narrow
    assert relative_error(narrow, expected) < 2e-3


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("scale", [{"scale": "ue5m3"}, {"scale": "e4m3", "tensor_max": 256.0}])
@pytest.mark.parametrize("other", ["alike", "e8m0"])
def test_products_of_scales_in_small_floats(scale: dict[str, Any], block: int, other: str) -> None:
    """Rule mse-fp8, with both operands in E4M3, also where one is dY."""
    quantizer = Quantizer(block=(1, block), rule="mse-fp8", **scale)
    a, b = quantized(256, 1024, 0.7, 1, quantizer), quantized(512, 1024, 0.7, 2, quantizer)
    if other == "e8m0":
        b = quantized(512, 1024, 0.7, 2)
    assert Hopper().refuses(_product(a, b), target_of(a.device)) is None
    forms, expected = decoded(Made(a), Made(b), gradient=True), float64(a, b)
    for form in forms:
        assert isinstance(form, Carriers) and form.element == torch.float8_e4m3fn
        assert not form.tally.any()
    assert relative_error(Hopper().multiply(*forms, 1.0, torch.bfloat16), expected) < 2e-3
    assert relative_error(Hopper().multiply(*forms, 1.0, torch.float32), expected) < 2e-4
    # Negative control: the scales as powers of two alone.
    wrong = replace(a, scales=a.scales & 0xF8)
    forms = decoded(Made(wrong), Made(b))
    assert relative_error(Hopper().multiply(*forms, 1.0, torch.float32), expected) > 0.02


def _product(a: QuantizedTensor, b: QuantizedTensor) -> Product:
    shape = len(a.codes), len(b.codes), a.shape[1]
    return Product(a.quantizer, b.quantizer, shape, torch.bfloat16, torch.bfloat16)


def test_a_gradient_s_window_is_wider() -> None:
    """Scales spread by e^4: E5M2 holds what E4M3 must round, and what is rounded is counted."""
    a, b = quantized(256, 4096, 4.0, 1), quantized(256, 4096, 0.0, 2)
    backend, expected = Hopper(), float64(a, b)
    errors, counts = [], []
    for gradient in (True, False):
        form, other = decoded(Made(a), Made(b), gradient)
        assert isinstance(form, Carriers)
        product = backend.multiply(form, other, 1.0, torch.float32)
        errors.append(relative_error(product, expected))
        counts.append(int(form.tally[0]))
    assert errors[0] < 2e-4 and counts[0] * 10 < counts[1]


@pytest.mark.parametrize("rows", [24, 0])
def test_what_fp8_does_not_tile_is_multiplied_in_bf16(rows: int) -> None:
    quantizer, bf16 = get_quantizer("mxfp4"), torch.bfloat16
    asked = Product(quantizer, quantizer, (rows, 96, 64), bf16, bf16)
    assert choose(asked, target_of(torch.device("cuda"))).multiplier.name == "bf16"
    x = torch.randn(rows, 64, device="cuda").bfloat16()
    w = torch.randn(96, 64, device="cuda").bfloat16()
    with torch.no_grad():
        y = linear(x, w, recipe="mxfp4")
    a, b = (quantize_matrix(t, quantizer, axis=1) for t in (x, w))
    assert y.shape == (rows, 96) and (not rows or relative_error(y, float64(a, b)) < 2e-3)


def test_main_grad_at_an_odd_address() -> None:
    a, b = quantized(64, 64, 0.0, 1), quantized(48, 64, 0.0, 2)
    backend = Hopper()
    into = torch.zeros(64 * 48 + 1, device="cuda")[1:].view(64, 48)
    forms = decoded(Made(a), Made(b), True)
    assert backend.multiply(*forms, 1.0, torch.bfloat16, into) is into
    assert relative_error(into, float64(a, b)) < 2e-4


def test_products_of_mended_carriers_are_those_of_the_rule_s_bit_for_bit() -> None:
    """Rows that fit the guessed power of two, rows that do not, zeros, NaN, and a matrix of NaN."""
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(512, 1024, generator=generator, device="cuda")
    x[5], x[64:96], x[100:110] = torch.nan, 0, x[100:110] * 1e6
    x[200:210, :32] *= 1e-4
    w = (torch.randn(256, 1024, generator=generator, device="cuda") / 32).bfloat16()
    backend, quantizer = Hopper(), get_quantizer("mxfp4-ceil")
    for source in (x.bfloat16(), torch.full_like(x, torch.nan).bfloat16()):
        for gradient in (False, True):
            products, tallies = [], []
            for element in (None, backend.carrier("dy" if gradient else "x")):
                operands = []
                for matrix, carrier in ((source, element), (w, element and torch.float8_e4m3fn)):
                    wanted = plan(matrix, quantizer, 1, carrier=carrier)
                    [made] = Mxfp4Kernel().make(matrix, [wanted], [Given()])
                    assert (made.carriers is not None) == (element is not None)
                    operands.append(made)
                forms = decoded(operands[0], operands[1], gradient)
                products.append(backend.multiply(forms[0], forms[1], 1.0, torch.float32))
                assert isinstance(forms[0], Carriers)
                tallies.append(forms[0].tally.tolist())
            assert torch.equal(products[0].nan_to_num(7e30), products[1].nan_to_num(7e30))
            assert tallies[0] == tallies[1] and tallies[0][1] > 0
            assert products[1].isnan().any()


RECIPES = [get_recipe(name) for name in uniform_recipes()]
RECIPES.append(replace(get_recipe("mxfp4-rht-sr", forward="fp8"), name="fp8-forward"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_is_the_reference_s(recipe: Recipe, bias: bool) -> None:
    """The same codes, and products within rounding: forward, dX, dW and main_grad."""
    device = torch.device("cuda")
    x = torch.randn(512, 256, device=device).bfloat16().requires_grad_()
    w = (torch.randn(384, 256, device=device) / 16).bfloat16().requires_grad_()
    b = torch.randn(384, device=device).bfloat16() if bias else None
    dy = torch.randn(512, 384, device=device).bfloat16()
    y = linear(x, w, b, recipe=recipe)
    y.backward(dy)
    x_cpu, w_cpu = (t.detach().cpu().requires_grad_() for t in (x, w))
    expected = linear(x_cpu, w_cpu, None if b is None else b.cpu(), recipe=recipe)
    expected.backward(dy.cpu())
    assert x.grad is not None and w.grad is not None
    for found, wanted in ((y, expected), (x.grad, x_cpu.grad), (w.grad, w_cpu.grad)):
        assert wanted is not None
        assert relative_error(found.detach().cpu(), wanted.detach().double()) < 4e-3
    w.main_grad = torch.ones(384, 256, device=device)  # type: ignore[attr-defined]
    y = quantized_linear(x, w, b, recipe, Site(fuses=True))
    y.backward(dy)
    assert w_cpu.grad is not None
    added = w.main_grad.cpu().double() - 1  # type: ignore[attr-defined]
    assert relative_error(added, w_cpu.grad.double()) < 4e-3  # that is rounded to BF16


def test_a_reference_product_of_carriers() -> None:
    """Carriers stand for their elements times the row factors."""
    a, b = quantized(64, 64, 0.0, 1), quantized(48, 64, 0.0, 2)
    forms = decoded(Made(a), Made(b))
    a_form, b_form = forms
    assert isinstance(a_form, Carriers) and isinstance(b_form, Carriers)
    first, second = (Decoded(form.elements, form.row_factors) for form in (a_form, b_form))
    found = Reference().multiply(first, second, 1.0, torch.float32)
    assert relative_error(found, float64(a, b)) < 1e-6


def test_rounded_and_nan_operands_are_told_of() -> None:
    watching = NonFiniteMonitor()
    seen: list[Any] = []
    for step, (spread, value) in enumerate([(0.0, 1.0), (5.0, 1.0), (0.0, torch.nan), (0.0, 1.0)]):
        seen.append((watching.start_step(step), watching.rounding))
        x = torch.randn(256, 512, device="cuda")
        x *= torch.exp(spread * torch.randn(256, 16, device="cuda")).repeat_interleave(32, 1)
        x[3, 5] *= value
        w = torch.randn(64, 512, device="cuda").bfloat16()
        observe = partial(watching.observe, "fc1")
        quantized_linear(x.bfloat16(), w, None, get_recipe("mxfp4"), Site(observe=observe))
    seen += [(watching.look(), watching.rounding)]
    assert [s for s, _ in seen] == [None, None, None, None, NonFinite(2, "fc1", "fprop", "x")]
    assert [r is not None and r.worst for _, r in seen[:4]] == [
        False, False, False, ("fc1", "fprop", "x"),
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_gpu_that_is_not_the_current_one() -> None:
    x, w = (torch.randn(256, 256, device="cuda:1").bfloat16() for _ in range(2))
    assert torch.cuda.current_device() == 0
    found = linear(x, w, recipe="mxfp4")
    assert torch.equal(found.cpu(), linear(x.to("cuda:0"), w.to("cuda:0"), recipe="mxfp4").cpu())


def test_words_of_two_from_an_odd_place() -> None:
    flat = torch.randn(128 * 128 + 1, device="cuda").bfloat16()
    x, w = flat[1:].view(128, 128), torch.randn(64, 128, device="cuda").bfloat16()
    assert torch.equal(linear(x, w, recipe="mxfp4"), linear(x.clone(), w, recipe="mxfp4"))
