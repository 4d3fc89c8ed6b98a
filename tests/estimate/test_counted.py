"""What costs.py does not count is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from megatron_fp4 import ConfigError, Quantizer, get_recipe
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.quantizer import get_quantizer
from megatron_fp4.estimate.counted import COUNTED
from tests.estimate.test_costs import RECIPES, alike, found


@pytest.mark.parametrize("kind", COUNTED)
def test_every_field_and_every_word_of_it_is_counted(kind: type) -> None:
    """A new field or word of a recipe is costed, or named here as one that costs nothing."""
    assert {each.name for each in fields(kind)} == COUNTED[kind].keys()
    for name, hint in get_type_hints(kind).items():
        if get_origin(hint) is Literal and COUNTED[kind][name]:
            assert get_args(hint) == COUNTED[kind][name]


def test_a_new_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COUNTED[Quantizer], "rounding", ("nearest",))
    with pytest.raises(ConfigError, match="tetrajet: the cost model does not count .*stochastic"):
        found(get_recipe("tetrajet"))
    monkeypatch.delitem(COUNTED[Quantizer], "inflate")
    found(RECIPES["nvfp4"])
    with pytest.raises(ConfigError, match="inflate 1.0625"):
        found(alike(get_quantizer("nvfp4-17-16")))
    monkeypatch.delitem(COUNTED, Hadamard)
    with pytest.raises(ConfigError, match="Hadamard"):
        found(alike(Quantizer(), Hadamard(16)))


@pytest.mark.parametrize("others", [{"swiglu": "after"}, {"normed": True}, {"sent_w": True}])
def test_other_work_of_a_linear_is_refused(others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="by itself"):
        found(get_recipe("tetrajet"), **others)
