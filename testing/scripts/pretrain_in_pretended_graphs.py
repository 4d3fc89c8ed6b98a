"""pretrain_gpt.py with pretended CUDA graphs, on a CPU, and with or without a known mistake.

    torchrun ... pretrain_in_pretended_graphs.py MISTAKE FLAGS ...

Each rank writes one line with a digest of its weights after each step.

none: no mistake. one-clock: the backward pass reads the step and the microbatch of the latest
forward pass. unmended: Megatron's errors under pipeline parallelism are not worked around. no-view:
a view becomes a tensor that a schedule may free, but not the memory of a replay's output.
all-uses: an input's uses by other microbatches are counted. keep: graphs are kept when a phase of a
recipe begins. delete: they are deleted as Megatron does it. keep-pool: they are dropped, but the
uses of their pool of memory are not taken back. keep-tensors: they are dropped, but not the tensors
that they read and write. count: no mistake; at the end a line says how often
Megatron recomputed a module.

Whenever graphs are dropped each rank writes how many of their tensors stay, and at its end how many
pools of memory were in use at a time.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import Any

from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu
from testing.kernels import pretend_graphs
from testing.worlds import weights


def main() -> None:
    cpu.install()
    mistake = sys.argv.pop(1)
    pretend_graphs.install()
    _make(mistake)
    _tell_tensors_that_stay()
    weights.tell()
    atexit.register(_tell_pools)
    pretrain.main()


def _tell_pools() -> None:
    # One write for the whole line, since several ranks write at the same time.
    sys.stderr.write(f"pools at a time: {pretend_graphs.pools.most}\n")


def _tell_tensors_that_stay() -> None:
    from megatron_fp4.mcore.loop import phased_graphs

    def telling(managers: Any, stream: Any) -> None:
        tensors = [
            weakref.ref(tensor)
            for manager in managers
            for runner in manager.cudagraph_runners
            for tensor in (*runner.fwd_graph_output_surface, *runner.static_grad_inputs)
            if tensor is not None
        ]
        drop(managers, stream)
        if tensors:  # else nothing was captured yet
            sys.stderr.write(f"tensors that stay: {sum(ref() is not None for ref in tensors)}\n")

    drop = phased_graphs._drop
    patched: Any = phased_graphs
    patched._drop = telling


def _make(mistake: str) -> None:
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    from megatron_fp4.mcore.loop import phased_graphs, pipelined_graphs
    from megatron_fp4.mcore.model import graphs

    phased: Any = phased_graphs
    patched: Any = pipelined_graphs
    if mistake == "one-clock":
        patched = graphs.Clock
        patched.read = lambda self: tuple(self._words[:, 0])
    elif mistake == "unmended":
        patched.install = lambda: None
    elif mistake == "no-view":
        sendable = pipelined_graphs._sendable
        patched._sendable = lambda runner, outputs, static=(): sendable(runner, outputs)
    elif mistake == "all-uses":
        patched._forget_uses = lambda inputs: None
    elif mistake == "keep":
        phased._drop = lambda managers, stream: None
    elif mistake == "delete":
        phased._drop = lambda managers, stream: delete_cuda_graphs()
    elif mistake == "keep-pool":
        phased._release_pool = lambda: None
    elif mistake == "keep-tensors":
        phased._free = lambda runner: [
            graph.reset() for graph in (runner.fwd_graph, runner.bwd_graph)
        ]
    elif mistake == "count":
        _count_recomputed()
    else:
        assert mistake == "none"


def _count_recomputed() -> None:
    from megatron.core.tensor_parallel.random import CheckpointFunction

    calls: list[None] = []
    backward: Any = CheckpointFunction.backward

    def counting(ctx: Any, *gradients: Any) -> Any:
        calls.append(None)
        return backward(ctx, *gradients)

    patched: Any = CheckpointFunction
    patched.backward = staticmethod(counting)
    atexit.register(lambda: print("recomputed:", len(calls), flush=True))


if __name__ == "__main__":
    main()
