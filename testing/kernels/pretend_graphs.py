"""Pretended CUDA graphs on a CPU, for the code of Megatron that captures and replays them.

A capture records the operators of PyTorch and the memory that they read and write. A replay runs
them again on that memory, as a GPU does with kernels. Python code of the captured function does not
run. What a capture writes to memory that was there before is undone at its end, since a GPU runs no
kernel during a capture. Graphs share no memory with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def register_generator_state(self, state: Any) -> None: ...

    def reset(self) -> None:
        self.calls.clear()

    def replay(self) -> None:
        assert self.calls, "replayed before it was captured"
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for call in self.calls:
                call()


@contextmanager
def capturing(graph: Graph, pool: Any = None, **others: Any) -> Iterator[None]:
    """Stands for torch.cuda.graph."""
    assert not graph.calls
    recorder = _Recorder(graph)
    with recorder:
        yield
    recorder.undo()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._own: dict[int, Tensor] = {}  # memory that the capture allocated, by its address
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other memory that it wrote: its bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        for name, written in _written(func, args, kwargs):
            self._keep(written)
        found = func(*args, **kwargs)
        outputs = [leaf.detach() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        known = {_address(tensor) for tensor in inputs}
        fresh = [None if _address(each) in known else each for each in outputs]
        self._own |= {_address(each): each for each in fresh if each is not None}

        def again() -> None:
            made = func(*given[0], **given[1])
            leaves = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            for static, leaf in zip(fresh, leaves, strict=True):
                if static is not None and static.numel():
                    static.copy_(leaf)

        self._graph.calls.append(again)
        return found

    def _keep(self, written: Tensor) -> None:
        address = _address(written)
        if address not in self._own and address not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(written.untyped_storage())
            self._before[address] = whole, whole.clone()

    def undo(self) -> None:
        for whole, bytes_before in self._before.values():
            whole.copy_(bytes_before)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each argument that the operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (
                (argument.name, leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
            )


def install() -> None:
    """Makes Megatron capture and replay pretended graphs. Needs the CPU runtime (runtime/cpu.py).

    No operator may draw torch's random numbers in a captured layer, so dropout must be 0.
    """
    stands_for: Any = torch.cuda
    stands_for.CUDAGraph = Graph
    stands_for.graph = capturing
    stands_for.graph_pool_handle = lambda: (0, 0)
    stands_for.set_stream = lambda stream: None
    stands_for = torch._C
    stands_for._cuda_beginAllocateCurrentThreadToPool = lambda device, pool: None
    stands_for._cuda_endAllocateToPool = lambda device, pool: None
    _install_in_megatron()


def _install_in_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    from megatron_fp4.mcore.launch.refusals import machine

    # Graphs need CUDA's generators, which nothing draws from in a captured layer here.
    start = random.CudaRNGStatesTracker.__init__

    def __init__(self: Any, use_cudagraphable_rng: bool = False, *others: Any, **named: Any) -> None:
        start(self, False, *others, **named)

    upstream: Any = random.CudaRNGStatesTracker
    upstream.__init__ = __init__
    upstream = cuda_graphs
    upstream.get_cuda_rng_tracker = lambda: SimpleNamespace(is_inference_rng_tracker=True)
    upstream.get_all_rng_states = dict
    refusal: Any = machine
    refusal.gpu = lambda args: iter(())
