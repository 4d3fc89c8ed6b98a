"""Amounts: numbers by name that can be summed."""

from __future__ import annotations

from collections.abc import Mapping


class Amounts(dict[str, float]):
    """Numbers by name, such as work by unit or seconds by kind. A name that is not there has 0."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, other: Mapping[str, float], times: float = 1.0) -> None:
        """Adds other numbers, each `times` times."""
        for name, number in other.items():
            self[name] += times * number
