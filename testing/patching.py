"""Replaces an attribute inside a with statement, for programs that run without pytest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is `value` while the context is entered. Raises AttributeError where `owner` has
    no such attribute."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
