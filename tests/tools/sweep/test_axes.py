"""Combinations: each recipe is one combination, and the published recipes are among them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megatron_fp4 import ConfigError, Recipe, get_recipe
from megatron_fp4.arithmetic.estimators import Estimator
from tools.rows import Row
from tools.sweep.__main__ import NUMBER, SEED
from tools.sweep.axes import (
    AXES,
    TRAINING,
    UNDRAWN,
    Combination,
    check,
    draw,
    drawn,
    first,
    line,
    settled,
    values,
)
from tools.sweep.building import recipe_of
from tools.sweep.promotion import DESIGNED, stars_of
from tools.sweep.sampling import sample

TETRAJET = Combination(rule="ceil", backward_rule="ceil", rounding="backward", operands="forward")
RHT = Combination(
    forward="bf16",
    backward_rule="three-quarters",
    rounding="backward",
    hadamard="backward",
    group="64",
)
NVFP4 = {"scale": "e4m3", "block": "16", "outer_scale": "tensor", "rule": "nearest"}
NVIDIA = Combination(
    **NVFP4,
    backward_rule="nearest",
    weight_block="square",
    rounding="gradients",
    hadamard="wgrad",
    signs="fixed",
)
QUARTET = Combination(
    **NVFP4 | {"rule": "four-over-six"},
    backward_rule="unit-gain",
    operands="forward",
    hadamard="backward",
    group="128",
)
DRAWN = sample(700, seed=7)


def unnamed(recipe: Recipe) -> Recipe:
    """What a recipe does: without its name, its paper and its bias gradient, which is no axis."""
    return replace(recipe, name="", paper="", bias_gradient="raw")


@pytest.mark.parametrize(
    "name, combination",
    [
        ("mxfp4", Combination()),
        ("tetrajet", TETRAJET),
        ("mxfp4-rht-sr", RHT),
        ("nvfp4-nvidia", NVIDIA),
        ("quartet-2", QUARTET),
    ],
)
def test_published_recipes_are_combinations(name: str, combination: Combination) -> None:
    assert unnamed(recipe_of(combination)) == unnamed(get_recipe(name))


def test_each_recipe_is_one_combination() -> None:
    """No axis is without an effect, apart from those of the training around the recipe."""
    plain = {axis: first(axis) for axis in TRAINING}
    combinations = {replace(each, **plain) for each in DRAWN}
    recipes = {unnamed(recipe_of(each)) for each in combinations}
    assert len(recipes) == len(combinations) > 200


def test_a_star_is_the_lines_through_its_center() -> None:
    stars = {each: star for each, star in DRAWN.items() if star not in DESIGNED}
    centers = {each.key: each for each, star in stars.items() if star == each.key}
    assert set(centers) == set(stars.values())
    for each, star in stars.items():
        assert any(each in line(centers[star], axis).values() for axis in AXES)
    for center in centers.values():  # the last star is whole too
        every = (each for axis in AXES for each in line(center, axis).values())
        assert {each for each in every if each.in_fp4} <= set(DRAWN)


def test_each_combination_that_is_drawn_is_a_recipe() -> None:
    """None is refused, which would change what is drawn evenly."""
    source = random.Random(3)
    for each in [draw(source) for _ in range(600)]:
        check(each)
        if each.in_fp4:
            recipe_of(each)


def test_values_are_drawn_evenly_among_those_that_are_possible() -> None:
    source = random.Random(4)
    many = [draw(source) for _ in range(4000)]
    for axis in ("scale", "rule", "backward_rule", "outer_scale", "rounding", "group"):
        cases: dict[tuple[str, ...], Counter[str]] = {}
        for each in many:
            own = cases.setdefault(drawn(each, axis), Counter())
            own[getattr(each, axis)] += 1
        for allowed, found in cases.items():
            for value in allowed:
                expected = found.total() / len(allowed)
                # 5 standard deviations of a binomial
                assert abs(found[value] - expected) <= 5 * expected**0.5 + 1, (axis, value)


def test_every_value_is_drawn() -> None:
    """But for those that came after the committed sample."""
    seen = {(axis, getattr(each, axis)) for each in DRAWN for axis in AXES}
    later = {(axis, value) for axis, found in UNDRAWN.items() for value in found}
    of_e8m0 = [each for each in DRAWN if each.scale == "e8m0"]
    assert of_e8m0 and not any("nearest" in (each.rule, each.backward_rule) for each in of_e8m0)
    assert seen == {(axis, value) for axis, found in AXES.items() for value in found} - later


def test_the_committed_results_are_of_the_sample(committed: list[Row]) -> None:
    """Each combination in its star, so that `run` goes on with them."""
    found = stars_of(row for row in committed if row["stage"] == "products")
    assert found == sample(NUMBER, SEED)


def test_later_values_are_of_recipes() -> None:
    source = random.Random(5)
    seen = Counter[tuple[str, str]]()
    for each in [draw(source) for _ in range(600)]:
        for axis, later in UNDRAWN.items():
            for value in {*later} & {*values(each, axis)}:
                changed = settled(replace(each, **{axis: value}))
                assert getattr(changed, axis) == value
                recipe_of(changed)
                seen[axis, value] += 1
    assert min(seen.values()) > 10 and len(seen) == sum(map(len, UNDRAWN.values()))


def test_rule_mse_fp8_and_hot_channels_are_those_of_a_recipe_file() -> None:
    """Of one of the candidates, whose backward pass has another format of scales."""
    chosen = {"scale": "ue5m3", "block": "16", "rule": "mse-fp8", "outliers": "hot-channels"}
    found = recipe_of(Combination(**chosen, backward="bf16"))
    file = get_recipe("benchmarks/study/candidates/fp8-scales-hot.yaml")
    assert (found.fprop, found.outliers) == (file.fprop, file.outliers)
    assert found.outliers is not None
    assert recipe_of(Combination(**chosen | {"outliers": "none"}, backward="bf16")).outliers is None


def test_rule_nearest_of_e8m0_is_that_of_a_recipe_option() -> None:
    found = recipe_of(Combination(rule="nearest", backward_rule="nearest"))
    assert unnamed(found) == unnamed(get_recipe("mxfp4", rule="nearest"))


def test_the_same_seed_draws_the_same() -> None:
    assert list(sample(100, seed=1)) == list(sample(100, seed=1))
    assert list(sample(100, seed=1)) != list(sample(100, seed=2))


def test_a_line_changes_another_axis_only_where_it_must() -> None:
    """Another format of scales has other rules: each has the first of its own."""
    found = line(Combination(rule="ceil", block="16", hadamard="backward", group="64"), "scale")
    kept = {"block": "16", "hadamard": "backward", "group": "64"}
    assert found == {
        "e8m0": Combination(rule="ceil", **kept),
        "e4m3": Combination(scale="e4m3", rule="nearest", backward_rule="nearest", **kept),
        "ue5m3": Combination(scale="ue5m3", rule="nearest", backward_rule="nearest", **kept),
        "fp32": Combination(scale="fp32", rule="absmax", backward_rule="absmax", **kept),
    }
    # Of E8M0's rules it has the first that stars have, and not nearest.
    assert line(found["e4m3"], "scale")["e8m0"] == Combination(**kept)
    assert line(Combination(), "group") == {"16": Combination()}
    blocks = line(Combination(rule="ceil"), "block")
    assert blocks == {size: Combination(rule="ceil", block=size) for size in ("32", "16")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"group": "32"},
            "group=32 has no effect with hadamard=none (the default): "
            "leave it out, or change hadamard",
        ),
        (
            {"forward": "bf16", "rule": "ceil"},
            "rule=ceil has no effect with forward=bf16: leave it out, or change forward",
        ),
        (
            {"scale": "e4m3", "backward_rule": "up"},
            "rule=floor (the default) does not go with scale=e4m3: "
            "give rule=nearest or up or inflated or four-over-six or mse-fp8",
        ),
        (
            {"outliers": "hot-channels", "estimator": "dge", "estimated": "x"},
            "outliers=hot-channels does not go with estimated=x: give outliers=none",
        ),
        (
            {"outliers": "hot-channels", "x_mean": "subtracted"},
            "outliers=hot-channels does not go with x_mean=subtracted: give outliers=none",
        ),
        (
            {"outliers": "hot-channels", "forward": "bf16"},
            "outliers=hot-channels has no effect with forward=bf16: "
            "leave it out, or change forward",
        ),
        (
            {"scale": "ue5m3", "rule": "up", "backward_rule": "mse-fp8", "rounding": "gradients"},
            "rounding=gradients does not go with backward_rule=mse-fp8: give rounding=nearest",
        ),
        (
            {"scale": "e4m3", "rule": "four-over-six", "backward_rule": "up"}
            | {"weight_block": "square"},
            "rule=four-over-six does not go with weight_block=square: "
            "give rule=nearest or up or inflated",
        ),
        (
            {"backward": "fp8", "rounding": "backward", "group": "64"},
            "rounding=backward does not go with backward=fp8: give rounding=nearest or all; "
            "group=64 has no effect with hadamard=none (the default): "
            "leave it out, or change hadamard",
        ),
    ],
)
def test_contradictions_are_refused_with_the_reason(given: dict[str, str], message: str) -> None:
    """All of them at once, each with the values that exclude it."""
    with pytest.raises(ConfigError) as caught:
        recipe_of(Combination(**given))
    assert str(caught.value) == message


def test_values_that_no_axis_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="scale has no value 'e3m4': e8m0, e4m3"):
        Combination(scale="e3m4")


def test_a_uniform_grid_takes_no_rule_of_e2m1() -> None:
    uniform = Combination(**NVFP4, backward_rule="up", element="e1m2")
    elements = [recipe_of(uniform).quantizer(g, o) for g, o in (("fprop", "w"), ("wgrad", "dy"))]
    assert [q and q.element for q in elements] == ["e1m2", "e1m2"]
    for axis, rule in (
        ("rule", "four-over-six"), ("rule", "mse-fp8"), ("backward_rule", "unit-gain"),
    ):  # fmt: skip
        assert rule not in values(uniform, axis)
        assert rule in values(replace(uniform, element="e2m1"), axis)  # the control
        with pytest.raises(ConfigError, match=f"{axis}={rule} does not go with element=e1m2: give"):
            check(replace(uniform, **{axis: rule}))


def test_a_gradient_through_the_rounding_of_scales_makes_an_estimator() -> None:
    chosen = Combination(
        rule="nearest", backward_rule="ceil", maximum="vjp", scale_estimator="spline"
    )
    recipe = recipe_of(chosen)
    assert recipe.estimator == Estimator("straight-through", maximum="vjp", scale_form="spline")
    for other, why in (
        ({"maximum": "straight-through"}, "has no effect with maximum=straight-through"),
        ({"rule": "ceil"}, "does not go with rule=ceil: give scale_estimator=straight-through"),
    ):
        with pytest.raises(ConfigError, match=why):
            recipe_of(replace(chosen, **other))
    inflated = replace(chosen, scale="e4m3", rule="inflated", backward_rule="up")
    found = recipe_of(inflated).estimator
    assert found is not None and found.scale_form == "spline"
    # Only with it does anything go through an outer scale beside a vjp.
    through = replace(inflated, outer_scale="tensor", outer_gradient="kept")
    check(through)
    with pytest.raises(ConfigError, match="outer_gradient=kept has no effect with maximum=vjp"):
        check(replace(through, scale_estimator="straight-through"))


def test_a_gradient_through_the_outer_scale_makes_an_estimator() -> None:
    kept = Combination(**NVFP4, backward_rule="nearest", outer_gradient="kept", estimated="both")
    through = Estimator(form="straight-through", outer_scale="vjp")
    recipe = recipe_of(kept)
    assert (recipe.estimator, recipe.x_estimator) == (through, through)
    ignored = replace(kept, outer_gradient="ignored", estimated="w")
    assert recipe_of(ignored).estimator is None
    assert values(ignored, "estimated") == ("w",) and values(kept, "estimated")[1:]
    for other in ({"outer_scale": "none"}, {"maximum": "vjp"}, {"forward": "bf16"}):
        assert values(replace(kept, **other), "outer_gradient") == ("ignored",)


def test_a_key_does_not_depend_on_axes_at_their_first_value() -> None:
    """So that results stay valid when an axis is added."""
    assert TETRAJET.chosen == {
        "rule": "ceil",
        "backward_rule": "ceil",
        "rounding": "backward",
        "operands": "forward",
    }
    assert Combination(**TETRAJET.chosen) == TETRAJET
    assert str(Combination()) == "plain"
