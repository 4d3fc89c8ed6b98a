"""Compares the numerics of a checkpoint with those of the launch that resumes from it.

Both are read from Megatron's arguments. Every checkpoint contains those of the run that saved it,
and launch/fp4_arguments.py adds the content of recipes to them.
"""

import argparse
import json
import re
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from megatron.training import print_rank_0

from megatron_fp4.arithmetic.messages import form_name
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.arguments.steps import steps_of
from megatron_fp4.mcore.checkpoints.differences import said, was_and_is
from megatron_fp4.mcore.data import vocabulary
from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes.content import fields_of

# Arguments that must not change if the results are to stay the same, besides the recipe, each with
# its name in the message.
_FLAGS = {
    "fp4_wgrad_fusion": "gradient accumulation fusion (off: --no-gradient-accumulation-fusion)",
    "fp4_plugin_version": "plugin version",
    "fp4_numerics_version": "numerics version",
    "fp4_seed": "--fp4-seed",
    "first_last_layers_bf16": "--first-last-layers-bf16",
    "num_layers_at_start_in_bf16": "--num-layers-at-start-in-bf16",
    "num_layers_at_end_in_bf16": "--num-layers-at-end-in-bf16",
    "activation_func_fp8_input_store": "--activation-func-fp8-input-store",
    "micro_batch_size": "--micro-batch-size",  # changes wgrad's blocks and tokens' random bits
}
# Methods that may come and go between runs, and what they keep of W.
_METHODS = {"weight_average": "averages", "ramping": "periods"}
# Fields of a recipe that do not affect results; older versions had `description`.
_WORDS = ("name", "description", "paper")
_SHOWN = 3  # how many differing fields of a recipe the message names


