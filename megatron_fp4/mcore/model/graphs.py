"""Megatron's CUDA graphs (--cuda-graph-impl local): each layer is captured when the first step has
ended, and replayed from then on. Python runs no more; what changes from one microbatch to the next
is read from memory.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing, is_graph_warmup

from megatron_fp4.errors import ConfigError
from megatron_fp4.recipe import Recipe

FLAG = "--cuda-graph-impl"
_SET_TO_0 = ", or set it to 0 (Megatron's default is 0.1)"


def captures() -> bool:
    """Whether a layer that runs now is to be captured, or warmed up for that."""
    return bool(is_graph_capturing())


def warms_up() -> bool:
    """Whether it runs on anything that lies in memory, and for nothing."""
    return bool(is_graph_warmup())


def wanted(args: argparse.Namespace) -> bool:
    return bool(args.cuda_graph_impl == "local")


def release() -> None:
    """Before process groups are destroyed: NCCL waits, without end, for graphs that captured it to
    be gone, and Megatron keeps its graphs."""
    for graph in [found for found in gc.get_objects() if type(found) is torch.cuda.CUDAGraph]:
        graph.reset()


def advice(args: argparse.Namespace, recipes: Iterable[Recipe]) -> str | None:
    """For a launch that could have graphs and may want them: tensor parallelism makes layers so
    small that a GPU waits for its host to start them (docs/notes/host.md)."""
    if wanted(args) or args.tensor_model_parallel_size == 1:
        return None
    try:
        check(argparse.Namespace(**vars(args) | {"fp4_weight_cache": None}), recipes)
    except ConfigError:
        return None
    return f"{FLAG} local may be faster: under tensor parallelism GPUs wait for their hosts"


class Clock:
    """Step and microbatch, where graphs read them."""

    def __init__(self, device: torch.device) -> None:
        # Kernels are compiled for tensors that begin at multiples of 16 bytes.
        words = torch.zeros(2, 2, dtype=torch.int64, device=device)
        self.step, self.microbatch = words[:, 0]

    def set(self, step: int, microbatch: int) -> None:
        """For what starts from now on, without waiting for what runs: forward and backward of one
        microbatch, since no pipeline has others under way."""
        self.step.fill_(step)
        self.microbatch.fill_(microbatch)


def check(args: argparse.Namespace, recipes: Iterable[Recipe]) -> None:
    """Raises ConfigError for what would change after the capture, or is not known then. args: of a
    launch with graphs."""
    problems = {
        "a recipe whose GEMMs return to BF16": any(r.bf16_after is not None for r in recipes),
        # C/pipeline_parallel/schedules.py would free what a captured layer gives out, and asserts
        # that it is no view.
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size > 1,
        "--num-experts": args.num_experts,
        "--mtp-num-layers": args.mtp_num_layers,
        # C/transformer/cuda_graphs.py replays in evaluation what training captured, and
        # C/tensor_parallel/random.py:checkpoint recomputes nothing in a graph.
        "--hidden-dropout": args.hidden_dropout,
        "--attention-dropout": args.attention_dropout,
        "--recompute-granularity": args.recompute_granularity,
        # Hooks on modules, which a graph does not run.
        "--save-activations-interval": args.save_activations_interval,
        "--save-dgrads-interval": args.save_dgrads_interval,
        "--inference-cuda-graph-scope block": "block" in str(args.inference_cuda_graph_scope),
        "--fp4-eval-forward bf16": args.fp4_eval_forward == "bf16",
        f"--fp4-weight-cache {args.fp4_weight_cache}": args.fp4_weight_cache not in (None, "off"),
        "--eval-micro-batch-size": (
            args.eval_micro_batch_size not in (None, args.micro_batch_size)
        ),
    }
    for what, is_there in problems.items():
        if is_there:
            raise ConfigError(
                f"{FLAG} local replays each layer as training captured it, which does not go with "
                f"{what}: leave out one of them{_SET_TO_0 if 'dropout' in what else ''}"
            )
