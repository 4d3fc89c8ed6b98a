"""Liger-Kernel's functions, as this package calls them, against float64."""

from importlib.util import find_spec

import pytest

from testing.kernels.interpreter import differences

pytestmark = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="no liger_kernel")


def test_results_are_those_of_float64_and_mistakes_are_noticed() -> None:
    assert differences("liger") == [""]