def compare(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    """Checks that a launch resumes with the numerics of its checkpoint.

    saved: the arguments in the checkpoint. launch: the arguments of the launch.

    Raises ConfigError if the FP4 numerics or the padded vocabulary differ. With --fp4-load-anyway
    the difference is printed instead. A change from a recipe to none, or the reverse, is always
    only printed, since the command line shows it; so is one to or from a recipe that is the same
    but for an average of W or for Q-Ramping (`tetrajet`, `tetrajet-ema` and `tetrajet-ramping`), a
    change of --fp4-optimizer-state, of fused kernels, which define no numerics, another
    --fp4-grad-comm of a run without a recipe, and another padding in a launch that is not checked
    (`Script.is_checked`), which upstream resumes.
    """
    _compare_rows(saved, launch)
    _compare_kernels(saved, launch)
    _compare_moments(saved, launch)
    then, now = (getattr(args, "fp4_recipe_content", None) for args in (saved, launch))
    if not (then and now):
        if then or now:
            words = [_spelled(saved) if then else "no recipe", _spelled(launch) if now else "none"]
            _tell("the checkpoint was trained with {}, this launch has {}".format(*words))
        for change in _gradients(saved, launch):
            _tell(f"gradients are sent otherwise: {change}")
        return
    differing = "; ".join(_differences(saved, launch))
    if differing and not launch.fp4_load_anyway:
        raise ConfigError(
            f"the checkpoint was trained with other numerics: {differing}; give what was, or "
            "--fp4-load-anyway to go on with what is"
        )
    if differing:
        _tell(f"goes on from other numerics: {differing}")
    _tell_of_methods(saved, launch, is_rest_equal=not differing)


def _tell_of_methods(
    saved: argparse.Namespace, launch: argparse.Namespace, is_rest_equal: bool
) -> None:
    """Prints which of _METHODS come or go. is_rest_equal: whether the numerics are else the same,
    so that other recipes of modules differ by these methods alone."""
    for field, what in _METHODS.items():
        was, is_ = (_has(_fields(args.fp4_recipe_content), field) for args in (saved, launch))
        if was != is_:
            change = f"it goes on {'without' if was else 'with'} {what} of W"
            names = _spelled(saved), _spelled(launch)
            _tell(
                "the checkpoint was trained with {}, this launch has {}: {}".format(*names, change)
            )
    contents = [getattr(args, "fp4_module_contents", []) for args in (saved, launch)]
    if contents[0] != contents[1] and is_rest_equal:
        methods = " or ".join(_METHODS.values())
        _tell(f"{_modules_were(saved, launch)}: {methods} of W come or go")


def _compare_rows(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    # Rows of padding take part in the softmax. With another number of them torch_dist would load
    # the rows that both have, without an error.
    then, now = (getattr(args, "padded_vocab_size", None) for args in (saved, launch))
    if None in (then, now) or then == now:
        return
    difference = f"the checkpoint's vocabulary is padded to {then} rows and this launch's to {now}"
    if vocabulary.is_installed() and not launch.fp4_load_anyway:
        raise ConfigError(
            f"{difference}: give --padded-vocab-size {then}, or --fp4-load-anyway to go on"
        )
    _tell(difference)


def _compare_kernels(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    # Another order of sums is no other numerics, but the run does not repeat what it was.
    then, now = (_kernels(args) for args in (saved, launch))
    if then != now:
        _tell(
            f"the checkpoint was trained with fused kernels of {then}, this launch has {now} "
            "(--fp4-fused-kernels): results differ in their last bits"
        )
    then, now = (getattr(args, "fp4_multiplier", "auto") for args in (saved, launch))
    if then != now:
        _tell(f"--fp4-multiplier was {then} and is {now}: products differ in their last bits")


def _compare_moments(saved: argparse.Namespace, launch: argparse.Namespace) -> None:
    # A checkpoint has the moments in float32, so a run may begin and end with any formats.
    then, now = (getattr(args, "fp4_optimizer_state", None) for args in (saved, launch))
    if then != now:
        rounded = ", rounded to nearest once, as they are loaded" if now else ""
        _tell(
            f"the checkpoint was trained with Adam's moments stored as {then or 'float32'}, this "
            f"launch stores them as {now or 'float32'}{rounded}"
        )


def _kernels(args: argparse.Namespace) -> str:
    liger = getattr(args, "fp4_liger", None)
    names = [f"Liger-Kernel {liger}"] * bool(liger)
    names += ["rotary embedding"] * bool(getattr(args, "fp4_rotates", False))
    names += ["torch's AdamW"] * bool(getattr(args, "fp4_fused_adamw", False))
    names += ["linears with SwiGLU"] * bool(getattr(args, "fp4_joins_swiglu", False))
    names += ["linears with RMSNorm"] * bool(getattr(args, "fp4_joins_norms", False))
    return " and ".join(names) or "none"


def _differences(saved: argparse.Namespace, launch: argparse.Namespace) -> list[str]:
    found = []
    for name, flag in _FLAGS.items():
        found += was_and_is(flag, getattr(saved, name, None), getattr(launch, name, None))
    found += _gradients(saved, launch)
    # Shares of training are numbers of steps, which depend on the number of iterations.
    if all(_has_shares(args) for args in (saved, launch)):
        length = "--train-iters"
        if launch.train_samples:
            length = "the number of steps, of --train-samples and --global-batch-size,"
        found += was_and_is(length, saved.train_iters, steps_of(launch))
    # Compare the contents of the recipes, not their names: a file may have changed, and the same
    # recipe may be built in or in a file.
    old, new = (_fields(args.fp4_recipe_content) for args in (saved, launch))
    old, new = _but_for_methods(old, new)
    if changed := _changed(old, new):
        found.append(f"--fp4-recipe was {_spelled(saved)} and is {_spelled(launch)} ({changed})")
    return found + _module_differences(saved, launch)


def _gradients(saved: argparse.Namespace, launch: argparse.Namespace) -> list[str]:
    """How gradients were and are sent between data-parallel ranks, if that differs."""
    elements = [getattr(args, "fp4_grad_comm_element", None) for args in (saved, launch)]
    forms = [element and form_name(element) for element in elements]
    return was_and_is("--fp4-grad-comm", *forms)


def _module_differences(saved: argparse.Namespace, launch: argparse.Namespace) -> list[str]:
    was, is_ = (getattr(args, "fp4_module_recipe", []) for args in (saved, launch))
    if not hasattr(saved, "fp4_module_contents"):  # older checkpoints have only the flags' text
        return was_and_is("--fp4-module-recipe", was, is_)
    then, now = (_modules(args) for args in (saved, launch))
    globs = [[glob for glob, _ in each] for each in (then, now)]
    pairs = [_but_for_methods(a, b) for (_, a), (_, b) in zip(then, now, strict=False)]
    if globs[0] == globs[1] and all(a == b for a, b in pairs):
        return []
    # If the flags are equal, a recipe file has changed. The changed fields are named.
    changed = "; ".join(_changed(a, b) for a, b in pairs)
    shown = f" ({changed})" if changed else ""
    return [f"{_modules_were(saved, launch)}{shown}"]


def _modules_were(saved: argparse.Namespace, launch: argparse.Namespace) -> str:
    """The part of a message that says which linears have recipes of their own: first in the run
    that saved the checkpoint, then in this launch."""
    both = saved, launch
    flags = [getattr(args, "fp4_module_recipe", []) for args in both]
    contents = [
        getattr(args, "fp4_module_contents", own) for args, own in zip(both, flags, strict=True)
    ]
    if list(map(len, flags)) == list(map(len, contents)):
        return "--fp4-module-recipe was {} and is {}".format(*map(said, flags))
    names = (
        [f"{glob}={fields_of(own)['name'] if own else 'bf16'}" for glob, own in each]
        for each in contents
    )
    told = map(said, names)
    return "layers of the recipe, with --fp4-module-recipe, were {} and are {}".format(*told)


def _but_for_methods(
    old: dict[str, Any], new: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both recipes without the methods of _METHODS that one of them alone has."""
    for field in _METHODS:
        if _has(old, field) != _has(new, field):
            old, new = _without(old, field), _without(new, field)
    return old, new


def _has(recipe: dict[str, Any], field: str) -> bool:
    return any(name.startswith(f"{field}.") for name in recipe)


def _without(recipe: dict[str, Any], field: str) -> dict[str, Any]:
    """The fields of a recipe without those of one method. Without an average `ema` is nearest."""
    rest = {name: value for name, value in recipe.items() if field not in name.split(".")}
    if field == "weight_average":
        for name, value in rest.items():
            if name.endswith(".b.rounding") and value == "ema":
                rest[name] = "nearest"
    return rest


def _has_shares(args: argparse.Namespace) -> bool:
    """Whether a recipe of the run has phases, or a half-life or an interval that is a share."""
    own = [content for _, content in getattr(args, "fp4_module_contents", [])]
    recipes = [_fields(content) for content in [args.fp4_recipe_content, *own] if content]
    shares = "phases.1.after", "weight_average.half_life", "ramping.interval_share"
    return any(recipe.get(name) is not None for recipe in recipes for name in shares)


def _changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The fields that differ between two recipes, at most _SHOWN of them, as text."""
    found = []
    if len(set(map(_phases, (old, new)))) > 1:  # the recipes of phases are then no pairs
        old, new = (
            {name: value for name, value in each.items() if not name.startswith("phases.")}
            | {"phases": _phases(each) or "none"}
            for each in (old, new)
        )
    for name in sorted(old.keys() | new.keys()):
        found += was_and_is(name, old.get(name), new.get(name))
    return ", ".join(found[:_SHOWN] + ["..."] * (len(found) > _SHOWN))


def _phases(recipe: dict[str, Any]) -> str:
    """When the phases of a recipe begin, as text."""
    shares = [value for name, value in recipe.items() if re.fullmatch(r"phases\.\d+\.after", name)]
    return " and ".join(f"after {share:.4g}" for share in shares)


def _modules(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """(glob, fields of its recipe) for the recipe's layers and each --fp4-module-recipe; {} for
    BF16."""
    given = args.fp4_module_contents
    return [(glob, _fields(content) if content else {}) for glob, content in given]


def _fields(content: str) -> dict[str, Any]:
    """The fields of a recipe in one flat dict, with names such as "fprop.a.rule".

    content: the recipe as JSON, from `fp4_recipe_content`.
    """
    return _flat(_completed(fields_of(content), Recipe))


def _completed(given: dict[str, Any], kind: Any) -> dict[str, Any]:
    """`given`, with defaults added for fields of the dataclass `kind` that it lacks.

    These are fields that the version that wrote the checkpoint did not have. `given` is changed in
    place.
    """
    hints = get_type_hints(kind)
    for field in fields(kind):
        parts = (hints[field.name], *get_args(hints[field.name]))  # the type X | None has parts
        inner = next((part for part in parts if is_dataclass(part)), None)
        default: Any = field.default
        if inner and isinstance(given.get(field.name), dict):
            _completed(given[field.name], inner)
        elif inner and isinstance(given.get(field.name), list):
            given[field.name] = [_completed(each, inner) for each in given[field.name]]
        elif field.name not in given and default is not MISSING:
            plain = asdict(default) if inner and default else default
            given[field.name] = json.loads(json.dumps(plain))  # turns tuples into lists
    return given


def _flat(recipe: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif name == "phases":
            for number, phase in enumerate(value, 1):
                flat |= _flat(phase, f"{prefix}{name}.{number}.")
        elif name not in _WORDS and name != "layers":  # whose recipes are in `_modules`
            flat[prefix + name] = value
    return flat


def _spelled(args: argparse.Namespace) -> str:
    words = [args.fp4_recipe, *args.fp4_recipe_option]
    if getattr(args, "fp4_bf16_after", None) is not None:
        words += ["--fp4-bf16-after", str(args.fp4_bf16_after)]
    if getattr(args, "fp4_bf16_gemms", None) is not None:
        words += ["--fp4-bf16-gemms", *args.fp4_bf16_gemms]
    return " ".join(words)


def _tell(line: str) -> None:
    print_rank_0(f"megatron-fp4: {line}")
