"""Captures layers again when a phase of a recipe begins (--cuda-graph-impl local).

A CUDA graph repeats the recipe with which its layer was captured. Before the first microbatch of a
phase all graphs are dropped, and their memory is given back. In this step the layers run without
graphs, as in the first step of a training, and at its end Megatron captures them.

C stands for megatron/core. Upstream's own C/transformer/cuda_graphs.py:delete_cuda_graphs (0.19)
does not do it:

- It resets only the layers that wait for a capture, and after a capture none does. Without pipeline
  parallelism layers run without graphs from then on. With it new graphs are captured, but the old
  ones are replayed.
- It leaves the graphs' memory reserved. With each input that is allocated in the pool of the graphs
  (alloc_tensor_from_graph_mempool) torch counts one more use of the pool, which upstream never
  takes back, and torch frees no pool that is in use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord
from megatron.core.transformer.module import MegatronModule

from megatron_fp4.mcore.model.run import Run
from megatron_fp4.mcore.runtime.wrapping import wrap_once

_inputs_in_pool = 0  # since graphs were last dropped; torch counts each as a use of the pool


def install(run: Run, model: Sequence[MegatronModule]) -> None:
    """Makes `run` drop the graphs of all layers of `model` when a phase of a recipe begins.

    model: the chunks of this rank, before any of their layers is captured.
    """
    wrap_once(cuda_graphs, "alloc_tensor_from_graph_mempool", _counting)
    modules = [module for chunk in model for module in chunk.modules()]
    managers = [module for module in modules if isinstance(module, CudaGraphManager)]
    # Megatron made this stream the current one when it built the layers. What runs on the default
    # stream before a capture can prevent it, so layers run on this one until they are captured.
    run.drop_graphs = functools.partial(_drop, managers, torch.cuda.current_stream())


def _counting(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def alloc_tensor_from_graph_mempool(meta: Any) -> Any:
        global _inputs_in_pool
        _inputs_in_pool += 1
        return upstream(meta)

    return alloc_tensor_from_graph_mempool


def _drop(managers: Sequence[CudaGraphManager], stream: torch.cuda.Stream) -> None:
    """Frees all graphs of this rank, so that its layers run without graphs until the end of the
    next step that trains, when they are captured.

    managers: Megatron's managers of CUDA graphs, one for each layer. stream: the CUDA stream on
    which layers run until they are captured.
    """
    if not _CudagraphGlobalRecord.cudagraph_created:
        return
    torch.cuda.synchronize()
    for manager in managers:
        for runner in manager.cudagraph_runners:
            _free(runner)
        manager.cudagraph_runners.clear()  # a layer makes new runners while no graphs exist
    _release_pool()
    torch._C._cuda_clearCublasWorkspaces()  # captures allocated some in the pool
    cuda_graphs.delete_cuda_graphs()  # Megatron's record of graphs; gives unused memory back
    # As when the layers were built. The observer sees which tensors are saved for backward.
    CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
    _CudagraphGlobalRecord._enable_saved_tensors_observer()
    torch.cuda.set_stream(stream)


def _free(runner: Any) -> None:
    """Frees the graphs of a runner, and the tensors that they read and write.

    The runner cannot be used any more. It may stay alive: the output of its last replay belongs to
    it, and autograd's record of this output refers to the runner. Python's garbage collector does
    not see all of such a cycle.
    """
    for graph in filter(None, (runner.fwd_graph, runner.bwd_graph)):
        graph.reset()
    vars(runner).clear()


def _release_pool() -> None:
    """Lets torch free the memory pool of the graphs, which it does once nothing uses the pool.

    A graph that is reset ends its own use. The inputs that were allocated in the pool do not.
    """
    global _inputs_in_pool
    for _ in range(_inputs_in_pool):
        torch._C._cuda_releasePool(torch.cuda.current_device(), CudaGraphManager.global_mempool)
    _inputs_in_pool = 0
