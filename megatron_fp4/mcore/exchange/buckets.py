"""Groups of gradient buckets of Megatron's DDP that ranks exchange in few bits.

Upstream's group (megatron/core/distributed/param_and_grad_buffer.py) sums buckets by an all-reduce
or a reduce-scatter. Here each rank sends every other rank its shard, encoded, by an all-to-all of
bytes. The owner of a shard sums what it receives in float32. With the distributed optimizer the sum
stays with its owner. Without it the sum is sent to all ranks, encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import distributed as dist

from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.messages import GradientForm
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.segments import Place, Segment, pieces, segments
from megatron_fp4.execution.communication import Pending
from megatron_fp4.mcore.exchange.pieces import Piece
from megatron_fp4.mcore.exchange.slots import Slots


@dataclass
class Exchange:
    """What all groups of a process share.

    key: returns the key of the random bits of the current step. pieces: for each bucket the pieces
    in which it is sent. slots: the buffers through which all pieces go.
    """

    key: Callable[[], Key]
    pieces: dict[Any, list[Piece]]
    slots: Slots


class ExchangingBucketGroup(_ParamAndGradBucketGroup):
    """A group of buckets whose gradients are exchanged in few bits."""

    exchange: Exchange
    grad_reduce_handle: Any

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sends all buckets of the group; see upstream's method.

        force_all_reduce: whether all ranks need the sums of all shards; `finish_grad_sync` sees to
        it.
        """
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        assert self.grad_reduce_handle is None, "the group has been sent, and not been waited for"
        self._prepare()
        pending = self._send()
        if self.ddp_config.overlap_grad_reduce:
            self.grad_reduce_handle = pending
        else:
            pending.wait()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Waits for the sums; see upstream's method.

        force_all_reduce: whether all ranks need the sums of all shards, as for saving gradients.
        They get those that the owners have, in the buffer's dtype. Unlike upstream's, they do so
        also where the pipeline schedule started the group, which does not pass the argument on.
        """
        super().finish_grad_sync(force_all_reduce)
        if force_all_reduce and self.ddp_config.use_distributed_optimizer:
            for bucket in self.buckets:
                own = bucket.grad_data.chunk(self._ranks.size())[self._ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=self._ranks)
            self._copy_back_extra_main_grads()

    @torch.no_grad()
    def _prepare(self) -> None:
        """What upstream does before it starts a collective: waits for CUDA graphs, gathers copies
        of gradients, checks them, and scales them."""
        parameters = [parameter for bucket in self.buckets for parameter in bucket.params_list]
        events = {getattr(each, "_cudagraph_wgrad_ready_event", None) for each in parameters}
        for event in events:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        for bucket in self.buckets:
            for parameter in bucket.params_with_extra_main_grads:
                copy = getattr(parameter, "main_grad_copy_in_grad_buffer", None)
                if copy is not None:
                    copy.copy_(parameter.main_grad)
        config = self.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=config.check_for_nan_in_grad,
                check_for_large=config.check_for_large_grads,
            )
        for bucket in self.buckets:
            if bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data *= bucket.gradient_scaling_factor

    def _send(self) -> Pending[None]:
        """Sends all buckets. Once waited for, the sums are in them."""
        pieces = [piece for bucket in self.buckets for piece in self.exchange.pieces[bucket]]
        return self.exchange.slots.send(pieces, self.exchange.key())

    @property
    def _ranks(self) -> dist.ProcessGroup:
        return ranks_of(self)


def ranks_of(group: Any) -> dist.ProcessGroup:
    """The ranks that sum the gradients of a group of buckets."""
    if group.ddp_config.use_distributed_optimizer:
        return group.intra_distributed_optimizer_instance_group
    return group.data_parallel_group


def shards_of(bucket: Any, ranks: int, places: Mapping[Any, Place]) -> list[list[Segment]]:
    """The segments of each rank's shard of a bucket.

    Shards are those of the distributed optimizer, which pads a bucket to a multiple of the ranks.
    Without it the last ones are shorter, or empty.

    bucket: of Megatron's DDP. ranks: how many sum it. places: of all its parameters.
    """
    size = bucket.grad_data.numel()
    length = -(-size // ranks)
    borders = [min(rank * length, size) for rank in range(ranks + 1)]
    parameters = [
        (*bucket.param_to_index[parameter], places[parameter]) for parameter in bucket.params_list
    ]
    return segments(parameters, borders)


def groups_of(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """("dense" or "experts", group of buckets) of model chunks that Megatron's DDP wraps."""
    for chunk in chunks:
        yield from (("dense", group) for group in chunk.bucket_groups)
        yield from (("experts", group) for group in chunk.expert_parallel_bucket_groups)


def install(
    chunks: Sequence[Any],
    form: GradientForm,
    key: Callable[[], Key],
    places: Mapping[Any, Place],
) -> Exchange | None:
    """Makes the buckets of these chunks, wrapped in Megatron's DDP, be exchanged.

    Groups of one rank are left as they are: their gradients are not sent, and not rounded. Returns
    None where there are no others.

    form: the format of what is sent. key: that of the present step's random bits. places: of every
    parameter that is trained (places.py).
    """
    groups = [group for _, group in groups_of(chunks) if ranks_of(group).size() > 1]
    if not groups:
        return None
    cut = {
        bucket: list(_pieces_of(group, bucket, form, places))
        for group in groups
        for bucket in group.buckets
    }
    capacity = max(piece.room for each in cut.values() for piece in each)
    device = groups[0].buckets[0].grad_data.device
    exchange = Exchange(key, cut, Slots(capacity, device))
    for group in groups:
        extend(group, ExchangingBucketGroup)
        group.exchange = exchange
    return exchange


def _pieces_of(
    group: Any, bucket: Any, form: GradientForm, places: Mapping[Any, Place]
) -> Iterator[Piece]:
    """The pieces of a bucket of a group."""
    ranks, to_all = ranks_of(group), not group.ddp_config.use_distributed_optimizer
    most = max(form.block, messages.PIECE_BYTES // (ranks.size() * form.dtype.itemsize))
    for shards in pieces(shards_of(bucket, ranks.size(), places), most, form.block):
        yield Piece(bucket.grad_data, shards, ranks, to_all, form)


def extend(group: Any, kind: type) -> None:
    """Changes the class of a group of buckets to one that derives from `kind` and, after that, from
    the class that the group had. So one group can exchange gradients and gather codes."""
    group.__class__ = type(kind.__name__, (kind, type(group)), {})
