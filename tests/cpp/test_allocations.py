"""A pass in C++ allocates once for what is kept, once for temporaries, and once for a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from testing.worlds.launch import ROOT

pytestmark = pytest.mark.slow


def allocations(*words: str) -> dict[str, list[int]]:
    """By executor: of forward and backward where W is quantized, and where it is held."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "testing/scripts/count_allocations.py", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def test_a_pass_in_cpp_allocates_once_for_each_use() -> None:
    """Forward: temporaries, what backward reads, Y, and W's operands if they are not held yet.
    Backward: temporaries, dX, and W's operand; dW is added to main_grad. The mistake: each tensor
    by itself, as in Python."""
    found, apart = allocations("tetrajet"), allocations("tetrajet", "--apart")
    assert found["C++"] == [4, 3, 3, 2]
    assert apart["C++"] == apart["Python"] == found["Python"]
    assert min(found["Python"]) >= 7
