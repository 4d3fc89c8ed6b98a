"""A pass in C++ allocates once for what is kept, once for temporaries, and once for a result."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cpp.test_bits import compared

pytestmark = pytest.mark.slow
# By executor: of forward and backward where W is quantized, and where it is held.
allocations = partial(compared, interpreted=True, script="testing/scripts/count_allocations.py")


def test_a_pass_in_cpp_allocates_once_for_each_use() -> None:
    """Forward: temporaries, what backward reads, Y, and W's operands if they are not held yet.
    Backward: temporaries, dX, and W's operand; dW is added to main_grad. The mistake: each tensor
    by itself, as in Python."""
    found, apart = allocations("tetrajet"), allocations("tetrajet", "--apart")
    assert found["C++"] == [4, 3, 3, 2]
    assert apart["C++"] == apart["Python"] == found["Python"]
    assert min(found["Python"]) >= 7
