"""Collectives of a linear, in a real world of two ranks."""

from pathlib import Path

from tests.mcore.launch import spawn


def test_two_ranks() -> None:
    run = spawn(2, Path(__file__).with_name("communication_worker.py"))
    assert run.returncode == 0, run.stdout[-3000:]
