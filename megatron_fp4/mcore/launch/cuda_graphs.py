"""Megatron's CUDA graphs (--cuda-graph-impl local): whether a launch asks for them, or should."""

from argparse import Namespace
from collections.abc import Iterable

from megatron_fp4.mcore.launch.refusals.cuda_graphs import captured_layers
from megatron_fp4.recipe import Recipe


def wanted(args: Namespace) -> bool:
    """Whether each layer is to be captured and replayed."""
    return bool(args.cuda_graph_impl == "local")


def advice(args: Namespace, recipes: Iterable[Recipe]) -> str | None:
    """For a launch that could have graphs and may want them: tensor parallelism makes layers so
    small that a GPU waits for its host to start them (docs/notes/host.md)."""
    if wanted(args) or args.tensor_model_parallel_size == 1:
        return None
    if any(captured_layers(Namespace(**vars(args) | {"fp4_weight_cache": None}), recipes)):
        return None
    return (
        "--cuda-graph-impl local may be faster: under tensor parallelism GPUs wait for their hosts"
    )
