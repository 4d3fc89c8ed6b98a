"""The one exception that is meant for the user's eyes, and the checks that raise it."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A mistake in what the user asked for: one line that says what is wrong and what to do."""


def check_choices(data: Any) -> None:
    """Raise ConfigError unless each field of a dataclass that is declared a Literal holds one of
    its values: a misspelt word must not fall through to some default."""
    for name, hint in get_type_hints(type(data)).items():
        value = getattr(data, name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            known = " or ".join(map(str, get_args(hint)))
            raise ConfigError(f"{name} is {known}, not {value!r}")
