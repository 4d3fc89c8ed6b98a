"""The stages measure what they say, and see the mistakes of the simulator that was published."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import GemmRecipe, Recipe, linear
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.formats import E2M1, UE5M3, Fp4, ScaleFloat
from megatron_fp4.arithmetic.hadamard import Hadamard, transform
from megatron_fp4.errors import ConfigError
from megatron_fp4.makers import pytorch
from tests.tools.sweep.test_axes import QUARTET, RHT, TETRAJET
from tools.sweep.axes import AXES, Combination
from tools.sweep.stages import diffusion, digits, draws, products, regression
from tools.sweep.stages.training import train
from tools.sweep.tensors import Recorded


def recorded(tokens: int = 256, inputs: int = 128, outputs: int = 64) -> list[Recorded]:
    source = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int, scale: float) -> Tensor:
        return (torch.randn(rows, columns, generator=source) * scale).bfloat16()

    x, w, g = matrix(tokens, inputs, 1), matrix(outputs, inputs, 0.02), matrix(tokens, outputs, 1)
    return [Recorded("linear", x, w, g)]


def test_errors_of_gaussian_products_are_those_of_their_operands() -> None:
    """A product of two operands with independent relative errors e has the error 2 e, .01325 each
    for the floor rule in blocks of 32, and the product of their gains."""
    each = recorded(1024, 512, 512)
    found = products.evaluate(Combination(), each, 1)
    assert found["y error"] == pytest.approx(2 * 0.01325, rel=0.1)
    gains = [projection(operand) for operand in (each[0].x, each[0].weight)]
    assert found["y gain"] == pytest.approx(gains[0] * gains[1] - 1, rel=0.02)


def projection(x: Tensor) -> float:
    """⟨q, x⟩ / ⟨x, x⟩ of the floor rule, by its definition in NumPy."""
    blocks = x.double().reshape(-1, 32).numpy()
    unit = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(1, keepdims=True))) - 2)
    grid = np.array([0, 1, 2, 4, 0.5, 1.5, 3, 6])  # of two that are as near: the even mantissa
    nearest = grid[np.abs(np.abs(blocks / unit)[..., None] - grid).argmin(-1)]
    return float((np.sign(blocks) * nearest * unit * blocks).sum() / (blocks**2).sum())


def test_bf16_forward_has_only_bf16_s_rounding() -> None:
    found = products.evaluate(RHT, recorded(), 1)
    assert found["y error"] < 1e-5 < found["dx error"]


def test_stochastic_rounding_of_raw_operands_has_no_bias() -> None:
    unbiased = draws.evaluate(RHT, recorded(), 1)
    assert abs(unbiased["dx bias"]) < 2e-3 and unbiased["dx variance"] > 0.02
    nearest = draws.evaluate(Combination(), recorded(), 1)  # the control
    assert nearest["dx bias"] > 0.02 and nearest["dx variance"] == 0


def test_the_error_of_a_draw_is_not_that_of_the_mean() -> None:
    """Stochastic rounding of X and W: each draw of Y is worse than nearest rounding, and the mean
    of many draws is better, which no forward pass sees."""
    stochastic = draws.evaluate(
        Combination(rule="ceil", backward_rule="ceil", rounding="all"), recorded(), 1
    )
    nearest = draws.evaluate(Combination(rule="ceil", backward_rule="ceil"), recorded(), 1)
    assert abs(stochastic["y bias"]) < 2e-3 and nearest["y variance"] == 0
    expected = stochastic["y bias"] + stochastic["y variance"]
    gradients = stochastic["dx bias"] + stochastic["dw bias"]
    assert stochastic["score"] == pytest.approx(expected + gradients)
    # Each operand's error is .0271 in place of .01334 (Gaussian, blocks of 32).
    assert expected == pytest.approx(2 * 0.0271, rel=0.1)
    assert nearest["y bias"] == pytest.approx(2 * 0.01334, rel=0.1)


def test_errors_of_operands() -> None:
    each = recorded(1024, 512, 512)
    found = products.evaluate(Combination(backward="bf16"), each, 1)
    # Floor in blocks of 32 of Gaussian values: the error, and 2.33% of them clipped.
    assert found["x error"] == pytest.approx(0.01325, rel=0.05)
    assert found["x clipped"] == pytest.approx(0.0233, rel=0.1)
    assert found["dy error"] == found["dy zeros"] == 0
    ceil = products.evaluate(Combination(rule="ceil", backward="bf16"), each, 1)
    assert ceil["x clipped"] == ceil["w clipped"] == 0 and ceil["x zeros"] > found["x zeros"] > 0


def test_hot_channels_take_a_large_channel_off_x() -> None:
    """It widens no block's scale then. X without such a channel gains little."""
    [each] = recorded(inputs=128)
    hot = Recorded("hot", each.x.clone(), each.weight, each.gradient)
    hot.x[:, 5] *= 50

    def gain(of: Recorded) -> float:
        errors = (
            products.evaluate(Combination(rule="ceil", outliers=outliers), [of], 1)["y error"]
            for outliers in ("none", "hot-channels")
        )
        return next(errors) / next(errors)

    assert gain(hot) > 2 > gain(each) > 1


