"""Whether a launch uses Megatron's CUDA graphs (--cuda-graph-impl local), or should."""

from argparse import Namespace
from collections.abc import Iterable

from megatron_fp4.mcore.launch.refusals.cuda_graphs import captured_layers
from megatron_fp4.recipe import Recipe


def wanted(args: Namespace) -> bool:
    """Whether the launch asks for CUDA graphs: each layer is captured and replayed."""
    return bool(args.cuda_graph_impl == "local")


def advice(args: Namespace, recipes: Iterable[Recipe], in_python: bool) -> str | None:
    """A line that advises --cuda-graph-impl local; None where it would not help or is refused.

    It helps where layers are so small that the GPU waits for the host to launch kernels, and for
    other ranks' hosts in collectives: where tensor parallelism, with pipeline parallelism or
    without, divides the model by more than two, and by two where linears run in Python. Under
    pipeline parallelism alone it does not help (docs/notes/host.md).
    recipes: the launch's, and those of single modules. in_python: whether linears run in Python.
    """
    tensor = args.tensor_model_parallel_size
    most = 1 if in_python else 2  # ranks whose hosts keep up without graphs
    if wanted(args) or tensor == 1 or tensor * args.pipeline_model_parallel_size <= most:
        return None
    with_graphs = {"fp4_weight_cache": None, "fp4_metrics_interval": None}  # their defaults differ
    if any(captured_layers(Namespace(**vars(args) | with_graphs), recipes)):
        return None
    return (
        "--cuda-graph-impl local may be faster: under tensor parallelism GPUs wait for their hosts"
    )
