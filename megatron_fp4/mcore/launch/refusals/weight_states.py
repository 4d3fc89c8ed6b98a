"""Refuses what cannot keep or update the state beside weights that recipes ask for."""

from argparse import Namespace
from collections.abc import Iterator, Sequence

from megatron_fp4.mcore.arguments.steps import steps_of
from megatron_fp4.mcore.launch.refusals.optimizer import is_layer_wise
from megatron_fp4.recipe import Recipe


def keepers(args: Namespace, recipes: Sequence[Recipe]) -> Iterator[str]:
    """Refuses optimizers and checkpoint formats that cannot keep the state that a recipe asks for.

    recipes: the launch's recipe, and those that --fp4-module-recipe gives to single modules. No
    refusals if none of them has `Recipe.kept_dtypes`.
    """
    recipe = next((recipe for recipe in recipes if recipe.kept_dtypes), None)
    if recipe is None:
        return
    sharded = args.use_distributed_optimizer
    problems = {
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--optimizer dist_muon": args.optimizer == "dist_muon",
        f"--use-distributed-optimizer with --optimizer {args.optimizer}": is_layer_wise(args),
        "--ckpt-format torch and --use-distributed-optimizer": sharded
        and args.ckpt_format == "torch",
    }
    what = "periods" if recipe.ramping is not None else "an average"
    for flags, is_there in problems.items():
        if is_there:
            yield (
                f"recipe {recipe.name} keeps {what} beside the weights, which {flags} cannot keep: "
                "leave it out"
            )


def ramping(args: Namespace, recipes: Sequence[Recipe]) -> Iterator[str]:
    """Refuses what Q-Ramping's step or its calibrations cannot be combined with.

    recipes: as for `keepers`. No refusals if none of them has `Recipe.ramping`, but for a flag that
    then has no effect. Raises ConfigError if the interval of calibrations is too short.
    """
    ramped = [recipe for recipe in recipes if recipe.ramping is not None]
    if not ramped:
        if args.fp4_offload_calibration:
            yield "--fp4-offload-calibration needs a recipe with ramping: leave it out"
        return
    first = ramped[0]
    steps = steps_of(args)
    if steps and first.ramping is not None:
        first.ramping.interval_in(steps)
    for other in recipes:
        if other.ramping not in (None, first.ramping):
            yield (
                f"recipes {first.name} and {other.name} calibrate in different ways: give all "
                "recipes of a launch the same ramping options"
            )
        if other.weight_average is not None:
            yield (
                f"recipe {first.name} calibrates, which the average of recipe {other.name} does "
                "not support: choose one of the two methods"
            )
    problems = {
        f"--optimizer {args.optimizer}": args.optimizer != "adam",
        "--dataloader-type external": args.dataloader_type == "external",  # cannot be read twice
        "--hybrid-context-parallel": args.hybrid_context_parallel,  # wraps the data in the loop
        "--qk-clip": args.qk_clip,  # the model's weights are then not the main weights, rounded
        "--enable-ft-package": args.enable_ft_package,  # a step may take no longer than others
    }
    for flags, is_there in problems.items():
        if is_there:
            yield (
                f"recipe {first.name} takes steps of AdamW ahead and undoes them, which {flags} "
                "does not support: leave it out"
            )
