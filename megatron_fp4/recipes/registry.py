"""The recipes that have names in Python, and the checks and conversions of their options."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes import averaging, ramping
from megatron_fp4.recipes.method import Method

SUFFIXES = (".yaml", ".yml")  # of recipe files
ALIASES = {"auto": "tetrajet-fp8"}  # other names of built-in recipes
_METHODS = (averaging.METHOD, ramping.METHOD)
_FACTORIES: dict[str, Callable[..., Recipe]] = {}


def register(name: str) -> Callable[[Callable[..., Recipe]], Callable[..., Recipe]]:
    """A decorator that registers a recipe function under `name`.

    The function takes keyword-only options, all with defaults, and returns a Recipe.
    """

    def add(factory: Callable[..., Recipe]) -> Callable[..., Recipe]:
        if name in _FACTORIES:
            raise ValueError(f"recipe {name!r} is registered twice")
        _FACTORIES[name] = factory
        return factory

    return add


def list_recipes() -> list[str]:
    """The names of the built-in recipes."""
    return sorted(_FACTORIES)


def known_names() -> str:
    """The names of the built-in recipes, and their other names, for a message."""
    return ", ".join([*list_recipes(), *ALIASES])


def uniform_recipes() -> list[str]:
    """The names of those built-in recipes that are uniform (`Recipe.is_uniform`)."""
    return [name for name in list_recipes() if find_recipe(name, {}).is_uniform]


def recipe_options(name: str) -> dict[str, Any]:
    """The options of a built-in recipe with their defaults. Raises ConfigError for another name."""
    name = ALIASES.get(name, name)
    if name not in _FACTORIES:
        raise ConfigError(f"unknown recipe {name!r}; known: {known_names()}")
    return {p.name: p.default for p in inspect.signature(_FACTORIES[name]).parameters.values()}


def read_options(pairs: Iterable[str]) -> dict[str, str]:
    """The options of a recipe from KEY=VALUE pairs; of pairs with the same key the last one counts.

    Raises ConfigError for any other text.
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"an option of a recipe is KEY=VALUE, not {pair!r}")
        options[key.replace("-", "_")] = value
    return options


def find_recipe(name: str, options: Mapping[str, Any]) -> Recipe:
    """The recipe called `name`, which is no file; see `lookup.get_recipe`."""
    name = ALIASES.get(name, name)
    return shared(with_options(name, options, lambda own: _found(name, own)))


def with_options(
    name: str, options: Mapping[str, Any], find: Callable[[Mapping[str, Any]], Recipe]
) -> Recipe:
    """What `find` makes of the recipe's own options, with the methods that the others give it.

    name: for messages. Raises ConfigError where an option would be ignored, or is out of range.
    """
    given = [(method, _of_method(method, name, options)) for method in _METHODS]
    taken = {option for _, chosen in given for option in chosen}
    recipe = find({option: value for option, value in options.items() if option not in taken})
    for method, chosen in given:
        if chosen:
            _check_reach(method, next(iter(chosen)), recipe, name)
        recipe = method.with_options(recipe, chosen)
    return recipe


def _check_reach(method: Method, option: str, recipe: Recipe, name: str) -> None:
    """Raises ConfigError where `option` would be ignored: for phases, and for layers whose recipe
    can follow the method."""
    if recipe.phases:
        raise ConfigError(
            f"recipe {name!r} has phases, which the option {option} does not reach: give it in a "
            "recipe file, to the recipe and to its phases"
        )
    for layers in recipe.layers:
        if any(method.suits(each) for each in layers.recipe.alone):
            raise ConfigError(
                f"recipe {name!r} has layers that follow {layers.recipe.name}, which the option "
                f"{option} does not reach: give it in a recipe file, in the options of each recipe "
                "that it is for"
            )


def _of_method(method: Method, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that are of `method`, converted to their types. name: for messages."""
    hints = get_type_hints(type(method.default))
    given = [option for option in options if option in method.options]
    try:
        return {
            option: typed(options[option], hints[method.options[option]], option)
            for option in given
        }
    except ConfigError as error:
        raise ConfigError(f"recipe {name!r}: {error}") from error


def _found(name: str, options: Mapping[str, Any]) -> Recipe:
    """The recipe of this name, with its own options."""
    if name in _FACTORIES:
        return call_with_options(_FACTORIES[name], name, options)
    if ":" in name:
        return _imported(name, options)
    baseline = "; for a linear in BF16 use torch.nn.Linear" if name == "bf16" else ""
    raise ConfigError(
        f"unknown recipe {name!r}; known: {known_names()}, a .yaml file, or "
        f"package.module:object{baseline}"
    )


@cache
def shared(recipe: Recipe) -> Recipe:
    """The first of all equal recipes, which lookups of plans then find by identity."""
    return recipe


def _imported(name: str, options: Mapping[str, Any]) -> Recipe:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"recipe {name!r} cannot be imported: {problem}") from error
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
    """factory(**options), with each option converted to the type in the factory's signature.

    Raises ConfigError, which names the recipe, for an unknown option or value, and for any
    exception in the factory.
    """
    try:
        known, hints = inspect.signature(factory).parameters, get_type_hints(factory)
        unknown = [key for key in options if key not in known]
        if unknown:
            listed = ", ".join([*known, *(option for m in _METHODS for option in m.options)])
            raise ConfigError(f"no option {unknown[0]!r}; its options: {listed}")
        return factory(**{key: typed(value, hints.get(key), key) for key, value in options.items()})
    except ConfigError as error:
        raise ConfigError(f"recipe {name!r}: {error}") from error
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"recipe {name!r} failed: {problem}") from error


def typed(value: Any, hint: Any, key: str) -> Any:
    """`value` converted to the declared type `hint` of the option `key`.

    Converts to bool, int, float ("16/9" is a float too), str, and checks the values of a Literal.
    None passes where the type allows it. A value of any other type is returned unchanged and
    unchecked. Raises ConfigError where the conversion fails.
    """
    if type(None) in get_args(hint):
        if value is None:
            return None
        hint = next(h for h in get_args(hint) if h is not type(None))
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        wanted = " or ".join(map(str, get_args(hint)))
    elif hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        wanted = "true or false"
    elif hint in (int, float):
        number = _number(value)
        if number is not None and (hint is float or float(number).is_integer()):
            return hint(number)
        wanted = "an integer" if hint is int else "a number"
    elif hint is str:
        if isinstance(value, str):
            return value
        wanted = "a string"
    else:
        return value
    raise ConfigError(f"{key} is {wanted}, not {value!r}")


def _number(value: Any) -> float | Fraction | None:
    if isinstance(value, str):
        try:
            value = Fraction(value)
        except (ValueError, ZeroDivisionError):
            return None
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # beyond every float
        return None
