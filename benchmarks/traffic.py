"""What a rank sends, seen where torch.distributed is called."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# c10d's operators: what they are called here, and where among their arguments this rank's own part
# is (an all-gather's), or the whole (of all others). The group is the argument after it, but for
# `send`, which has one receiver.
COLLECTIVES = {
    "_allgather_base_": ("all-gather", 1),
    "allgather_": ("all-gather", 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
SENDS_NOTHING = ("recv_", "recv_any_source_", "barrier")


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends by each kind of collective, in rings: of N ranks each
    sends N - 1 parts to gather or to scatter a sum, and twice that to sum for all. A broadcast
    passes through all ranks but the last; each is given its share of that.

    Modes go with a backward pass to autograd's own threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operator = func._schema.name.partition("::")[2]
        if "c10d" in func.namespace and operator not in SENDS_NOTHING:
            kind, place = COLLECTIVES[operator]  # no other goes unseen
            tensors = args[place] if isinstance(args[place], list) else [args[place]]
            size = sum(t.numel() * t.element_size() for t in tensors)
            ranks = dist.ProcessGroup.unbox(args[place + 1]).size()
            times = {"all-gather": ranks - 1, "all-reduce": 2 * (ranks - 1) / ranks, "send": 1}
            sent = int(size * times.get(kind, (ranks - 1) / ranks))
            if sent:  # a group of one sends nothing
                self.sent[kind] = self.sent.get(kind, 0) + sent
        return func(*args, **(kwargs or {}))
