"""Groups of weight buckets of Megatron's DDP that ranks gather as codes (--fp4-param-gather).

With the distributed optimizer each rank updates its shard of a bucket, and upstream's group
(megatron/core/distributed/param_and_grad_buffer.py) gathers all shards in the dtype of the weights.
Here the owner of a shard quantizes it as fprop would, and sends codes and scales. The optimizer has
rounded the main weights to that dtype by then, so that the codes are those of the plain gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.errors import ConfigError
from megatron_fp4.execution.communication import Pending
from megatron_fp4.mcore.exchange.buckets import extend, groups_of, ranks_of
from megatron_fp4.mcore.gather.sent_shards import WeightRange, bytes_of, head_length, sent_shards
from megatron_fp4.mcore.model.sent_weights import SentWeights
from megatron_fp4.mcore.model.weight_states import WeightStates


class CodesBucket:
    """Gathers one bucket: this rank sends its message, and receives those of all."""

    def __init__(
        self, bucket: Any, group: dist.ProcessGroup, weights: SentWeights, states: WeightStates
    ) -> None:
        """bucket: of Megatron's DDP. group: the ranks that own its shards. weights: all that are
        sent as codes. states: has the averages of these weights."""
        self._buffer: Tensor = bucket.param_data
        self._group, self._states = group, states
        shards = sent_shards(bucket, group.size(), weights.by_parameter)
        self._own = shards[group.rank()]
        self._places = [shard.places(self._buffer) for shard in shards]
        self._broadcast = [
            (dist.get_global_rank(group, rank), run)
            for rank, shard in enumerate(shards)
            for run in bytes_of(shard.long, self._buffer)
        ]
        self._longest = max(sum(map(len, places)) for places in self._places)
        self._head = head_length(shards)
        sent = [piece.weight for shard in shards for piece in shard.sent]
        self._has_averages = any(weight.rounds_to_average for weight in sent)

    @torch.no_grad()
    def send(self) -> Pending[None]:
        """Starts the gather. All ranks of the group have to call it.

        Once it is waited for, the codes and scales are where linears read them, and the other
        parameters are in the bucket's buffer.
        """
        message = self._message()
        received = message.new_empty(self._longest * self._group.size())
        works = [
            dist.all_gather_into_tensor(received, message, group=self._group, async_op=True),
            *(dist.broadcast(run, owner, self._group, True) for owner, run in self._broadcast),
        ]

        @torch.no_grad()
        def arrive() -> None:
            for work in works:
                work.wait()
            into, pieces = list[Tensor](), list[Tensor]()
            for places, sent in zip(self._places, received.split(self._longest), strict=True):
                lengths = list(map(len, places))
                into += places
                pieces += sent[: sum(lengths)].split(lengths)
            torch._foreach_copy_(into, pieces)

        return Pending(arrive)

    def _message(self) -> Tensor:
        """This rank's message, padded to the length of the longest: uint8."""
        values, averages = self._after_shard()
        pieces = [
            made for each in self._own.blocks for made in self._encoded(each, values, averages)
        ]
        pieces += bytes_of(self._own.short, self._buffer)
        written = sum(map(len, pieces))
        return torch.cat(
            [*pieces, self._buffer.new_zeros(self._longest - written, dtype=torch.uint8)]
        )

    def _encoded(
        self, blocks: WeightRange, values: Tensor, averages: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The codes and the scales of a weight's blocks that begin in this rank's shard, flattened.

        blocks: their elements, of which the last may lie in the shards after it. values, averages:
        what `_after_shard` returns.
        """
        end = min(blocks.high, self._own.high)
        over = blocks.high - end
        elements, average = self._buffer[blocks.low : end], None
        if blocks.weight.rounds_to_average:
            average = self._average(WeightRange(blocks.weight, blocks.start, blocks.low, end))
        if over:
            elements = torch.cat([elements, values[:over]])
            average = None if average is None else torch.cat([average, averages[:over]])
        made = blocks.weight.quantized(elements, average)
        return made.codes.view(-1), made.scales.view(-1)

    def _average(self, piece: WeightRange) -> Tensor:
        """The average of a piece of this rank's shard: float32."""
        start, own = self._states.part(piece.weight.weight, "average")
        first, last = piece.within
        return own[first - start : last - start]

    # --- blocks that a border cuts ---

    def _after_shard(self) -> tuple[Tensor, Tensor]:
        """(values, averages) of the elements after this rank's shard, as far as a block may reach.

        They are empty where no border of the bucket cuts a block, and averages also where no weight
        in it is rounded towards one.
        """
        values, averages = self._heads()
        return self._of_next_ranks(values), self._of_next_ranks(averages)

    def _of_next_ranks(self, own: Tensor) -> Tensor:
        """What the ranks after this one have as `own`, one after the other."""
        if not len(own):
            return own
        every = own.new_empty(self._group.size() * len(own))
        dist.all_gather_into_tensor(every, own, group=self._group)
        return every[(self._group.rank() + 1) * len(own) :]

    def _heads(self) -> tuple[Tensor, Tensor]:
        """(values, averages) of the first elements of this rank's shard. The averages of parameters
        without one are 0."""
        low, end = self._own.low, self._own.low + self._head
        averages = self._buffer.new_zeros(self._head * self._has_averages, dtype=torch.float32)
        for piece in self._own.sent:
            if piece.low < end and piece.weight.rounds_to_average:
                head = WeightRange(piece.weight, piece.start, piece.low, min(piece.high, end))
                averages[head.low - low : head.high - low] = self._average(head)
        return self._buffer[low:end], averages


class GatheringBucketGroup(_ParamAndGradBucketGroup):
    """A group of buckets whose sent weights are gathered as codes and scales.

    gathers_codes: whether they are so now, or in the dtype of the weights, as upstream does.
    """

    codes_buckets: list[CodesBucket]
    gathers_codes: bool
    param_gather_handle: Any

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gathers the group's weights; see upstream's method.

        force_sync: whether all ranks need the weights themselves, too.
        """
        if not self.gathers_codes:
            super().start_param_sync(force_sync)
            return
        if force_sync:
            self._gather_weights()
            self.gather_codes()
            return
        assert self.param_gather_handle is None, "the group is being gathered"
        sent = [bucket.send() for bucket in self.codes_buckets]
        pending = Pending(lambda: [each.wait() for each in sent])
        if self.ddp_config.overlap_param_gather:
            self.param_gather_handle = pending
        else:
            pending.wait()
        self.param_gather_dispatched = True

    def gather_codes(self) -> None:
        """Gathers the codes and scales, and waits."""
        for bucket in self.codes_buckets:
            bucket.send().wait()

    def _gather_weights(self) -> None:
        """Gathers the weights themselves, and waits for them and for codes that are under way."""
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
        super().start_param_sync(force_sync=True)

    def turn_to(self, codes: bool) -> None:
        """From now on gathers codes, or the weights themselves; gathers these now, and waits."""
        if codes:
            super().start_param_sync(force_sync=True)  # also waits for weights that are under way
            self.gather_codes()
        else:
            self._gather_weights()
        self.gathers_codes = codes


def install(chunks: Sequence[Any], weights: SentWeights, states: WeightStates) -> None:
    """Makes these chunks, wrapped in Megatron's DDP, gather weights as codes.

    weights: those that are sent as codes. states: has the averages of these weights. Raises
    ConfigError for a weight in no bucket: it was frozen after its model was built.
    """
    groups = [
        group
        for _, group in groups_of(chunks)
        if any(weights.by_parameter.keys() & bucket.params for bucket in group.buckets)
    ]
    gathered = {
        parameter for group in groups for bucket in group.buckets for parameter in bucket.params
    }
    if weights.by_parameter.keys() - gathered:
        raise ConfigError(
            "--fp4-param-gather: a linear's weight was frozen after its model was built: freeze it "
            "in the model's builder, or leave out the flag"
        )
    for group in groups:
        extend(group, GatheringBucketGroup)
        group.gathers_codes = True
        group.codes_buckets = [
            CodesBucket(bucket, ranks_of(group), weights, states) for bucket in group.buckets
        ]
    weights.follow(groups)
