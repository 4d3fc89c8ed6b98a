"""Recipe and GemmRecipe as data: consistency, phases, what a linear's sizes must divide."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fp4 import (
    ConfigError,
    GemmRecipe,
    Linear,
    Quantizer,
    Recipe,
    get_quantizer,
    get_recipe,
    linear,
)
from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.errors import SizeError
from megatron_fp4.plan.sizes import check_sizes, contracted_multiple
from megatron_fp4.recipe import GEMMS, HIGH_PRECISION, Layers, Phase

MX = Quantizer()
BF16 = Recipe("bf16")
OUTER = Estimator(form="straight-through", outer_scale="vjp")
PRESCALED = Quantizer(prescale=3 / 4, rounding="stochastic")


@pytest.mark.parametrize(
    ("a", "b", "correction"),
    [
        (PRESCALED, PRESCALED, 16 / 9),
        (PRESCALED, MX, 4 / 3),
        (None, PRESCALED, 4 / 3),
        (MX, MX, 1.0),
        (None, None, 1.0),
    ],
    ids=["both", "a", "b", "neither", "high-precision"],
)
def test_correction_undoes_the_prescales(a: Any, b: Any, correction: float) -> None:
    Recipe("r", dgrad=GemmRecipe(a, b, correction=correction))
    for wrong in {1.0, 4 / 3, 16 / 9, 9 / 16} - {correction}:
        with pytest.raises(ConfigError, match=r"r: dgrad's correction") as error:
            Recipe("r", dgrad=GemmRecipe(a, b, correction=wrong))
        assert repr(correction)[:12] in str(error.value)  # what it should be, in full


def test_the_named_correction_is_accepted() -> None:
    """The number that the message asks for is precise enough to be typed in."""
    with pytest.raises(ConfigError) as error:
        Recipe("r", wgrad=GemmRecipe(PRESCALED, PRESCALED))
    asked = float(str(error.value).split()[-1])
    Recipe("r", wgrad=GemmRecipe(PRESCALED, PRESCALED, correction=asked))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backward": "both"}, ["backward", "forward or raw"]),
        ({"bias_gradient": "quantised"}, ["bias_gradient", "raw or quantized"]),
        ({"estimator": Estimator(), "fprop": GemmRecipe(MX)}, ["estimator of W", "E2M1"]),
        ({"x_estimator": Estimator(), "fprop": GemmRecipe(None, MX)}, ["estimator of X", "E2M1"]),
        (
            {"ramping": Ramping(), "fprop": GemmRecipe(MX, Quantizer(element="e1m2"))},
            ["ramping", "E2M1 with E8M0"],
        ),
        ({"estimator": OUTER, "fprop": GemmRecipe(MX, MX)}, ["estimator of W", "tensor_max"]),
        (
            {"x_estimator": OUTER, "fprop": GemmRecipe(MX, get_quantizer("nvfp4"))},
            ["outer_scale of the estimator of X", "tensor_max or a row_max"],
        ),
        (
            {"x_estimator": OUTER, "fprop": GemmRecipe(get_quantizer("vector"))},
            ["outer_scale of the estimator of X", "tensor_max or a row_max"],
        ),
        (
            {
                "x_estimator": Estimator(),
                "fprop": GemmRecipe(MX, MX),
                "outliers": OutlierClamp(),
            },
            ["estimator of X", "outliers"],
        ),
        (
            {
                "x_estimator": Estimator(),
                "fprop": GemmRecipe(MX, MX),
                "outliers": HotChannels(),
            },
            ["estimator of X", "outliers"],
        ),
        (
            {"x_mean": "subtracted", "fprop": GemmRecipe(MX), "outliers": HotChannels()},
            ["x_mean", "outliers"],
        ),
        ({"x_mean": "subtract"}, ["x_mean", "kept or subtracted"]),
        ({"x_mean": "subtracted", "dgrad": GemmRecipe(MX, MX)}, ["x_mean", "quantizer of X"]),
        (
            {"x_mean": "subtracted", "fprop": GemmRecipe(MX), "outliers": OutlierClamp()},
            ["x_mean", "outliers"],
        ),
        (
            {"x_mean": "subtracted", "fprop": GemmRecipe(MX), "x_estimator": Estimator()},
            ["x_mean", "estimator of X"],
        ),
        (
            {"backward": "forward", "fprop": GemmRecipe(PRESCALED, MX, None, 4 / 3)},
            ["its prescale"],
        ),
        ({"bias_gradient": "quantized"}, ["bias"]),
        (
            {"bias_gradient": "quantized", "dgrad": GemmRecipe(MX, MX, Hadamard(32))},
            ["bias", "Hadamard"],
        ),
        (
            {
                "bias_gradient": "quantized",
                "dgrad": GemmRecipe(PRESCALED, PRESCALED, correction=16 / 9),
            },
            ["bias", "prescale"],
        ),
        ({"phases": (Phase(1.5, BF16),)}, ["a share of training in [0, 1]", "1.5"]),
        ({"phases": (Phase(-0.1, BF16),)}, ["a share of training in [0, 1]"]),
        ({"phases": (Phase(float("nan"), BF16),)}, ["a share of training in [0, 1]"]),
        ({"phases": (Phase(0.5, BF16), Phase(0.5, BF16))}, ["0.5", "the one before it"]),
        ({"phases": (Phase(0.5, Recipe("p", phases=(Phase(0.6, BF16),))),)}, ["p", "its own"]),
        (
            {"phases": (Phase(0.5, get_recipe("tetrajet-ema")),)},
            ["weight_average", "not begin or change"],
        ),
        (
            {"phases": (Phase(0.5, get_recipe("tetrajet-ramping")),)},
            ["ramping", "every phase that"],
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else "+".join(value),
)
def test_contradictions_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Recipe("mine", **fields)
    assert str(error.value).startswith("mine: ") and "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


# --- phases ---------------------------------------------------------------------------------------


def test_without_phases_nothing_changes() -> None:
    recipe = get_recipe("tetrajet")
    assert recipe.at(0.0) is recipe and recipe.at(1.0) is recipe


@pytest.mark.parametrize(
    ("progress", "held"), [(0.0, 0), (0.4999, 0), (0.5, 1), (0.7999, 1), (0.8, 2), (1.0, 2)]
)
def test_phases_follow_one_another(progress: float, held: int) -> None:
    fp8 = get_recipe("fp8")
    recipe = replace(get_recipe("tetrajet"), phases=(Phase(0.5, fp8), Phase(0.8, BF16)))
    assert recipe.in_turn == (recipe, fp8, BF16)
    assert recipe.at(progress) is recipe.in_turn[held]
    assert recipe.shares == pytest.approx([0.5, 0.3, 0.2])


def test_a_phase_and_layers_take_a_recipe_and_no_name() -> None:
    name: Any = "fp8"
    for make in (lambda: Phase(0.5, name), lambda: Layers(name, first=1)):
        with pytest.raises(ConfigError, match=r"a Recipe, not 'fp8': give get_recipe\(name\)"):
            make()


def test_a_phase_from_the_first_step_on() -> None:
    recipe = replace(get_recipe("mxfp4"), phases=(Phase(0.0, BF16),))
    assert recipe.at(0.0) is recipe.at(1.0) is BF16


def test_what_is_kept_of_weights_from_the_start_goes_on_or_ends() -> None:
    average, plain = get_recipe("tetrajet-ema"), get_recipe("tetrajet")
    for late in (replace(average, bias_gradient="raw"), plain):
        assert replace(average, phases=(Phase(0.5, late),)).at(0.5) is late
    other = get_recipe("tetrajet-ema", ema_beta=0.9)
    with pytest.raises(ConfigError, match="another weight_average"):
        replace(average, phases=(Phase(0.5, other),))
    with pytest.raises(ConfigError, match="give every phase that"):
        replace(get_recipe("tetrajet-ramping"), phases=(Phase(0.5, plain),))


@pytest.mark.parametrize("gemms", [("wgrad",), ("dgrad", "wgrad"), ("fprop",), GEMMS], ids="+".join)
@pytest.mark.parametrize("name", ["tetrajet", "dge-occ", "mxfp4-rht-sr"])
def test_a_recipe_without_some_gemms(name: str, gemms: tuple[str, ...]) -> None:
    recipe = get_recipe(name)
    late = recipe.without(gemms)
    for gemm in GEMMS:
        assert late.gemm(gemm) == (HIGH_PRECISION if gemm in gemms else recipe.gemm(gemm))
    assert (late.estimator, late.outliers) == (
        (None, None) if "fprop" in gemms else (recipe.estimator, recipe.outliers)
    )
    assert late.bias_gradient == ("raw" if "dgrad" in gemms else recipe.bias_gradient)
    assert late.name == {
        GEMMS: "bf16",
        ("dgrad", "wgrad"): f"{name} with dgrad, wgrad in BF16",
    }.get(gemms, f"{name} with {gemms[0]} in BF16")


def test_gemms_that_a_recipe_can_not_do_without() -> None:
    with pytest.raises(ConfigError, match="'forward'; known: fprop, dgrad, wgrad"):
        get_recipe("mxfp4").without(("forward",))
    with pytest.raises(ConfigError, match="no GEMM is named"):
        get_recipe("mxfp4").without(())


def test_estimators_end_with_the_quantizers_of_fprop() -> None:
    both = replace(get_recipe("tetrajet"), estimator=Estimator(), x_estimator=Estimator())
    for gemms, kept in ((("fprop",), None), (("dgrad", "wgrad"), Estimator())):
        late = both.without(gemms)
        assert (late.estimator, late.x_estimator) == (kept, kept)


def test_the_mean_is_subtracted_while_x_is_quantized() -> None:
    both = replace(get_recipe("tetrajet"), x_mean="subtracted")
    for gemms, kept in ((("fprop",), False), (("wgrad",), False), (("fprop", "wgrad"), True)):
        assert (both.without(gemms).x_mean == "kept") == kept, gemms


def test_linears_warn_of_phases_which_they_do_not_begin() -> None:
    recipe = replace(get_recipe("mxfp4"), phases=(Phase(0.5, BF16),))
    x = torch.ones(32, 32)
    with pytest.warns(
        UserWarning, match=r"mxfp4 has phases.*first recipe: give it recipe\.at\(progress\)"
    ):
        y = linear(x, x, recipe=recipe)
    assert torch.equal(y, linear(x, x, recipe="mxfp4"))
    with pytest.warns(UserWarning, match="mxfp4 has phases"):
        layer = Linear(32, 32, recipe=recipe)
    layer.recipe = recipe.at(0.5)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gemm", "multiple"),
    [
        (GemmRecipe(), 1),
        (GemmRecipe(MX, None), 32),
        (GemmRecipe(None, get_quantizer("nvfp4")), 16),
        (GemmRecipe(MX, MX, Hadamard(64)), 64),
        (GemmRecipe(MX, MX, Hadamard(16)), 32),
        (GemmRecipe(get_quantizer("nvfp4"), Quantizer(block=(1, 48)), Hadamard(32)), 96),
        (GemmRecipe(get_quantizer("vector"), None), 2),
        (GemmRecipe(Quantizer(element="e5m2", scale="fp32", block=(1, 0), rule="absmax")), 1),
    ],
    ids=["none", "mx", "nv", "hadamard-64", "hadamard-16", "lcm", "vector-e2m1", "vector-fp8"],
)
def test_multiple(gemm: GemmRecipe, multiple: int) -> None:
    assert contracted_multiple(gemm) == multiple


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((64, 64, 64), None),
        ((None, 64, 64), None),
        ((64, 48, 64), ["in_features is 48", "32", "fprop"]),
        ((64, 64, 33), ["out_features is 33", "dgrad"]),
        ((31, 64, 64), ["x has 31 tokens", "all its dimensions but the last", "wgrad"]),
    ],
    ids=["fits", "tokens-unknown", "inputs", "outputs", "tokens"],
)
def test_check_sizes(sizes: tuple[Any, int, int], words: list[str] | None) -> None:
    recipe = get_recipe("tetrajet")
    if words is None:
        check_sizes(recipe, *sizes, "decoder.fc1")
        return
    with pytest.raises(ConfigError) as error:
        check_sizes(recipe, *sizes, "decoder.fc1")
    assert str(error.value).startswith("decoder.fc1: ")
    for word in [*words, "tetrajet"]:
        assert word in str(error.value)
    assert "rank" not in str(error.value)  # whoever calls `linear` may have none


@pytest.mark.parametrize(
    ("gemm", "operand", "size"),
    [
        ("fprop", "a", "tokens"),
        ("fprop", "b", "out_features"),
        ("dgrad", "a", "tokens"),
        ("dgrad", "b", "in_features"),
        ("wgrad", "a", "out_features"),
        ("wgrad", "b", "in_features"),
    ],
)
def test_check_sizes_minds_the_height_of_2d_blocks(gemm: str, operand: str, size: str) -> None:
    """Blocks of 32 rows by 16: only the axis that is not contracted is short of 32."""
    tall = replace(HIGH_PRECISION, **{operand: Quantizer(block=(32, 16))})  # type: ignore[arg-type]
    recipe = replace(Recipe("r"), **{gemm: tall})  # type: ignore[arg-type]
    check_sizes(recipe, 64, 64, 64, "fc")
    tokens, inputs, outputs = (
        48 if axis == size else 64 for axis in ("tokens", "in_features", "out_features")
    )
    with pytest.raises(SizeError) as error:
        check_sizes(recipe, tokens, inputs, outputs, "fc")
    assert (error.value.axis, error.value.size, error.value.multiple) == (size, 48, 32)


def test_a_quantized_bias_gradient_takes_no_scales_of_w() -> None:
    """dgrad would multiply dY by them before it quantizes dY."""
    nvfp4 = get_quantizer("nvfp4")
    with pytest.raises(ConfigError, match="scales of rows or of the tensor of W"):
        Recipe(
            "mine",
            fprop=GemmRecipe(nvfp4, nvfp4),
            dgrad=GemmRecipe(MX),
            backward="forward",
            bias_gradient="quantized",
        )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: GemmRecipe("mxfp4"), "a is a Quantizer or None, not 'mxfp4'"),  # type: ignore[arg-type]
        (lambda: GemmRecipe(hadamard=64), "hadamard is a Hadamard or None, not 64"),  # type: ignore[arg-type]
        (lambda: Quantizer(block=[1, 32]), "block is two numbers"),  # type: ignore[arg-type]
        (lambda: Quantizer(block=32), "block is two numbers"),  # type: ignore[arg-type]
        (lambda: Quantizer(prescale="3/4"), "prescale is a finite number"),  # type: ignore[arg-type]
        (lambda: get_recipe("dge-occ", occ=False, alpha=0.97), "occ=false leaves out the clamp"),
        (lambda: get_recipe("dge-occ", dge=False, k=3.0), "dge=false leaves out the estimator"),
        (lambda: get_recipe("mxfp4-rht-sr", hadamard=0, signs="none"), "hadamard=0 leaves out"),
        (lambda: get_recipe("quartet-2", hadamard=0), "16 or more, not 0"),
        (lambda: get_recipe("tetrajet-ema", ema_share=0.1, ema_beta=0.5), "ema_share"),
    ],
)
def test_values_of_another_type_and_options_without_effect_are_refused(
    made: Callable[[], Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        made()


@pytest.mark.parametrize(
    ("scale", "largest"), [("e4m3", 448.0), ("ue5m3", 61440.0), ("e8m0", 2.0**127)]
)
def test_no_outer_scale_maps_a_maximum_beyond_the_largest_block_scale(
    scale: Any, largest: float
) -> None:
    rule: Any = "floor" if scale == "e8m0" else "nearest"
    Quantizer(scale=scale, rule=rule, block=(1, 16), row_max=largest)
    told = f"takes no row_max of {2 * largest:g}: its largest scale is {largest:g}"
    with pytest.raises(ConfigError, match=re.escape(told)):
        Quantizer(scale=scale, rule=rule, block=(1, 16), row_max=2 * largest)


def test_a_recipe_of_another_process_has_its_hash() -> None:
    """Its name is no reason for another hash, though Python hashes strings anew in each process."""
    code = (
        "import pickle, sys; from megatron_fp4 import get_recipe; r = get_recipe('tetrajet'); "
        "hash(r); sys.stdout.buffer.write(pickle.dumps(r))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert pickle.loads(found.stdout) in {get_recipe("tetrajet")}
