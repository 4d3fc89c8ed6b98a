"""Q-Ramping as options of any recipe: elements of W that oscillate are updated less often.

The options are those of `tetrajet-ramping`; any recipe takes them whose forward pass has W in E2M1
with E8M0 scales, rounded to nearest. arXiv 2502.20853, section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes.method import Method

# The fields of Ramping by the option that sets them.
OPTIONS = {
    "ramping_k1": "k1",
    "ramping_k2": "k2",
    "ramping_interval": "interval",
    "ramping_interval_share": "interval_share",
    "ramping_calibration": "calibration",
    "ramping_most": "most",
}
DEFAULT = Ramping()


def ramping(recipe: Recipe, periods: Ramping) -> Recipe:
    """`recipe` with the periods of Q-Ramping. Its name ends in "-ramping".

    Raises ConfigError where the forward pass has no W in E2M1 with E8M0 scales, rounded to nearest.
    """
    name = recipe.name if recipe.name.endswith("-ramping") else f"{recipe.name}-ramping"
    return replace(recipe, name=name, ramping=periods)


def moments_refusal(recipes: Iterable[Recipe], flag: str) -> str | None:
    """The message that refuses `flag`, which stores Adam's moments in few bits, because one of the
    recipes has ramping; None if none has."""
    ramped = next((recipe for recipe in recipes if recipe.ramping is not None), None)
    if ramped is None:
        return None
    return (
        f"{flag} is not defined for recipe {ramped.name}, whose optimizer has moments in float32: "
        "leave out one"
    )


METHOD = Method(
    field="ramping",
    default=DEFAULT,
    options=OPTIONS,
    applied=ramping,
    either=("ramping_interval", "ramping_interval_share"),
    contradiction="give one of ramping_interval and ramping_interval_share",
)
