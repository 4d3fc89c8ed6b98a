"""Whether a launch uses Megatron's CUDA graphs (--cuda-graph-impl local), or should."""

from argparse import Namespace
from collections.abc import Iterable

from megatron_fp4.mcore.launch.refusals.cuda_graphs import captured_layers
from megatron_fp4.recipe import Recipe


def wanted(args: Namespace) -> bool:
    """Whether the launch asks for CUDA graphs: each layer is captured and replayed."""
    return bool(args.cuda_graph_impl == "local")


def advice(args: Namespace, recipes: Iterable[Recipe]) -> str | None:
    """A line that advises --cuda-graph-impl local; None where it would not help or is refused.

    It helps under tensor parallelism. There the layers are so small that the GPU waits for the host
    to launch kernels (docs/notes/host.md). Under pipeline parallelism nothing is advised: graphs
    were not timed there, and take memory for each microbatch. recipes: the launch's, and those of
    single modules.
    """
    if wanted(args) or args.tensor_model_parallel_size == 1:
        return None
    if args.pipeline_model_parallel_size > 1:
        return None
    with_graphs = {"fp4_weight_cache": None, "fp4_metrics_interval": None}  # their defaults differ
    if any(captured_layers(Namespace(**vars(args) | with_graphs), recipes)):
        return None
    return (
        "--cuda-graph-impl local may be faster: under tensor parallelism GPUs wait for their hosts"
    )
