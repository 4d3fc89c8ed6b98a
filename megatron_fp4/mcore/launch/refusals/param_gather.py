"""Refuses what --fp4-param-gather cannot be combined with."""

from argparse import Namespace
from collections.abc import Iterator, Sequence

from megatron_fp4.plan.owned_codes import refusal
from megatron_fp4.recipe import Recipe


def gathered_codes(args: Namespace, recipes: Sequence[Recipe]) -> Iterator[str]:
    """Refuses recipes and flags with which weights cannot be gathered as codes.

    recipes: the launch's recipe, and those that --fp4-module-recipe gives to single modules. No
    refusals without --fp4-param-gather.
    """
    if not (args.fp4_param_gather or args.fp4_gathers_codes):
        return
    if (why := refusal(recipes, "--fp4-param-gather")) is not None:
        yield why
    if not args.use_distributed_optimizer:
        yield (
            "--fp4-param-gather gathers weights from the ranks that own them: add "
            "--use-distributed-optimizer"
        )
    if not args.bf16:
        yield "--fp4-param-gather replaces weights in BF16: add --bf16"
    problems = {
        # Megatron's layer-wise optimizers, which give whole weights to single ranks.
        f"--optimizer {args.optimizer}": args.optimizer not in ("adam", "sgd"),
        "--overlap-param-gather-with-optimizer-step": args.overlap_param_gather_with_optimizer_step,
        "--num-distributed-optimizer-instances": args.num_distributed_optimizer_instances > 1,
        # These read or write weights that other ranks own.
        "--qk-clip": args.qk_clip,
        "--save-params-interval": args.save_params_interval,
        "--perform-rl-step": args.perform_rl_step,
        "--fp4-metrics-interval": args.fp4_metrics_interval,
        # Copies weights back from the host on a stream of its own. Not tried: it needs a GPU.
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
    }
    for flag, is_there in problems.items():
        if is_there:
            yield f"--fp4-param-gather does not support {flag}: leave out one of the two"
