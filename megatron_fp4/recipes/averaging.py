"""Q-EMA as options of any recipe: in the forward pass W is rounded towards its moving average.

The options are those of `tetrajet-ema`; any recipe takes them whose forward pass has W in E2M1 with
E8M0 scales, rounded to nearest. arXiv 2502.20853, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe

# The fields of WeightAverage by the option that sets them. The authors' code begins to round
# towards the average after 10 updates.
OPTIONS = {
    "ema_beta": "beta",
    "ema_share": "half_life",
    "ema_follows_lr": "follows_lr",
    "ema_warmup": "warmup",
    "ema_delay": "delay",
}
FIELDS = WeightAverage
DEFAULT = WeightAverage(delay=10)


def averaging(recipe: Recipe, average: WeightAverage) -> Recipe:
    """`recipe` with W of its forward pass rounded towards `average`. Its name ends in "-ema".

    Raises ConfigError where the forward pass has no W in E2M1 with E8M0 scales, rounded to nearest.
    """
    w = recipe.fprop.b
    if w is None or w.rounding not in ("nearest", "ema"):
        form = "is not quantized" if w is None else f"is rounded {w.rounding}"
        raise ConfigError(
            f"{recipe.name}: only a W that is rounded to nearest in the forward pass can be "
            f"rounded towards its average, and here it {form}: leave out the ema options"
        )
    name = recipe.name if recipe.name.endswith("-ema") else f"{recipe.name}-ema"
    fprop = replace(recipe.fprop, b=replace(w, rounding="ema"))
    return replace(recipe, name=name, fprop=fprop, weight_average=average)


def with_options(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """`recipe` with the options of OPTIONS, which change the average that it has, or give it one.

    options: already of the types of WeightAverage's fields. Raises ConfigError for a value out of
    range, and as `averaging`.
    """
    if not options:
        return recipe
    if options.get("ema_beta") is not None and options.get("ema_share") is not None:
        raise ConfigError(
            f"recipe {recipe.name!r}: ema_beta or ema_share sets the window: give one"
        )
    fields = {OPTIONS[name]: value for name, value in options.items()}
    if options.get("ema_beta") is not None:
        fields["half_life"] = None
    try:
        return averaging(recipe, replace(recipe.weight_average or DEFAULT, **fields))
    except ConfigError as error:
        raise ConfigError(f"recipe {recipe.name!r}: {error}") from error
