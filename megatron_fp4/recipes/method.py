"""Method: a training method that is an option of any recipe, such as Q-EMA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe


@dataclass(frozen=True)
class Method:
    """A training method that any recipe can be given by options.

    field: the field of Recipe that has the method's settings; a recipe without the method has None
        there. default: the settings of a recipe that is given the method.
    options: the field of the settings that each option sets, by the option's name.
    applied: returns a recipe that follows the method with these settings. Raises ConfigError for a
        recipe that cannot follow it.
    either: two options of which only one may be given. The field of the second takes precedence, so
        that setting the first unsets it; setting the second returns the first's to its default.
    contradiction: what is said of a recipe that is given both.
    """

    field: str
    default: Any
    options: Mapping[str, str]
    applied: Callable[[Recipe, Any], Recipe]
    either: tuple[str, str]
    contradiction: str

    def suits(self, recipe: Recipe) -> bool:
        """Whether `recipe` follows the method or could be given it."""
        try:
            self.applied(recipe, getattr(recipe, self.field) or self.default)
        except ConfigError:
            return False
        return True

    def with_options(self, recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
        """`recipe` with the options `given`, which change its settings, or give it the method.

        given: values by the option's name, already of the types of the settings' fields. Raises
        ConfigError for a value out of range, for both of `either`, and as `applied`.
        """
        if not given:
            return recipe
        first, second = self.either
        fields = {self.options[name]: value for name, value in given.items()}
        try:
            if given.get(first) is not None:
                if given.get(second) is not None:
                    raise ConfigError(self.contradiction)
                fields[self.options[second]] = None
            elif given.get(second) is not None:
                fields[self.options[first]] = getattr(self.default, self.options[first])
            settings = getattr(recipe, self.field) or self.default
            return self.applied(recipe, replace(settings, **fields))
        except ConfigError as error:
            raise ConfigError(f"recipe {recipe.name!r}: {error}") from error
