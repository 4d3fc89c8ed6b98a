"""Fixes for Megatron-core 0.19's CUDA graphs (--cuda-graph-impl local) under pipeline parallelism.

C stands for megatron/core. With or without a recipe upstream's fails there in three places:

- C/pipeline_parallel/schedules.py frees the output of a stage after it was sent
  (deallocate_output_tensor). It asserts that the output is no view, and while layers are recorded
  the output of the last layer is one.
- A replay returns the tensor that all replays write to, and freeing it would free its memory.
- C/transformer/cuda_graphs.py counts in how many graphs a tensor is an input, and asserts that all
  of them are captured before any backward pass is. Rotary embeddings are one tensor for all
  microbatches, and the backward pass of the first comes before the forward pass of the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.transformer.cuda_graphs import _CudaGraphRunner
from megatron.core.utils import MakeViewlessTensor
from torch import Tensor

from megatron_fp4.mcore.runtime.wrapping import wrap_once


def install() -> None:
    """Applies the fixes. Idempotent."""
    wrap_once(_CudaGraphRunner, "record_graph_capture", _recording)
    wrap_once(_CudaGraphRunner, "replay_graph_capture", _replaying)


def _recording(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def record_graph_capture(runner: Any, args: Any, kwargs: Any) -> Any:
        if runner.is_first_layer:
            _forget_uses(runner.get_tensors(args, kwargs))
        return _sendable(runner, upstream(runner, args, kwargs))

    return record_graph_capture


def _replaying(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def replay_graph_capture(runner: Any, *others: Any) -> Any:
        return _sendable(runner, upstream(runner, *others), runner.fwd_graph_output_surface)

    return replay_graph_capture


def _sendable(runner: Any, outputs: Any, static: Iterable[Tensor] = ()) -> Any:
    """The outputs of a layer, so that a schedule may free those of a stage.

    A view, or a tensor that replays write to, becomes a tensor of its own with the same memory and
    the same place in autograd's graph. Other tensors stay as they are, as do those of layers that
    are not the last. static: the tensors that replays of the layer write to.
    """
    if not (runner.is_last_layer and runner.deallocate_pipeline_outputs):
        return outputs

    def own(output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        if output._base is None and not any(output is each for each in static):
            return output
        return MakeViewlessTensor.apply(output, output.requires_grad)

    return own(outputs) if isinstance(outputs, Tensor) else tuple(map(own, outputs))


def _forget_uses(inputs: Iterable[Tensor]) -> None:
    """Makes the uses of a microbatch's inputs count for this microbatch alone.

    inputs: those of the stage's first layer. Uses of what another graph computed are kept: they
    are of this microbatch.
    """
    for tensor in inputs:
        part: Tensor | None = tensor
        while part is not None:
            uses = getattr(part, "cg_buffer_metadata", None)
            if uses is not None and not uses.is_cudagraph_output:
                del part.cg_buffer_metadata  # type: ignore[attr-defined]
            part = part._base
