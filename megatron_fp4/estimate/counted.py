"""The words of recipes that costs.py counts; a recipe with another is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantizer import Quantizer, Rule
from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.errors import ConfigError
from megatron_fp4.plan.data import LinearPlan
from megatron_fp4.recipe import GemmRecipe, Recipe

# The fields of everything that a recipe consists of. The words of a field that are counted, or ()
# for a field whose values change no count, or which costs.py reads as they are.
COUNTED: dict[type, dict[str, tuple[str, ...]]] = {
    Recipe: {
        **dict.fromkeys(("name", "paper", "fprop", "dgrad", "wgrad", "bias_gradient"), ()),
        **dict.fromkeys(("estimator", "x_estimator", "outliers"), ()),
        **dict.fromkeys(("weight_average", "ramping"), ()),
        "phases": (),  # the costs are those before them
        "layers": (),  # the costs are those of the other layers
        "backward": ("forward", "raw"),
        "x_mean": ("kept", "subtracted"),
    },
    GemmRecipe: dict.fromkeys(("a", "b", "hadamard", "correction"), ()),
    Quantizer: {
        "element": ("e2m1", "e1m2", "e4m3", "e5m2"),
        "scale": ("e8m0", "e4m3", "ue5m3", "fp32"),
        "rule": get_args(Rule),
        "rounding": ("nearest", "stochastic", "ema"),
        **dict.fromkeys(("block", "prescale", "tensor_max", "inflate", "row_max"), ()),
        "unit_gain": (),
        "scale_rounding": ("nearest", "stochastic"),
    },
    Hadamard: {"group": (), "signs": ()},
    OutlierClamp: {
        **dict.fromkeys(("alpha", "scope", "compensate", "residual_in_wgrad"), ()),
        "form": ("quantiles",),
    },
    HotChannels: {"form": ("channels",), "group": (), "count": ()},
    Estimator: {
        "form": ("dge", "spline", "sigmoid", "straight-through"),
        "maximum": ("straight-through", "absmax", "vjp", "softmax"),
        **dict.fromkeys(("k", "clip", "width", "beyond", "temperature"), ()),
        "outer_scale": ("straight-through", "vjp"),
        "scale_form": ("straight-through", "dge", "spline", "sigmoid"),
    },
    WeightAverage: dict.fromkeys(("beta", "half_life", "follows_lr", "warmup", "delay"), ()),
    Ramping: dict.fromkeys(("k1", "k2", "interval", "interval_share", "calibration", "most"), ()),
}


def check(plan: LinearPlan) -> None:
    """Raises ConfigError if a plan has something that costs.py does not count."""
    setting = plan.setting
    if setting.swiglu or setting.normed or setting.sent_w:
        raise ConfigError("costs are of a linear by itself, without SwiGLU, norm or sent weights")
    if problem := next(_uncounted(plan.recipe), None):
        raise ConfigError(f"recipe {plan.recipe.name}: the cost model does not count {problem}")


def _uncounted(part: Any) -> Iterator[str]:
    """The words of a part of a recipe that COUNTED lacks."""
    known = COUNTED.get(type(part))
    if known is None:
        yield type(part).__name__
        return
    for each in fields(part):
        value = getattr(part, each.name)
        if each.name not in known:
            if value != each.default:
                yield f"{each.name} {value}"
        elif known[each.name] and value not in known[each.name]:
            yield f"{each.name} {value}"
        elif is_dataclass(value):
            yield from _uncounted(value)
