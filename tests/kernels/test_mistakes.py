"""Known mistakes in the kernels, injected one at a time: the comparisons notice each. Without a
mistake they find no difference (test_interpreted.py)."""

from typing import Any

import pytest

from testing.kernels.interpreter import differences
from testing.kernels.mistakes import MISTAKES, NONE

# One of each kernel for the quick tier, or for the slow one.
QUICK = {
    "ties go up",
    "a whole's bits",
    "one draw for two streams",
    "sums for differences",
    "NaN fits",
}
QUICK |= {
    "midway goes down",
    "no NaN",
    "up is nearest",
    "rounded in another order",
    "not rounded to nearest",
    "left in float32",
    "blocks of the range",
    "the largest does not fit",
    "bits without the rank",
    "sums of what is not there",
    "a product is rounded before it is added",
    "float32 is read as BF16",
}
SLOW = {
    "a restored zero has no sign",
    "1/2 is decoded as 3/4",
    "halves go down",
    "gradients in each other's half",
}


def marks(name: str) -> Any:
    if name in QUICK:
        return ()
    return pytest.mark.slow if name in SLOW else pytest.mark.outside


@pytest.mark.parametrize(
    ("comparison", "name"),
    [
        pytest.param(of, name, id=f"{of}-{name}", marks=marks(name))
        for of, mistakes in MISTAKES.items()
        for name in mistakes
    ],
)
def test_a_mistake_is_noticed(comparison: str, name: str) -> None:
    cases = MISTAKES[comparison][name].cases
    assert differences(comparison, cases, mistake=name) != [""]


@pytest.mark.parametrize(
    "comparison",
    [pytest.param(of, marks=() if of == "mxfp4" else pytest.mark.outside) for of in MISTAKES],
)
def test_injection_by_itself_changes_nothing(comparison: str) -> None:
    cases = next(iter(MISTAKES[comparison].values())).cases
    assert differences(comparison, cases, mistake=NONE) == [""]


def test_a_mistake_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AssertionError, match="KeyError: 'ties go sideways'"):
        differences("mxfp4", mistake="ties go sideways")