def test_double_quantization_is_biased_by_the_forward_pass_alone() -> None:
    """E[dX] is dY times the quantized W, so the bias is the error of W's nearest rounding."""
    each = recorded()[0]
    found = draws.evaluate(TETRAJET, [each], 1)
    assert found["dx bias"] == pytest.approx(0.01334, rel=0.25)


# --- the mistakes of the simulator that was published with arXiv 2509.17791 -----------------------


# Of dgrad the transform sees W as [inputs, outputs], and of wgrad X as [inputs, tokens].
TOKENS, INPUTS, OUTPUTS = 64, 128, 96
SEEN = {"dx": (INPUTS, OUTPUTS), "dw": (INPUTS, TOKENS)}


def gradients_errors() -> dict[str, float]:
    """The relative errors of dX and dW, each transformed by its GEMM and not quantized."""
    turned = GemmRecipe(None, None, Hadamard(32))
    recipe = Recipe("turned", fprop=GemmRecipe(), dgrad=turned, wgrad=turned)
    [each] = recorded(TOKENS, INPUTS, OUTPUTS)
    x, weight = (t.float().requires_grad_() for t in (each.x, each.weight))
    linear(x, weight, recipe=recipe, name="linear").backward(each.gradient.float())
    exact = each.products()
    assert x.grad is not None and weight.grad is not None
    return {"dx": relative(x.grad, exact["dx"]), "dw": relative(weight.grad, exact["dw"])}


def test_a_transform_along_the_contracted_axis_changes_no_product() -> None:
    """dX = dY W contracts the outputs, and dW = dY^T X the tokens."""
    assert max(gradients_errors().values()) <= 1e-6


