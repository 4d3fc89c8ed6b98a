"""Fixtures of these tests."""

from testing.worlds.one_rank import one_rank  # noqa: F401 -- a fixture
