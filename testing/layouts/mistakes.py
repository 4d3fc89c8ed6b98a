"""Known mistakes, each of which the comparison of layouts must detect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_fp4.mcore.model import attach as attaching
from megatron_fp4.mcore.model.layers import Fp4ColumnParallelLinear, Fp4State
from megatron_fp4.replay import Replay
from testing.patching import patched


@contextmanager
def noise_of_the_rank() -> Iterator[None]:
    """Random bits that ignore the data-parallel rank, the pipeline stage and SwiGLU's ranges."""
    attach = Fp4ColumnParallelLinear.attach

    def one_range(layer: Any, *given: Any) -> None:
        ranges = getattr(layer.weight, "partition_stride", 1)
        layer.weight.partition_stride = 1
        attach(layer, *given)
        layer.weight.partition_stride = ranges

    def local_names(chunk: Any) -> Iterator[Any]:
        for name, module in chunk.named_modules():
            if isinstance(module, attaching.Fp4Layer):
                yield name, module, None

    with (
        patched(mpu, "get_data_parallel_rank", lambda *_, **__: 0),
        patched(attaching, "_linears", local_names),
        patched(Fp4ColumnParallelLinear, "attach", one_range),
    ):
        yield


def no_replay() -> Any:
    """A recomputed forward pass reads the current step and microbatch, not those of the first."""
    return patched(Replay, "take", lambda self, fresh: fresh())


def repeats_share_noise() -> Any:
    """A layer that is called twice in a microbatch draws the same random bits twice."""
    return patched(Fp4State, "_now", lambda state: (state.run.now(), 0))