@pytest.mark.parametrize("gradient", SEEN)
def test_a_transform_along_the_other_axis_is_seen(
    gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake: one operand is transformed along the axis that the GEMM does not contract."""

    def wrong(x: Tensor, group: int, signs: Tensor | None = None) -> Tensor:
        if x.shape == SEEN[gradient]:
            return transform(x.t(), group, signs).t()
        return transform(x, group, signs)

    monkeypatch.setattr(pytorch, "transform", wrong)
    errors = gradients_errors()
    assert errors.pop(gradient) == pytest.approx(1.41, abs=0.15)
    assert max(errors.values()) <= 1e-6


def check_below_the_maximum(form: str) -> None:
    """Raises AssertionError if an estimator of W is straight-through where nothing is clipped."""
    plain = products.multiplied(products.recipe_of(CEIL), recorded()[0], 1)
    estimated = products.recipe_of(replace(CEIL, estimator=form))
    found = products.multiplied(estimated, recorded()[0], 1)
    assert torch.equal(found["dx"], plain["dx"])
    assert relative(found["dw"], plain["dw"]) > 0.1


@pytest.mark.parametrize("form", AXES["estimator"][1:])
def test_an_estimator_does_something_below_the_maximum(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_below_the_maximum(form)
    right = Estimator.factor

    def masked(self: Estimator, scaled: Tensor, of: Fp4 = E2M1) -> Tensor:
        """The mistake: a mask makes the estimator straight-through for magnitudes below 6. So dW is
        that without an estimator, but for the few elements of W that are 6."""
        slope = right(self, scaled, of)
        return torch.where(scaled.abs() < of.max, torch.ones_like(slope), slope)

    monkeypatch.setattr(Estimator, "factor", masked)
    with pytest.raises(AssertionError, match="> 0.1"):
        check_below_the_maximum(form)


def check_three_bits_of_mantissa(scale: ScaleFloat) -> None:
    """Raises AssertionError if a format of scales has not 8 values in each octave."""
    values = scale.decode(torch.arange(256).to(torch.uint8), torch.float64)
    for octave in range(-10, 10):
        within = (values >= 2.0**octave) & (values < 2.0 ** (octave + 1))
        assert len(values[within]) == 8, octave


def test_ue5m3_has_three_bits_of_mantissa() -> None:
    check_three_bits_of_mantissa(UE5M3)
    values = UE5M3.decode(torch.arange(256).to(torch.uint8), torch.float64)
    assert values.nan_to_num().max() == 61440 and values[values > 0].min() == 2**-17
    e5m2 = ScaleFloat("e5m2", mantissa_bits=2, bias=15, max=57344.0, nan=0x7F)  # the mistake
    octave = e5m2.decode(torch.arange(60, 64).to(torch.uint8), torch.float64)
    assert octave.tolist() == [1, 1.25, 1.5, 1.75]
    with pytest.raises(AssertionError, match="== 8"):
        check_three_bits_of_mantissa(e5m2)


LATER = {"scale": "ue5m3", "block": "16", "outer_scale": "tensor"}
BF16 = Combination(forward="bf16", backward="bf16")
CEIL = Combination(rule="ceil", backward_rule="ceil", operands="forward")  # nothing is clipped


def relative(found: Tensor, reference: Tensor) -> float:
    reference = reference.double()
    return float((found.double() - reference).norm() / reference.norm())


# --- training -------------------------------------------------------------------------------------


def test_combinations_of_a_seed_begin_alike_and_see_the_same_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores are paired by seed: with the same arithmetic they are equal."""
    monkeypatch.setattr(digits, "STEPS", 20)
    once, again, other = (digits.evaluate(BF16, [], seed) for seed in (1, 1, 2))
    assert once == again and once != other


def test_the_regression_ends_at_the_error_of_the_forward_pass() -> None:
    """The teacher is learned in BF16; in FP4 the operands' rounding is left."""
    assert regression.evaluate(BF16, [], 1)["loss"] < 0.005
    assert 0.02 < regression.evaluate(Combination(), [], 1)["loss"] < 0.06


@pytest.mark.parametrize("stage", [regression, digits, diffusion], ids=lambda each: each.__name__)
def test_the_largest_groups_fit_all_small_tasks(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "STEPS", 2)
    monkeypatch.setattr(stage, "TESTED", 1)
    widest = Combination(hadamard="all", group="128", rounding="all", x_mean="subtracted")
    later = Combination(**LATER, rule="mse-fp8", backward_rule="mse-fp8", outliers="hot-channels")
    for each in (widest, QUARTET, later):
        assert stage.evaluate(each, [], 1)["loss"] > 0


@pytest.mark.parametrize("stage", [regression, digits, diffusion], ids=lambda each: each.__name__)
def test_batches_are_of_whole_blocks_and_groups(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wgrad contracts the batch: its blocks have 32 elements, its largest groups 128."""
    monkeypatch.setattr(stage, "STEPS", 1)
    assert stage.STAGE.settings["batch"] % 128 == 0
    for batch, refused in ((100, Combination()), (96, Combination(hadamard="wgrad", group="128"))):
        monkeypatch.setattr(stage, "BATCH", batch)
        with pytest.raises(ConfigError, match=f"{batch}"):
            stage.evaluate(refused, [], 1)


@pytest.mark.parametrize(
    ("model", "widths"), [(digits.Classifier, (64,)), (diffusion.Denoiser, (64, 1))]
)
def test_the_ends_of_a_model_are_not_quantized(model: Any, widths: tuple[int, ...]) -> None:
    """First and last linear multiply in float32, and the linears between them by the recipe."""
    built = model(QUARTET, 1)
    errors: dict[str, float] = {}

    def compare(name: str, module: torch.nn.Linear, given: Any, found: Tensor) -> None:
        bias = 0 if module.bias is None else module.bias.double()
        errors[name] = relative(found, given[0].double() @ module.weight.double().t() + bias)

    for name, module in built.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(partial(compare, name))
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        built(*(torch.randn(128, width, generator=source) for width in widths))
    ends = errors.pop("first"), errors.pop("last")
    assert max(ends) < 1e-6 and errors and min(errors.values()) > 0.05


def test_a_loss_scale_is_taken_out_of_the_gradients() -> None:
    def trained(scale: str) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        inputs = torch.ones(2, 4)
        train(model, lambda _: model(inputs).square().mean(), Combination(loss_scale=scale), 5, 0.1)
        return model.weight.detach()

    assert torch.equal(trained("1"), trained("65536"))  # a power of two


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ArithmeticError, match="the loss is nan in step 0"):
        train(model, lambda _: model.weight.sum() * float("nan"), BF16, 5, 0.1)
