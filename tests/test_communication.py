"""Collectives of a linear, in a real world of two ranks."""

from pathlib import Path

import pytest

from tests.mcore.launch import spawn


@pytest.mark.parametrize("worker", ["communication_worker.py", "overlap_worker.py"])
def test_two_ranks(worker: str) -> None:
    run = spawn(2, Path(__file__).with_name(worker))
    assert run.returncode == 0, run.stdout[-3000:]
