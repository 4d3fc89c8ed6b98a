"""Replaces a function of Megatron's by one that calls it."""

from collections.abc import Callable
from typing import Any


def wrap_once(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replaces the function `name` of `owner`, a module or a class, by what `wrap` returns for it.

    A second call does nothing: what `wrap` returns was made by functools.wraps, and so is known.
    """
    function = getattr(owner, name)
    if not hasattr(function, "__wrapped__"):
        setattr(owner, name, wrap(function))
