"""Refuses flags and recipes that cannot be combined with Megatron's CUDA graphs.

These are the graphs of --cuda-graph-impl local. C stands for megatron/core.
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator

from megatron_fp4.recipe import Recipe

_SET_TO_0 = ", or set it to 0 (Megatron's default is 0.1)"


def captured_layers(args: Namespace, recipes: Iterable[Recipe]) -> Iterator[str]:
    """Refuses everything that would need a layer to run differently from how it was captured.

    args: the arguments of a launch with CUDA graphs. recipes: the launch's recipe, and those that
    --fp4-module-recipe gives to single modules.
    """
    problems = {
        "a recipe whose GEMMs return to BF16": any(r.bf16_after is not None for r in recipes),
        "--num-experts": args.num_experts,
        "--mtp-num-layers": args.mtp_num_layers,
        # C/transformer/cuda_graphs.py replays the graphs of training in evaluation too, where there
        # must be no dropout. C/tensor_parallel/random.py:checkpoint does not recompute in a graph.
        "--hidden-dropout": args.hidden_dropout,
        "--attention-dropout": args.attention_dropout,
        "--recompute-granularity": args.recompute_granularity,
        # These need hooks on modules, which a replay does not call.
        "--save-activations-interval": args.save_activations_interval,
        "--save-dgrads-interval": args.save_dgrads_interval,
        "--inference-cuda-graph-scope block": "block" in str(args.inference_cuda_graph_scope),
        "--fp4-eval-forward bf16": args.fp4_eval_forward == "bf16",
        # Its operands are seen by Python code, which a replay does not run.
        f"--fp4-metrics-interval {args.fp4_metrics_interval}": args.fp4_metrics_interval,
        f"--fp4-weight-cache {args.fp4_weight_cache}": args.fp4_weight_cache not in (None, "off"),
        "--eval-micro-batch-size": (
            args.eval_micro_batch_size not in (None, args.micro_batch_size)
        ),
    }
    for what, is_there in problems.items():
        if is_there:
            yield (
                "--cuda-graph-impl local replays each layer as training captured it, which does "
                f"not go with {what}: leave out one of them{_SET_TO_0 if 'dropout' in what else ''}"
            )
