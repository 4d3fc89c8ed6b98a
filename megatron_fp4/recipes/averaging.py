"""Q-EMA as options of any recipe: in the forward pass W is rounded towards its moving average.

The options are those of `tetrajet-ema`; any recipe takes them whose forward pass has W in E2M1 with
E8M0 scales, rounded to nearest. arXiv 2502.20853, section 4.2.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes.method import Method

# The fields of WeightAverage by the option that sets them. The authors' code begins to round
# towards the average after 10 updates.
OPTIONS = {
    "ema_beta": "beta",
    "ema_share": "half_life",
    "ema_follows_lr": "follows_lr",
    "ema_warmup": "warmup",
    "ema_delay": "delay",
}
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


METHOD = Method(
    field="weight_average",
    default=DEFAULT,
    options=OPTIONS,
    applied=averaging,
    either=("ema_beta", "ema_share"),
    contradiction="ema_beta or ema_share sets the window: give one",
)
