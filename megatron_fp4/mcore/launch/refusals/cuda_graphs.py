"""Refuses flags and recipes that cannot be combined with Megatron's CUDA graphs.

These are the graphs of --cuda-graph-impl local. C stands for megatron/core.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator

from megatron_fp4.recipe import Recipe
from megatron_fp4.setting import holds, keeps_w_of

_REPLAYS = "--cuda-graph-impl local replays each layer as training captured it, which does not go"


def captured_layers(args: Namespace, recipes: Iterable[Recipe]) -> Iterator[str]:
    """Refuses everything that would need a layer to run differently from how it was captured.

    args: the arguments of a launch with CUDA graphs. recipes: the launch's recipe, and those that
    --fp4-module-recipe gives to single modules.
    """
    yield from _recomputation(args)
    yield from _experts(args)
    yield from _microbatches(args)
    # Evaluation keeps the mean of X, but C/transformer/cuda_graphs.py replays training's graphs.
    in_turn = (each for recipe in recipes for each in recipe.in_turn)
    mean = next((each.name for each in in_turn if each.x_mean == "subtracted"), "")
    problems = {
        f"x_mean: subtracted of recipe {mean}, which acts in training alone": mean,
        "--mtp-num-layers": args.mtp_num_layers,
        # These need hooks on modules, which a replay does not call.
        "--save-activations-interval": args.save_activations_interval,
        "--save-dgrads-interval": args.save_dgrads_interval,
        "--inference-cuda-graph-scope block": "block" in str(args.inference_cuda_graph_scope),
        "--fp4-eval-forward bf16": args.fp4_eval_forward == "bf16",
        # Its operands are seen by Python code, which a replay does not run.
        f"--fp4-metrics-interval {args.fp4_metrics_interval}": args.fp4_metrics_interval,
        f"--fp4-weight-cache {args.fp4_weight_cache}": holds(keeps_w_of(args.fp4_weight_cache)),
        "--eval-micro-batch-size": (
            args.eval_micro_batch_size not in (None, args.micro_batch_size)
        ),
    }
    # Evaluation replays the graphs of training, and must have no dropout.
    if args.hidden_dropout or args.attention_dropout:
        yield (
            f"{_REPLAYS} with dropout: give --attention-dropout 0 --hidden-dropout 0, since "
            "Megatron's default is 0.1"
        )
    for what, is_there in problems.items():
        if is_there:
            yield f"{_REPLAYS} with {what}: leave out one of them"


def _recomputation(args: Namespace) -> Iterator[str]:
    """Refuses recomputation, which a launch in BF16 does not get with these graphs either.

    C/transformer/transformer_config.py asserts that it is not full. A module that
    C/tensor_parallel/random.py:checkpoint would recompute, such as core_attn, is captured as if it
    were not to be recomputed. CheckpointWithoutOutput, which recomputes norms, is captured, but
    C/transformer/cuda_graphs.py:get_connected_params does not find the weights in it, whose
    gradients are then lost.
    """
    if args.recompute_granularity:
        yield (
            "--cuda-graph-impl local captures layers without recomputation (Megatron 0.19), which "
            "--recompute-granularity asks for: leave out one of them"
        )


def _experts(args: Namespace) -> Iterator[str]:
    if args.num_experts and not args.moe_pad_expert_input_to_capacity:
        yield (
            "--cuda-graph-impl local needs experts that always get the same number of tokens, and "
            "with --num-experts the router decides it: leave out one of them, or add "
            "--moe-pad-expert-input-to-capacity and --moe-expert-capacity-factor"
        )


def _microbatches(args: Namespace) -> Iterator[str]:
    """Refuses another number of microbatches in some passes, under pipeline parallelism.

    There each microbatch of the first step has graphs of its own, which share memory as long as
    they run in the order in which they were captured.
    """
    if args.pipeline_model_parallel_size == 1:
        return
    for flag, is_there in (
        ("--step-batch-size-schedule", args.step_batch_size_schedule),
        (
            "--eval-global-batch-size",
            args.eval_global_batch_size not in (None, args.global_batch_size),
        ),
    ):
        if is_there:
            yield (
                "--cuda-graph-impl local captures each microbatch of a step under pipeline "
                f"parallelism, and {flag} changes their number: leave out one of them"
            )
