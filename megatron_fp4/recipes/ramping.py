"""Q-Ramping as options of any recipe: elements of W that oscillate are updated less often.

The options are those of `tetrajet-ramping`; any recipe takes them whose forward pass has W in E2M1
with E8M0 scales, rounded to nearest. arXiv 2502.20853, section 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe

# The fields of Ramping by the option that sets them.
OPTIONS = {
    "ramping_k1": "k1",
    "ramping_k2": "k2",
    "ramping_interval": "interval",
    "ramping_interval_share": "interval_share",
    "ramping_calibration": "calibration",
    "ramping_most": "most",
}
FIELDS = Ramping
DEFAULT = Ramping()


def ramping(recipe: Recipe, periods: Ramping) -> Recipe:
    """`recipe` with the periods of Q-Ramping. Its name ends in "-ramping".

    Raises ConfigError where the forward pass has no W in E2M1 with E8M0 scales, rounded to nearest.
    """
    name = recipe.name if recipe.name.endswith("-ramping") else f"{recipe.name}-ramping"
    return replace(recipe, name=name, ramping=periods)


def with_options(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """`recipe` with the options of OPTIONS, which change the periods that it has, or give it some.

    options: already of the types of Ramping's fields. Raises ConfigError for a value out of range,
    and as `ramping`.
    """
    if not options:
        return recipe
    intervals = ("ramping_interval", "ramping_interval_share")
    if all(options.get(name) is not None for name in intervals):
        raise ConfigError(f"recipe {recipe.name!r}: give one of {' and '.join(intervals)}")
    fields = {OPTIONS[name]: value for name, value in options.items()}
    if options.get("ramping_interval") is not None:
        fields["interval_share"] = None
    try:
        return ramping(recipe, replace(recipe.ramping or DEFAULT, **fields))
    except ConfigError as error:
        raise ConfigError(f"recipe {recipe.name!r}: {error}") from error
