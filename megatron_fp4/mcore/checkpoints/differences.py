"""How differences between a checkpoint and a launch are told."""

from __future__ import annotations

from typing import Any


def was_and_is(what: str, old: Any, new: Any) -> list[str]:
    """One line if two values differ, else none. None and False are the same: a flag that one of two
    versions does not have counts as not given."""
    if isinstance(old, bool) or isinstance(new, bool):
        old, new = bool(old), bool(new)
    return [f"{what} was {said(old)} and is {said(new)}"] if (old or 0) != (new or 0) else []


def said(value: Any) -> str:
    """A value in words."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
