"""Collectives of a linear, in a real world of two ranks."""

import pytest

from testing.worlds.launch import SCRIPTS, spawn


@pytest.mark.parametrize(
    "script",
    [
        "communication.py",
        pytest.param("estimators.py", marks=pytest.mark.slow),
        "overlap.py",
        "token_sums.py",
    ],
)
def test_two_ranks(script: str) -> None:
    run = spawn(2, SCRIPTS / script)
    assert run.returncode == 0, run.stdout[-3000:]
