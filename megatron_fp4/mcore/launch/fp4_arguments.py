"""The recipes that the FP4 flags ask for, and the FP4 arguments that are saved in checkpoints."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron.core.datasets.object_storage_utils import is_object_storage_path

import megatron_fp4
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from megatron_fp4.arithmetic.messages import element_of
from megatron_fp4.arithmetic.moments import Moments
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import cuda_graphs
from megatron_fp4.mcore.launch.refusals import fp4_flags, gradients, optimizer_state
from megatron_fp4.mcore.launch.refusals.cuda_graphs import captured_layers
from megatron_fp4.mcore.launch.refusals.param_gather import gathered_codes
from megatron_fp4.mcore.launch.refusals.table import refuse
from megatron_fp4.mcore.launch.refusals.weight_states import keepers, ramping
from megatron_fp4.recipe import GEMMS, Phase, Recipe
from megatron_fp4.recipes import content, get_recipe, read_options
from megatron_fp4.recipes.assignment import recipes_of_layers

OFF = ("off", "bf16")  # values of --fp4-recipe that mean no recipe
METRICS_INTERVAL = 100  # the default


def has_recipe(args: argparse.Namespace) -> bool:
    """Whether the launch has a recipe of this package. It has none with --fp4-format, which is
    Megatron's own FP4."""
    return args.fp4 is None and args.fp4_recipe not in (None, *OFF)


def settle(args: argparse.Namespace) -> None:
    """Replaces the FP4 values in parsed arguments by the values that are in force.

    Sets the defaults that depend on other flags, and adds the arguments that checkpoints record:
    versions and the content of recipes. Raises ConfigError for flags that contradict each other.
    """
    if args.fp4_recipe in OFF:
        args.fp4_recipe = None
    if args.fp4 is not None:
        # --fp4-format: upstream's FP4, in Transformer Engine. nvfp4 is upstream's default recipe.
        args.fp4_recipe = args.fp4_recipe or "nvfp4"
    if args.fp4_optimizer_state is not None:
        args.fp4_optimizer_state = str(_moments(args))
    refuse(fp4_flags.upstreams(args))
    recipe = recipe_of(args)
    if recipe is None:
        refuse(fp4_flags.without_recipe(args))
    args.fp4_grad_comm_element = element_of(args.fp4_grad_comm, args.fp4_grad_comm_element)
    refuse(gradients.exchange(args))
    # Megatron saves all arguments in every checkpoint, so the recipe, its options, the seed and the
    # following are saved. checkpoints/compare_numerics.py compares them when loading.
    args.fp4_plugin_version = megatron_fp4.__version__
    args.fp4_numerics_version = NUMERICS_VERSION
    args.fp4_recipe_content = recipe and content.write(recipe)
    modules = [] if recipe is None else module_recipes(args)
    args.fp4_module_contents = [(glob, own and content.write(own)) for glob, own in modules]
    if args.fp4_weight_cache is None:
        args.fp4_weight_cache = "off" if cuda_graphs.wanted(args) else "packed"
    if recipe is not None and args.fp4_param_gather:
        # Megatron would demand --fp4-format for it, and hand the weights to Transformer Engine.
        args.fp4_gathers_codes, args.fp4_param_gather = True, False
    if args.fp4_seed is None:
        args.fp4_seed = args.seed
    refuse(fp4_flags.seed(args))


def settle_layers_in_bf16(args: argparse.Namespace) -> None:
    """Sets Megatron's default, 1, for the numbers of layers at start and end to keep in BF16.

    Only for flags that were not given. The parser's default for them is None, so that
    `fp4_flags.layers_in_bf16` can tell whether they were given.
    """
    for name in fp4_flags.LAYERS_IN_BF16:
        if getattr(args, name) is None:
            setattr(args, name, 1)


def metrics_interval(args: argparse.Namespace) -> int:
    """The value of --fp4-metrics-interval that is in force. args: with the script's defaults."""
    if args.fp4_metrics_interval is not None:
        return int(args.fp4_metrics_interval)
    writes = has_recipe(args) and metrics_folder(args) is not None
    excludes = cuda_graphs.wanted(args) or args.fp4_gathers_codes
    return METRICS_INTERVAL if writes and not excludes else 0


