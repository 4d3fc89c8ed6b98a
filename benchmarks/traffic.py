"""Counts the bytes that a rank sends, by intercepting the operators of torch.distributed."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# By the operator of c10d: its kind, and the index of the argument that is counted. That is this
# rank's part for an all-gather, and the whole tensor for the others. The next argument is the
# group.
COLLECTIVES = {
    "_allgather_base_": ("all-gather", 1),
    "allgather_": ("all-gather", 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
SENDS_NOTHING = ("recv_", "recv_any_source_", "barrier")


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends, by kind of collective (`sent`).

    The bytes are those of ring algorithms. Each of N ranks sends N - 1 parts in an all-gather or a
    reduce-scatter, and twice that in an all-reduce. In an all-to-all a rank sends all parts but its
    own. In a broadcast all ranks but the last send the tensor on, and each rank is counted with the
    mean.

    Collectives of a backward pass are counted too: autograd's threads inherit the dispatch mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operator = func._schema.name.partition("::")[2]
        if "c10d" in func.namespace and operator not in SENDS_NOTHING:
            kind, place = COLLECTIVES[operator]  # KeyError for an operator that is not listed
            tensors = args[place] if isinstance(args[place], list) else [args[place]]
            size = sum(t.numel() * t.element_size() for t in tensors)
            group = dist.ProcessGroup.unbox(args[place + 1])
            ranks = group.size()
            times = {"all-gather": ranks - 1, "all-reduce": 2 * (ranks - 1) / ranks, "send": 1}
            sent = int(size * times.get(kind, (ranks - 1) / ranks))
            if kind == "all-to-all" and any(parts := args[4]):  # parts of unequal sizes
                sent = size - size * parts[group.rank()] // sum(parts)
            if sent:  # a group of one rank sends nothing
                self.sent[kind] = self.sent.get(kind, 0) + sent
        return func(*args, **(kwargs or {}))
