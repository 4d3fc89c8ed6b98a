"""What a checkpoint was trained with against what a launch would go on with.

Both are Megatron's arguments: every checkpoint carries those of its run (launch/fp4_arguments.py).
"""

import argparse
import json
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from megatron.training import print_rank_0

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe

# What must be as it was, besides the content of the recipe, for the numbers to be the same.
_FLAGS = {
    "fp4_wgrad_fusion": "gradient accumulation fusion (off: --no-gradient-accumulation-fusion)",
    "fp4_plugin_version": "plugin version",
    "fp4_numerics_version": "numerics version",
    "fp4_seed": "--fp4-seed",
    "first_last_layers_bf16": "--first-last-layers-bf16",
    "num_layers_at_start_in_bf16": "--num-layers-at-start-in-bf16",
    "num_layers_at_end_in_bf16": "--num-layers-at-end-in-bf16",
    "micro_batch_size": "--micro-batch-size",  # moves the blocks of wgrad and the rows of noise
}
# Fields of a recipe with flags of their own, and those that change no number.
_SCHEDULE = {"bf16_after": "--fp4-bf16-after", "bf16_gemms": "--fp4-bf16-gemms"}
_WORDS = ("name", "description", "paper")  # once a recipe had a description of its own
_SHOWN = 3  # differing fields of a recipe that the line names


def compare(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    """Compares a launch with `saved`, the arguments in the checkpoint that it goes on from.

    Raises ConfigError where its FP4 numerics or its padded vocabulary are others, unless
    --fp4-load-anyway, which prints the difference. A change from or to high precision is what a
    launch says itself: it is printed.
    """
    _compare_rows(saved, launch)
    then, now = (getattr(args, "fp4_recipe_content", None) for args in (saved, launch))
    if not (then and now):
        if then or now:
            words = [_spelled(saved) if then else "no recipe", _spelled(launch) if now else "none"]
            _tell("the checkpoint was trained with {}, this launch has {}".format(*words))
        return
    differing = "; ".join(_differences(saved, launch))
    if differing and not launch.fp4_load_anyway:
        raise ConfigError(
            f"the checkpoint was trained with other numerics: {differing}; give what was, or "
            "--fp4-load-anyway to go on with what is"
        )
    if differing:
        _tell(f"goes on from other numerics: {differing}")


def _compare_rows(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    # Rows of padding take part in the softmax. torch_dist loads what fits and leaves the rest.
    then, now = (getattr(args, "padded_vocab_size", None) for args in (saved, launch))
    if None in (then, now) or then == now:
        return
    difference = f"the checkpoint's vocabulary is padded to {then} rows and this launch's to {now}"
    if not launch.fp4_load_anyway:
        raise ConfigError(
            f"{difference}: give --padded-vocab-size {then}, or --fp4-load-anyway to go on"
        )
    _tell(difference)


def _differences(saved: argparse.Namespace, launch: argparse.Namespace) -> list[str]:
    found = []
    for name, flag in _FLAGS.items():
        found += _was_and_is(flag, getattr(saved, name, None), getattr(launch, name, None))
    if any(_has_schedule(args) for args in (saved, launch)):  # in shares of training
        found += _was_and_is("--train-iters", saved.train_iters, launch.train_iters)
    # A file may change under its path, and a built-in recipe stand in a file: the content counts.
    old, new = (_fields(args.fp4_recipe_content) for args in (saved, launch))
    for name, flag in _SCHEDULE.items():
        found += _was_and_is(flag, old.pop(name, None), new.pop(name, None))
    if changed := _changed(old, new):
        found.append(f"--fp4-recipe was {_spelled(saved)} and is {_spelled(launch)} ({changed})")
    return found + _module_differences(saved, launch)


def _module_differences(saved: argparse.Namespace, launch: argparse.Namespace) -> list[str]:
    was, is_ = (getattr(args, "fp4_module_recipe", []) for args in (saved, launch))
    if not hasattr(saved, "fp4_module_contents"):  # an older checkpoint has their text alone
        return _was_and_is("--fp4-module-recipe", was, is_)
    then, now = (_modules(args) for args in (saved, launch))
    if then == now:
        return []
    # Where the texts are equal, what changed is in a file of theirs.
    changed = "; ".join(_changed(a, b) for (_, a), (_, b) in zip(then, now, strict=False))
    shown = f" ({changed})" if changed else ""
    return [f"--fp4-module-recipe was {_said(was)} and is {_said(is_)}{shown}"]


def _has_schedule(args: argparse.Namespace) -> bool:
    own = [content for _, content in getattr(args, "fp4_module_contents", [])]
    recipes = [_fields(content) for content in [args.fp4_recipe_content, *own] if content]
    return any(recipe["bf16_after"] is not None for recipe in recipes)


def _was_and_is(what: str, old: Any, new: Any) -> list[str]:
    # A flag that one of them has not got yet is as if left out.
    return [f"{what} was {_said(old)} and is {_said(new)}"] if (old or 0) != (new or 0) else []


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first fields of a recipe that are others, as one text."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        found += _was_and_is(name, old.get(name), new.get(name))
    return ", ".join(found[:_SHOWN] + ["..."] * (len(found) > _SHOWN))


def _modules(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Each --fp4-module-recipe: its glob and its recipe's fields; none of BF16."""
    given = args.fp4_module_contents
    return [(glob, _fields(content) if content else {}) for glob, content in given]


def _fields(content: str) -> dict[str, Any]:
    """A recipe's content as one level of fields: fprop.a.rule and its like."""
    return _flat(_completed(json.loads(content), Recipe))


def _completed(given: dict[str, Any], kind: Any) -> dict[str, Any]:
    """`given` with the defaults of the fields of `kind` that its version had not got yet."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        parts = (hints[field.name], *get_args(hints[field.name]))  # of X | None
        inner = next((part for part in parts if is_dataclass(part)), None)
        default: Any = field.default
        if inner and isinstance(given.get(field.name), dict):
            _completed(given[field.name], inner)
        elif field.name not in given and default is not MISSING:
            plain = asdict(default) if inner and default else default
            given[field.name] = json.loads(json.dumps(plain))  # lists for tuples
    return given


def _flat(recipe: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif prefix or name not in _WORDS:
            flat[prefix + name] = value
    return flat


def _spelled(args: argparse.Namespace) -> str:
    return " ".join([args.fp4_recipe, *args.fp4_recipe_option])


def _said(value: Any) -> str:
    if value is None or value is False or value == []:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _tell(line: str) -> None:
    print_rank_0(f"megatron-fp4: {line}")
