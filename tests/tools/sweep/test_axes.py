"""Combinations: each recipe is one combination, and the published recipes are among them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_fp4 import ConfigError, Recipe, get_recipe
from megatron_fp4.arithmetic.estimators import Estimator
from tools.sweep.axes import AXES, TRAINING, Combination, first, flips, settled, values
from tools.sweep.building import recipe_of
from tools.sweep.factorial import STAR
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
    combinations = {replace(each, **plain) for each in DRAWN.stars}
    recipes = {unnamed(recipe_of(each)) for each in combinations}
    assert len(recipes) == len(combinations) > 200


def test_a_star_differs_from_its_center_on_one_axis() -> None:
    centers = {each.key: each for each in DRAWN.stars if each.key == DRAWN.stars[each]}
    stars = {each: star for each, star in DRAWN.stars.items() if star != STAR}
    assert set(centers) == set(stars.values())
    for each, star in stars.items():
        differ = [axis for axis in AXES if getattr(each, axis) != getattr(centers[star], axis)]
        assert len(differ) == (0 if each == centers[star] else 1)


def test_settled_combinations_stay() -> None:
    source = random.Random(3)
    for _ in range(300):
        drawn = {axis: source.choice(found) for axis, found in AXES.items()}
        once = settled(Combination(**drawn))
        assert settled(once) == once
        assert all(getattr(once, axis) in values(once, axis) for axis in AXES)


def test_every_value_is_drawn() -> None:
    seen = {(axis, getattr(each, axis)) for each in DRAWN.stars for axis in AXES}
    assert seen == {(axis, value) for axis, found in AXES.items() for value in found}


def test_the_same_seed_draws_the_same() -> None:
    assert list(sample(100, seed=1).stars) == list(sample(100, seed=1).stars)
    assert list(sample(100, seed=1).stars) != list(sample(100, seed=2).stars)


def test_flips_leave_out_what_changes_two_axes() -> None:
    """Another format of scales has other rules too."""
    scales = {each.scale for axis, each in flips(Combination()) if axis == "scale"}
    assert scales == set()
    float_scales = Combination(scale="e4m3", rule="nearest", backward_rule="nearest")
    assert {each.scale for axis, each in flips(float_scales) if axis == "scale"} == {"ue5m3"}


def test_contradictions_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="it would be scale=e4m3 rule=nearest"):
        recipe_of(Combination(scale="e4m3"))
    with pytest.raises(ConfigError, match="scale has no value 'e3m4': e8m0, e4m3"):
        Combination(scale="e3m4")
    with pytest.raises(ConfigError, match="four-over-six takes blocks of one row"):
        recipe_of(
            Combination(
                scale="e4m3", rule="four-over-six", backward_rule="up", weight_block="square"
            )
        )
    assert DRAWN.refused.total() > 0 and all(DRAWN.refused)


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