def metrics_folder(args: argparse.Namespace) -> str | None:
    """The folder of metrics.jsonl: that of --save, or else of --tensorboard-dir; None where neither
    is given, or is a folder that files can be appended in."""
    named = (args.save, args.tensorboard_dir)
    return next((path for path in named if path and not is_object_storage_path(path)), None)


def recipe_of(args: argparse.Namespace) -> Recipe | None:
    """The launch's recipe with its options and phases; None if the linears follow no recipe.

    None too with --fp4-format, where Transformer Engine's linears do FP4. Raises ConfigError if the
    recipe is unknown or invalid, and if another argument, which may come from a checkpoint, cannot
    be combined with it.
    """
    if not has_recipe(args):
        return None
    recipe = _with_phase(get_recipe(args.fp4_recipe, **read_options(args.fp4_recipe_option)), args)
    refuse(fp4_flags.with_recipe(args, recipe))
    recipes = [recipe, *(own for _, own in module_recipes(args) if own is not None)]
    refuse(keepers(args, recipes))
    refuse(ramping(args, recipes))
    refuse(gathered_codes(args, recipes))
    refuse(optimizer_state.moments(args, recipes))
    if cuda_graphs.wanted(args):
        refuse(captured_layers(args, recipes))
    return recipe


def module_recipes(args: argparse.Namespace) -> list[tuple[str, Recipe | None]]:
    """(glob for global module names, recipe or None for BF16) for the layers that the launch's
    recipe gives recipes of their own, then for each --fp4-module-recipe.

    Raises ConfigError for a value that is not GLOB=RECIPE, for an unknown or invalid recipe, and
    for more layers than the model has.
    """
    recipe = get_recipe(args.fp4_recipe, **read_options(args.fp4_recipe_option))
    found = recipes_of_layers(recipe, args.num_layers)
    for given in args.fp4_module_recipe:
        glob, equals, entry = given.partition("=")
        name, *pairs = entry.split(",")
        if not (glob and equals and name):
            raise ConfigError(f"--fp4-module-recipe takes GLOB=RECIPE or GLOB=bf16, not {given!r}")
        if name == "bf16" and pairs:
            raise ConfigError(f"--fp4-module-recipe {given}: bf16 takes no options")
        chosen = None if name == "bf16" else get_recipe(name, **read_options(pairs))
        if chosen is not None and chosen.layers:
            raise ConfigError(
                f"--fp4-module-recipe {given}: recipe {name} has layers with recipes of their own: "
                "give one without"
            )
        found.append((glob, chosen))
    return [(glob, own and _with_phase(own, args)) for glob, own in found]


def _moments(args: argparse.Namespace) -> Moments:
    """How Adam's moments are stored, of --fp4-optimizer-state; raises ConfigError for its value."""
    try:
        return Moments.read(args.fp4_optimizer_state)
    except ConfigError as error:
        raise ConfigError(f"--fp4-optimizer-state: {error}") from error


def _with_phase(recipe: Recipe, args: argparse.Namespace) -> Recipe:
    """`recipe` with the phase of --fp4-bf16-after and --fp4-bf16-gemms, if they are given."""
    if recipe.phases and (args.fp4_bf16_after, args.fp4_bf16_gemms) != (None, None):
        raise ConfigError(
            f"recipe {recipe.name} has phases of its own: add BF16 to them, and leave out "
            "--fp4-bf16-after and --fp4-bf16-gemms"
        )
    if args.fp4_bf16_after is None:
        return recipe
    if not 0 <= args.fp4_bf16_after <= 1:
        raise ConfigError(
            f"--fp4-bf16-after {args.fp4_bf16_after:g}: give a share of training in [0, 1]"
        )
    gemms = args.fp4_bf16_gemms or GEMMS
    if recipe.ramping is not None and "fprop" in gemms:
        raise ConfigError(
            f"recipe {recipe.name} has ramping, which needs fprop in FP4: add --fp4-bf16-gemms "
            "dgrad wgrad"
        )
    late = recipe.without(gemms)
    return replace(recipe, phases=(Phase(args.fp4_bf16_after, late),))
