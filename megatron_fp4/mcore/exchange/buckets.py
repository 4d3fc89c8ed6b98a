"""Groups of gradient buckets of Megatron's DDP that ranks exchange in FP8.

Upstream's group (megatron/core/distributed/param_and_grad_buffer.py) sums buckets by an all-reduce
or a reduce-scatter. Here each rank sends every other rank its shard, in FP8, by an all-to-all of
bytes. The owner of a shard sums what it receives in float32. With the distributed optimizer the sum
stays with its owner. Without it the sum is sent to all ranks, in FP8 again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.fp8_blocks import Fp8Blocks
from megatron_fp4.arithmetic.messages import Rounding
from megatron_fp4.arithmetic.philox import Key, stream_id
from megatron_fp4.arithmetic.segments import Place, Segment, segments
from megatron_fp4.execution.communication import Pending

SENT, SUMMED = stream_id("gradients:sent"), stream_id("gradients:sum")


@dataclass
class Exchange:
    """What all groups of a process share.

    form: in which gradients are sent. key: returns the key of the random bits of the current step.
    places: of the parameters.
    """

    form: Fp8Blocks
    key: Callable[[], Key]
    places: dict[torch.nn.Parameter, Place]
    shards: dict[Any, list[list[Segment]]] = field(default_factory=dict)  # by bucket

    def shards_of(self, bucket: Any, ranks: int) -> list[list[Segment]]:
        """The segments of each rank's shard of a bucket. Shards are those of the distributed
        optimizer, which pads a bucket to a multiple of the ranks."""
        found = self.shards.get(bucket)
        if found is None:
            size = bucket.grad_data.numel()
            length = -(-size // ranks)
            borders = [min(rank * length, size) for rank in range(ranks + 1)]
            parameters = [
                (*bucket.param_to_index[parameter], self.places[parameter])
                for parameter in bucket.params_list
            ]
            found = self.shards[bucket] = segments(parameters, borders)
        return found


class Fp8BucketGroup(_ParamAndGradBucketGroup):
    """A group of buckets whose gradients are exchanged in FP8."""

    exchange: Exchange
    grad_reduce_handle: Any

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sends all buckets of the group; see upstream's method.

        force_all_reduce: whether all ranks need the sums of all shards, as for saving gradients.
        """
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        assert self.grad_reduce_handle is None, "the group has been sent, and not been waited for"
        self._prepare()
        sharded = self.ddp_config.use_distributed_optimizer
        group = (
            self.intra_distributed_optimizer_instance_group if sharded else self.data_parallel_group
        )
        sent = [self._send(bucket, group, bool(force_all_reduce)) for bucket in self.buckets]
        pending = Pending(lambda: [each.wait() for each in sent])
        if self.ddp_config.overlap_grad_reduce:
            self.grad_reduce_handle = pending
        else:
            pending.wait()

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

    @torch.no_grad()
    def _send(self, bucket: Any, group: dist.ProcessGroup, to_all: bool) -> Pending[None]:
        """Sends a bucket's shards to their owners. Once waited for, the sums are in its buffer."""
        ranks, own = group.size(), group.rank()
        form, key = self.exchange.form, self.exchange.key()
        shards = self.exchange.shards_of(bucket, ranks)
        rounding = Rounding(key, SENT, own)
        sent = [
            messages.encoded(messages.of_shard(bucket.grad_data, shard), shard, form, rounding)
            for shard in shards
        ]
        lengths = [len(message) for message in sent]
        received = sent[own].new_empty(ranks * lengths[own])
        work = dist.all_to_all_single(
            received, torch.cat(sent), [lengths[own]] * ranks, lengths, group=group, async_op=True
        )

        @torch.no_grad()
        def arrive() -> None:
            work.wait()
            parts = received.split(lengths[own]) if lengths[own] else [received]
            total = messages.summed(parts, shards[own], form)
            if not self.ddp_config.use_distributed_optimizer:
                self._share(total, shards, bucket.grad_data, group, key)
                return
            messages.store(total, shards[own], bucket.grad_data)
            if to_all:
                _gather(bucket.grad_data, group)

        return Pending(arrive)

    def _share(
        self,
        total: Tensor,
        shards: list[list[Segment]],
        buffer: Tensor,
        group: dist.ProcessGroup,
        key: Key,
    ) -> None:
        """Sends the sums of this rank's shard to all ranks, in FP8, and receives theirs.

        All ranks, the owner of a shard too, go on with the values that were sent, so that their
        weights stay equal.
        """
        form, own = self.exchange.form, group.rank()
        rounding = Rounding(key, SUMMED, own)
        message = messages.encoded(total, shards[own], form, rounding)
        lengths = [messages.length(shard, form) for shard in shards]
        for shard, sums in zip(shards, _gathered(message, lengths, group), strict=True):
            messages.store(messages.decoded(sums, shard, form), shard, buffer)


def _gathered(message: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """The messages of all ranks, of the given lengths. They are padded to the longest to be
    gathered."""
    longest = max(lengths)
    own = message.new_zeros(longest)
    own[: len(message)] = message
    every = message.new_empty(len(lengths) * longest)
    dist.all_gather_into_tensor(every, own, group=group)
    parts = every.split(longest) if longest else [every] * len(lengths)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _gather(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Gathers a buffer of which each rank has its shard."""
    own = buffer.chunk(group.size())[group.rank()].clone()
    dist.all_gather_into_tensor(buffer, own, group=group)


def install(chunks: Sequence[Any], exchange: Exchange) -> None:
    """Makes the buckets of these chunks, wrapped in Megatron's DDP, be exchanged in FP8."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.__class__ = Fp8BucketGroup
            group.exchange = exchange
