"""Pretended CUDA graphs on a CPU, for Megatron's code that captures and replays graphs.

A capture records the operators of PyTorch and the memory that they read and write. A replay runs
them again on that memory, as a GPU does with kernels. Python code of the captured function does not
run. A GPU runs no kernel during a capture, so what a capture writes to memory that was there before
is undone at its end.

Collectives run in captures and replays too, and each is waited for at once. Not pretended: that
graphs of one pool share memory. The uses of each pool are counted as torch counts them: it frees a
pool's memory only when nothing uses the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

# Of operators for whose result the host waits.
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Pools:
    """The pools of memory that graphs share, by their handles.

    uses: of each pool, one for each graph that was captured into it and was not reset, and one for
    each allocation outside of graphs that was not released. most: the most pools that were in
    use at the same time.
    """

    def __init__(self) -> None:
        self.uses: dict[Any, int] = {}
        self.most = 0

    def handle(self) -> tuple[int, int]:
        self.uses[handle := (0, len(self.uses) + 1)] = 0
        return handle

    def use(self, handle: Any) -> None:
        if handle is not None:  # one that nothing shares
            self.uses[handle] += 1
        self.most = max(self.most, sum(map(bool, self.uses.values())))

    def release(self, handle: Any) -> None:
        if handle is not None:
            assert self.uses[handle], "a pool that is not in use was released"
            self.uses[handle] -= 1


pools = Pools()


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self.pool: Any = None

    def register_generator_state(self, state: Any) -> None: ...

    def reset(self) -> None:
        if self.calls:
            pools.release(self.pool)
        self.calls.clear()

    def replay(self) -> None:
        assert self.calls, "replayed before it was captured"
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for call in self.calls:
                call()


@contextmanager
def capturing(graph: Graph, pool: Any = None, capture_error_mode: str = "") -> Iterator[None]:
    """Stands for torch.cuda.graph."""
    assert not graph.calls
    graph.pool = pool
    pools.use(pool)
    recorder = _Recorder(graph)
    with recorder:
        yield
    recorder.undo()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._own: dict[int, Tensor] = {}  # by its address, memory that the capture allocated
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other memory it wrote to: its bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_waiting(func, args)
        # Detached tensors stay what they are if the captured function replaces a tensor's data.
        given, named = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        for written in _written(func, args, kwargs or {}):
            self._keep(written)
        found = _waited(func(*args, **(kwargs or {})))
        known = set(map(_address, _tensors((given, named))))
        results = [result.detach() for result in _tensors(found)]
        # What has many elements in the memory of one is never written.
        fresh = [
            None if _address(result) in known or _is_one_element(result) else result
            for result in results
        ]
        self._own |= {_address(result): result for result in fresh if result is not None}

        def again() -> None:
            made = _tensors(_waited(func(*given, **named)))
            for static, result in zip(fresh, made, strict=True):
                if static is not None:
                    static.copy_(result)

        self._graph.calls.append(again)
        return found

    def _keep(self, written: Tensor) -> None:
        address = _address(written)
        if address not in self._own and address not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(written.untyped_storage())
            self._before[address] = whole, whole.clone()

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _waited(tree: Any) -> Any:
    """What an operator returned, after the end of the collective that it may have started.

    Gloo writes the results of some collectives when they are waited for, by operators of PyTorch
    that would be recorded too.
    """
    return tree_map_only(torch.ScriptObject, _ended, tree)


def _ended(work: torch.ScriptObject) -> torch.ScriptObject:
    """Waits for a collective, and returns the work of one that has ended."""
    distributed_c10d.Work.unbox(work).wait()
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([])
    untyped: Any = torch._C._distributed_c10d
    return untyped._create_work_from_future(future).boxed()


def _is_one_element(tensor: Tensor) -> bool:
    """Whether all of several elements lie in the memory of one."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments that an operator writes to; all of a collective's, which does not say so."""
    if func.namespace == "c10d":
        yield from _tensors((args, kwargs))
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


def _refuse_waiting(func: Any, args: Any) -> None:
    """Raises RuntimeError where a GPU's capture would, since the host cannot wait during one."""
    by_numbers = func is torch.ops.aten.index.Tensor and not any(
        index.dtype == torch.bool for index in _tensors(args[1])
    )
    if _WAITING.intersection(func.tags) and not by_numbers:
        raise RuntimeError(f"{func} in a capture: the host would wait for the GPU")


def install() -> None:
    """Makes Megatron capture and replay pretended graphs. Needs the CPU runtime (runtime/cpu.py).

    No operator may draw torch's random numbers in a captured layer, so dropout must be 0.
    """
    stands_for: Any = torch.cuda
    stands_for.CUDAGraph = Graph
    stands_for.graph = capturing
    stands_for.graph_pool_handle = pools.handle
    stands_for.set_stream = lambda stream: None
    stands_for = torch._C
    stands_for._cuda_beginAllocateCurrentThreadToPool = lambda device, pool: pools.use(pool)
    stands_for._cuda_endAllocateToPool = lambda device, pool: None
    stands_for._cuda_clearCublasWorkspaces = lambda: None
    stands_for._cuda_releasePool = lambda device, pool: pools.release(pool)
    _install_in_megatron()


def _install_in_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    from megatron_fp4.mcore.launch.refusals import machine, model

    # Graphs need generators of CUDA. Nothing draws from them in a captured layer here.
    start = random.CudaRNGStatesTracker.__init__

    def __init__(self: Any, use_cudagraphable_rng: bool, *others: Any, **named: Any) -> None:
        start(self, False, *others, **named)

    patched: Any = random.CudaRNGStatesTracker
    patched.__init__ = __init__
    patched = cuda_graphs
    patched.get_cuda_rng_tracker = lambda: SimpleNamespace(is_inference_rng_tracker=True)
    patched.get_all_rng_states = dict
    for module, of_a_cpu in ((machine, "gpu"), (model, "layers")):
        setattr(module, of_a_cpu, lambda args: iter(()))
