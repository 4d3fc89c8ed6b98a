"""Refuses optimizers and checkpoint formats that cannot keep the state beside weights."""

from argparse import Namespace
from collections.abc import Iterable, Iterator

from megatron_fp4.recipe import Recipe


def keepers(args: Namespace, recipes: Iterable[Recipe]) -> Iterator[str]:
    """Refuses optimizers and checkpoint formats that cannot keep the state that a recipe asks for.

    recipes: the launch's recipe, and those that --fp4-module-recipe gives to single modules. No
    refusals if none of them has `Recipe.weight_states`.
    """
    recipe = next((recipe for recipe in recipes if recipe.weight_states), None)
    if recipe is None:
        return
    sharded = args.use_distributed_optimizer
    # Megatron's layer-wise optimizer, which gives whole weights to single ranks.
    layer_wise = sharded and args.optimizer not in ("adam", "sgd")
    problems = {
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--optimizer dist_muon": args.optimizer == "dist_muon",
        f"--use-distributed-optimizer with --optimizer {args.optimizer}": layer_wise,
        "--ckpt-format torch and --use-distributed-optimizer": sharded
        and args.ckpt_format == "torch",
    }
    for what, is_there in problems.items():
        if is_there:
            yield (
                f"recipe {recipe.name} keeps {' and '.join(recipe.weight_states)} beside the "
                f"weights, which {what} cannot keep: leave it out"
            )
