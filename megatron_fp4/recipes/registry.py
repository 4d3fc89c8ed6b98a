"""Names to recipes, with typed options."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe

_FACTORIES: dict[str, Callable[..., Recipe]] = {}


def register(name: str) -> Callable[[Callable[..., Recipe]], Callable[..., Recipe]]:
    """Name a function of keyword-only options, all with defaults, that returns a Recipe."""

    def add(factory: Callable[..., Recipe]) -> Callable[..., Recipe]:
        if name in _FACTORIES:
            raise ValueError(f"recipe {name!r} is registered twice")
        _FACTORIES[name] = factory
        return factory

    return add


def list_recipes() -> list[str]:
    """The names of the built-in recipes."""
    return sorted(_FACTORIES)


def recipe_options(name: str) -> dict[str, Any]:
    """The options of a built-in recipe with their defaults."""
    return {p.name: p.default for p in inspect.signature(_FACTORIES[name]).parameters.values()}


def get_recipe(name: str, **options: Any) -> Recipe:
    """The recipe called `name`: a built-in, a YAML file, or `package.module:object`.

    options: the recipe's own, by keyword; strings are read as the option's type.
    Raises ConfigError for an unknown name (listing the known ones), option or value.
    """
    if name in _FACTORIES:
        return call_with_options(_FACTORIES[name], name, options)
    if name.endswith((".yaml", ".yml")):
        from megatron_fp4.recipes.files import load_recipe_file

        return load_recipe_file(Path(name), options)
    if ":" in name:
        return _imported(name, options)
    raise ConfigError(
        f"unknown recipe {name!r}; known: {', '.join(list_recipes())}, a .yaml file, or "
        "package.module:object"
    )


def _imported(name: str, options: Mapping[str, Any]) -> Recipe:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"recipe {name!r} cannot be imported: {error}") from error
    if callable(found):
        found = call_with_options(found, name, options)
    elif options:
        raise ConfigError(f"recipe {name!r} is an object, not a function: it takes no options")
    if not isinstance(found, Recipe):
        raise ConfigError(f"recipe {name!r} is a {type(found).__name__}, not a megatron_fp4.Recipe")
    return found


def call_with_options(
    factory: Callable[..., Recipe], name: str, options: Mapping[str, Any]
) -> Recipe:
    """factory(**options), with each option checked against the factory's signature."""
    hints = get_type_hints(factory)
    hints.pop("return", None)
    unknown = [key for key in options if key not in hints]
    if unknown:
        known = ", ".join(hints) or "none"
        raise ConfigError(f"recipe {name!r} has no option {unknown[0]!r}; its options: {known}")
    typed = {key: _typed(value, hints[key], name, key) for key, value in options.items()}
    try:
        return factory(**typed)
    except ValueError as error:
        raise ConfigError(f"recipe {name!r}: {error}") from error


def _typed(value: Any, hint: Any, recipe: str, key: str) -> Any:
    """`value` as the option's type: bool, int, float or one of a Literal's strings."""
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        wanted = " or ".join(map(str, get_args(hint)))
    elif hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        wanted = "true or false"
    else:
        try:
            return hint(value)
        except (TypeError, ValueError):
            wanted = {"int": "an integer", "float": "a number"}.get(hint.__name__, hint.__name__)
    raise ConfigError(f"recipe {recipe!r}: option {key} is {wanted}, not {value!r}")
