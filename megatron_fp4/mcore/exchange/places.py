"""The places of parameters in one vector of all parameters of a run, for random bits.

The vector has the unsharded parameters in the order of their global names. It does not depend on
how the run is laid out, except for parameters whose gradients tensor-parallel ranks or pipeline
stages sum after the exchange: each of them rounds other gradients, and must draw other bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import mpu

from megatron_fp4.arithmetic.segments import Place, begins, place_of
from megatron_fp4.mcore.model.attach import modules, with_global_weight
from megatron_fp4.mcore.runtime.ranks import of_all

# Parameters whose gradients Megatron sums over tensor-parallel ranks have one of these attributes.
# With --qk-layernorm those whose names have one of these parts belong to them
# (megatron/core/distributed/finalize_model_grads.py).
_SUMMED_OVER_TP = ("sequence_parallel", "average_gradients_across_tp_domain")
_QK_NORMS = ("q_layernorm", "k_layernorm")


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
        _name_in_vector(name, parameter): (
            parameter,
            sharded(parameter, _is_summed(name, parameter, chunk.config)),
        )
        for chunk in chunks
        for name, parameter in trained_parameters([chunk])
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
                    whole = f"{prefix}.{name}".lstrip(".")
                    yield with_global_weight(whole, chunk.config), parameter


def _name_in_vector(name: str, parameter: Any) -> str:
    """The name by which the vector has a parameter: its global name, followed by "#1" for a copy
    of the embedding on a later pipeline stage, as multi-token prediction has one."""
    return f"{name}#1" if getattr(parameter, "shared", False) else name


def _is_summed(name: str, parameter: Any, config: Any) -> bool:
    """Whether Megatron sums a parameter's gradients over tensor-parallel ranks."""
    if any(getattr(parameter, attribute, False) for attribute in _SUMMED_OVER_TP):
        return True
    return config.qk_layernorm and any(norm in name for norm in _QK_NORMS)


def sharded(parameter: Any, is_summed: bool = False) -> Sharded:
    """How a parameter is sharded, from the attributes that Megatron gives it.

    is_summed: whether tensor-parallel ranks sum its gradients after the exchange.
    """
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
    return Sharded(shape, 0, 1, rank if is_summed else 0, 1, ranks if is_summed else 1)


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
    return _place(sharded(parameter), 0)
