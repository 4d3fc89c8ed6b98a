"""Refuses what cannot have Adam's moments in few bits (--fp4-optimizer-state)."""

from argparse import Namespace
from collections.abc import Iterator, Sequence

from megatron_fp4.recipe import Recipe
from megatron_fp4.recipes.ramping import moments_refusal


def moments(args: Namespace, recipes: Sequence[Recipe]) -> Iterator[str]:
    """Refuses optimizers and methods whose state is not Adam's two moments beside FP32 weights.

    recipes: the launch's recipe, and those that --fp4-module-recipe gives to single modules. No
    refusals without --fp4-optimizer-state. `fp4_flags.NOT_WITH_A_RECIPE` refuses FSDP and
    --optimizer-cuda-graph for every recipe.
    """
    if args.fp4_optimizer_state is None:
        return
    flag = f"--fp4-optimizer-state {args.fp4_optimizer_state}"
    if args.optimizer != "adam":
        yield f"{flag} stores Adam's moments, not those of --optimizer {args.optimizer}: use adam"
    if args.use_precision_aware_optimizer:
        yield (
            f"{flag} and --use-precision-aware-optimizer both store Adam's moments in few bits: "
            "leave out one"
        )
    if args.optimizer_cpu_offload:
        yield f"{flag} keeps Adam's moments on the GPU: leave out --optimizer-cpu-offload"
    if (why := moments_refusal(recipes, flag)) is not None:
        yield why
