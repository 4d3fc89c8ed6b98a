"""Reads recipes from YAML files. docs/recipe-files.md lists the keys. An example:

base: tetrajet              # optional: a recipe, or a file beside this one, to start from ...
options: {rule: floor}      # ... and its options
name: my-recipe             # any other field of Recipe replaces the base's
wgrad:
  a: mxfp4-ceil-sr          # a quantizer by name, or its fields as a mapping
  b: {rule: ceil, rounding: stochastic, block: [1, 32]}
  hadamard: {group: 32}
dgrad: {}                   # a GEMM without quantizers is in high precision
phases:                     # what takes its place in the course of training
  - {after: 9/10, recipe: fp8}  # numbers may be fractions
layers:                     # what takes its place in some layers
  - {last: 2, recipe: bf16}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from megatron_fp4.arithmetic.estimators import Estimator
from megatron_fp4.arithmetic.hadamard import Hadamard
from megatron_fp4.arithmetic.hot_channels import HotChannels
from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.arithmetic.quantizer import Quantizer, get_quantizer
from megatron_fp4.arithmetic.ramping import Ramping
from megatron_fp4.arithmetic.weight_states import WeightAverage
from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import GEMMS, GemmRecipe, Layers, Phase, Recipe
from megatron_fp4.recipes.registry import SUFFIXES, find_recipe, typed, with_options

# The keys whose values are mappings of the fields of a type.
_MAPPINGS = {
    "estimator": Estimator,
    "x_estimator": Estimator,
    "weight_average": WeightAverage,
    "ramping": Ramping,
}
_ENTRIES: dict[str, Any] = {"phases": Phase, "layers": Layers}  # the keys that are lists
_OUTLIERS = {"quantiles": OutlierClamp, "channels": HotChannels}  # by form, the first by default


class _NoRepeats(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys, of which the safe loader would keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # Before `<<` merges another mapping, whose keys may stand here too.
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.YAMLError(f"the key {key[1]!r} stands twice; keep one")
        return node


def load_recipe_file(
    path: Path, options: Mapping[str, Any], above: tuple[Path, ...] = ()
) -> Recipe:
    """The Recipe that the YAML file at `path` describes.

    options: options of the base recipe, which override those in the file.
    above: the files that lead here by `base:`, to detect a file that is built on itself.
    Raises ConfigError, which names the file, for a missing or malformed file, or an unknown key or
    value.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _NoRepeats)
    except OSError as error:
        raise ConfigError(f"recipe file {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"recipe file {path} is not valid YAML: {problem}") from error
    try:
        found = _recipe_of(_mapping(content, "its content"), path, options, above)
        _check_begins(found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"recipe file {path}: {error}") from error
    return found


def recipe_of_fields(content: Mapping[str, Any], where: str) -> Recipe:
    """The Recipe of which `dataclasses.asdict` made `content`, such as a checkpoint records.

    where: what has it, for messages. Raises ConfigError for an unknown key or value, as one of
    another version of this package.
    """
    try:
        return _recipe_of(dict(content), Path(where), {}, ())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _recipe_of(
    content: dict[str, Any], path: Path, options: Mapping[str, Any], above: tuple[Path, ...]
) -> Recipe:
    """The Recipe that the parsed content of a recipe file describes.

    content: the file's keys and values. If it has no key `name`, the recipe is named as the file.
    The other arguments are those of `load_recipe_file`.
    """
    content.setdefault("name", path.stem)
    return _recipe_from(content, Recipe(name=path.stem), path, options, above)


def _recipe_from(
    content: dict[str, Any],
    start: Recipe,
    path: Path,
    options: Mapping[str, Any],
    above: tuple[Path, ...],
) -> Recipe:
    """The recipe with these keys. start: what the others are taken from where there is no base. The
    other arguments are those of `load_recipe_file`."""
    chosen = {**_mapping(content.pop("options", {}), "options"), **options}
    base = content.pop("base", None)
    if base is None and chosen:
        raise ConfigError("options belong to a base recipe; name one with base:")
    if base is not None:
        try:
            start = _recipe_named(typed(base, str, "a recipe to start from"), path, chosen, above)
        except ConfigError as error:
            raise ConfigError(f"base: {error}") from error
    _check_keys(content, Recipe, extra=("base", "options"))
    for gemm in GEMMS:
        if gemm in content:
            content[gemm] = _gemm(content[gemm], gemm)
    for key, kind in _MAPPINGS.items():
        if content.get(key) is not None:
            content[key] = _instance(kind, content[key], key)
    if content.get("outliers") is not None:
        content["outliers"] = _outliers(content["outliers"])
    kept = {key: getattr(start, key) for key in _ENTRIES if key not in content}
    given = {key: content.pop(key) for key in _ENTRIES if key in content}
    # Phases of the base may not go with fields that are replaced here, and are checked at the end.
    found = replace(start, phases=(), layers=(), **_typed_fields(content, Recipe))
    for key, entries in given.items():
        listed = enumerate(_list([] if entries is None else entries, key), 1)
        kept[key] = tuple(_entry(key, e, n, found, path, above) for n, e in listed)
    return replace(found, **kept)


def _check_begins(recipe: Recipe) -> None:
    """Raises ConfigError for a phase that never begins.

    Only of files: --fp4-bf16-after may be 1, and checkpoints record that as a phase.
    """
    for each in recipe.followed:
        if each.phases and each.phases[-1].after >= 1.0:
            late = each.phases[-1].recipe.name
            raise ConfigError(
                f"recipe {late} of a phase never begins, after all of training: give an after "
                "below 1, or leave the phase out"
            )


def _recipe_named(
    name: str, path: Path, options: Mapping[str, Any], above: tuple[Path, ...]
) -> Recipe:
    """The recipe that the file at `path` names: a file beside it, or another recipe."""
    if not name.endswith(SUFFIXES):
        return find_recipe(name, options)
    found = path.parent / name
    if found.resolve() in (chain := (*above, path.resolve())):
        raise ConfigError(f"{name} is built on this file itself")
    return with_options(name, options, lambda own: load_recipe_file(found, own, chain))


def _entry(
    key: str, content: Any, number: int, first: Recipe, path: Path, above: tuple[Path, ...]
) -> Any:
    """The Phase or Layers that an entry of `phases:` or `layers:` describes.

    content: the entry. number: its place in the list, from 1, which messages name. first: the
    recipe of the file.
    """
    kind, where = _ENTRIES[key], f"{key}, number {number}"
    content = _mapping(content, where)
    _check_keys(content, kind, where)
    needed = [field.name for field in fields(kind) if field.default is MISSING]
    if missing := [name for name in needed if name not in content]:
        raise ConfigError(f"{where} needs {missing[0]}:")
    recipe = content.pop("recipe")
    values = _typed_fields(content, kind, where)
    try:
        label = f"{'phase' if kind is Phase else key} {number}"
        own = _recipe_of_entry(recipe, label, first, path, above)
        return kind(recipe=own, **values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _recipe_of_entry(
    content: Any, label: str, first: Recipe, path: Path, above: tuple[Path, ...]
) -> Recipe:
    if content == "bf16":
        return Recipe(name="bf16")
    if isinstance(content, str):
        return _recipe_named(content, path, {}, above)
    if not isinstance(content, Mapping):
        raise ConfigError(f"recipe is a name, a file, bf16, or a mapping, not {content!r}")
    content = dict(content)
    if content.get("base") == "bf16":
        raise ConfigError("base: bf16 is no recipe to start from: give recipe: bf16")
    content.setdefault("name", f"{first.name} ({label})")
    return _recipe_from(content, first, path, {}, above)


def _outliers(content: Any) -> OutlierClamp | HotChannels:
    content = _mapping(content, "outliers")
    form = content.get("form", next(iter(_OUTLIERS)))
    if not isinstance(form, str) or form not in _OUTLIERS:
        raise ConfigError(f"outliers: form is {' or '.join(_OUTLIERS)}, not {form!r}")
    return _instance(_OUTLIERS[form], content, "outliers")  # type: ignore[no-any-return]


def _gemm(content: Any, where: str) -> GemmRecipe:
    content = _mapping(content, where)
    _check_keys(content, GemmRecipe, where)
    for operand in ("a", "b"):
        if content.get(operand) is not None:
            content[operand] = _quantizer(content[operand], f"{where}.{operand}")
    if content.get("hadamard") is not None:
        content["hadamard"] = _instance(Hadamard, content["hadamard"], f"{where}.hadamard")
    return GemmRecipe(**_typed_fields(content, GemmRecipe, where))


def _quantizer(content: Any, where: str) -> Quantizer:
    if isinstance(content, str):
        try:
            return get_quantizer(content)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
    content = _mapping(content, where)
    if "block" in content:
        content["block"] = tuple(_list(content["block"], f"{where}.block"))
    return _instance(Quantizer, content, where)


def _instance(cls: Any, content: Any, where: str) -> Any:
    content = _mapping(content, where)
    _check_keys(content, cls, where)
    values = _typed_fields(content, cls, where)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _typed_fields(content: Mapping[str, Any], cls: Any, where: str = "") -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {key: typed(value, hints[key], _within(where, key)) for key, value in content.items()}


def _list(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise ConfigError(f"{where} must be a list, not {content!r}")
    return content


def _mapping(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must be a mapping of keys to values, not {content!r}")
    return dict(content)


def _check_keys(
    content: Mapping[str, Any], cls: Any, where: str = "", extra: tuple[str, ...] = ()
) -> None:
    known = [f.name for f in fields(cls)]
    unknown = [key for key in content if key not in known]
    if unknown:
        listed = ", ".join([*known, *extra])
        raise ConfigError(_within(where, f"unknown key {unknown[0]!r}; known: {listed}"))


def _within(where: str, text: str) -> str:
    """`text` after the key that it is about ("wgrad.a: text"); where: "" is the whole file."""
    return f"{where}: {text}" if where else text
