"""A piece of a gradient bucket: what ranks exchange at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.messages import GradientForm
from megatron_fp4.arithmetic.segments import Segment


@dataclass(frozen=True, eq=False)
class Piece:
    """What is exchanged at once.

    gradients: the buffer that it is a part of, one axis. shards: its segments, for each rank those
    that the rank owns. group: the ranks. to_all: whether all ranks get the sums, and not only the
    owners. form: how gradients travel.
    """

    gradients: Tensor
    shards: Sequence[Sequence[Segment]]
    group: dist.ProcessGroup
    to_all: bool
    form: GradientForm

    @cached_property
    def lengths(self) -> list[int]:
        """The bytes of each shard's message."""
        return [messages.length(shard, self.form) for shard in self.shards]

    @cached_property
    def own(self) -> int:
        """The number of this rank, and of the shard that it owns."""
        return self.group.rank()

    @property
    def shard(self) -> Sequence[Segment]:
        """The segments that this rank owns."""
        return self.shards[self.own]

    @property
    def room(self) -> int:
        """The bytes that a buffer needs: messages of all ranks, padded to the longest."""
        return len(self.shards) * max(self.lengths)
