"""The places of parameters in one vector of all parameters of a run, for random bits.

The vector has the unsharded parameters in the order of their global names. It does not depend on
how the run is laid out, except for parameters whose gradients tensor-parallel ranks sum after the
exchange: each of these ranks rounds other gradients, and must draw other bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import mpu

from megatron_fp4.arithmetic.segments import Place, begins, place_of
from megatron_fp4.mcore.model.attach import modules
from megatron_fp4.mcore.runtime.ranks import of_all

# Attributes that Megatron gives to parameters whose gradients it sums over tensor-parallel ranks
# (megatron/core/distributed/finalize_model_grads.py).
_SUMMED_OVER_TP = ("sequence_parallel", "average_gradients_across_tp_domain")


class Sharded(NamedTuple):
    """A parameter's shape on this rank, and how tensor parallelism shards it; see `place_of`.

    copies: the parts of the vector that the parameter has: one for each tensor-parallel rank where
    these sum its gradients, else 1.
    """

    shape: tuple[int, ...]
    axis: int
    ranks: int
    rank: int
    ranges: int
    copies: int

    @property
    def size(self) -> int:
        """Its elements in the vector."""
        return torch.Size(self.shape).numel() * self.ranks * self.copies


def places(chunks: Sequence[Any]) -> dict[torch.nn.Parameter, Place]:
    """The Place of each parameter of this rank's model chunks. All ranks have to call it."""
    found = {
        name: (parameter, sharded(parameter)) for name, parameter in trained_parameters(chunks)
    }
    sizes: dict[str, int] = {}
    for each in of_all({name: shard.size for name, (_, shard) in found.items()}):
        sizes |= each
    names = sorted(sizes)
    begin = dict(zip(names, begins(sizes[name] for name in names), strict=True))
    return {parameter: _place(shard, begin[name]) for name, (parameter, shard) in found.items()}


def trained_parameters(chunks: Iterable[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of all parameters that are trained."""
    for chunk in chunks:
        for prefix, module, _ in modules(chunk):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    yield f"{prefix}.{name}".lstrip("."), parameter


def sharded(parameter: Any) -> Sharded:
    """How a parameter is sharded, from the attributes that Megatron gives it."""
    is_expert = not getattr(parameter, "allreduce", True)
    group = (
        mpu.get_expert_tensor_parallel_group()
        if is_expert
        else mpu.get_tensor_model_parallel_group()
    )
    shape, ranks, rank = tuple(parameter.shape), group.size(), group.rank()
    if getattr(parameter, "tensor_model_parallel", False):
        ranges = getattr(parameter, "partition_stride", 1)
        return Sharded(shape, parameter.partition_dim, ranks, rank, ranges, 1)
    summed = any(getattr(parameter, name, False) for name in _SUMMED_OVER_TP)
    return Sharded(shape, 0, 1, rank if summed else 0, 1, ranks if summed else 1)


def _place(shard: Sharded, begin: int) -> Place:
    if shard.copies > 1:
        begin += shard.rank * torch.Size(shard.shape).numel()
        return place_of(shard.shape, begin)
    return place_of(
        shard.shape,
        begin,
        axis=shard.axis,
        ranks=shard.ranks,
        rank=shard.rank if shard.ranks > 1 else 0,
        ranges=shard.ranges,
    )


def place_in(parameter: torch.nn.Parameter) -> Place:
    """The Place of a parameter in a vector of its own, the same on tensor-parallel ranks that hold
    it alike."""
    return _place(sharded(parameter)._replace(copies=1), 0)
