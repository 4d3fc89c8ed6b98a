"""Refuses what an exchange of gradients in few bits (--fp4-grad-comm) cannot be combined with."""

from argparse import Namespace
from collections.abc import Iterator

from megatron_fp4.mcore.launch.refusals.optimizer import is_layer_wise


def exchange(args: Namespace) -> Iterator[str]:
    """Refuses flags that change how Megatron sums gradients, or which it sums."""
    if args.fp4_grad_comm is None:
        return
    for flag, (is_there, remedy) in _problems(args).items():
        if is_there:
            yield f"--fp4-grad-comm does not support {flag}: {remedy}"


def _problems(args: Namespace) -> dict[str, tuple[bool, str]]:
    """By what is not supported: whether the launch has it, and what to do instead."""
    out, one = "leave it out", "leave out one of the two"
    return {
        "--ddp-average-in-collective": (
            args.ddp_average_in_collective,
            f"{out}, gradients are scaled before they are sent",
        ),
        "--ddp-reduce-scatter-with-fp32-accumulation": (
            args.ddp_reduce_scatter_with_fp32_accumulation,
            f"{out}, gradients are summed in float32 in any case",
        ),
        "--num-distributed-optimizer-instances": (
            args.num_distributed_optimizer_instances > 1,
            f"{out}, all data-parallel ranks are one instance",
        ),
        "--use-torch-fsdp2": (args.use_torch_fsdp2, "use --use-distributed-optimizer"),
        "--use-megatron-fsdp": (args.use_megatron_fsdp, "use --use-distributed-optimizer"),
        f"--use-distributed-optimizer with --optimizer {args.optimizer}": (
            is_layer_wise(args),
            "leave out --use-distributed-optimizer",
        ),
        "--optimizer dist_muon": (args.optimizer == "dist_muon", "use --optimizer muon"),
        f"--cuda-graph-impl {args.cuda_graph_impl}": (
            args.cuda_graph_impl not in ("none", "local"),
            "use --cuda-graph-impl local, which captures layers",
        ),
        "--external-cuda-graph": (args.external_cuda_graph, "use --cuda-graph-impl local"),
        "--cuda-graph-modules full_iteration": (
            "full_iteration" in map(str, args.cuda_graph_modules or ()),
            f"{out}, whole layers are captured",
        ),
        "--cuda-graph-scope full_iteration": (
            "full_iteration" in map(str, args.cuda_graph_scope_deprecated or ()),
            f"{out}, whole layers are captured",
        ),
        "--tensor-parallel-num-weight-shards": (
            (args.tensor_parallel_num_weight_shards or 1) > args.tensor_model_parallel_size,
            "use --tensor-model-parallel-size",
        ),
        "--expert-tensor-parallel-num-weight-shards": (
            (args.expert_tensor_parallel_num_weight_shards or 1)
            > (args.expert_tensor_parallel_size or args.tensor_model_parallel_size),
            "use --expert-tensor-parallel-size",
        ),
        "--reuse-grad-buf-for-mxfp8-param-ag": (args.reuse_grad_buf_for_mxfp8_param_ag, out),
        "--fp8-param-gather": (args.fp8_param_gather, out),
        "--fp4-format with --fp4-param-gather": (
            args.fp4 is not None and args.fp4_param_gather,
            "leave out --fp4-param-gather",
        ),
        # Not tried: both need a GPU.
        "--context-parallel-size": (args.context_parallel_size > 1, one),
        "--optimizer-cpu-offload": (args.optimizer_cpu_offload, one),
        "--fake-process-group": (args.fake_process_group, f"{out}, it sends nothing"),
    }
