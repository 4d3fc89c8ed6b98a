"""A workaround for a race in torch's gloo process groups that can corrupt the heap."""

from typing import Any

from torch import distributed as dist

_mended = False


def use_one_worker() -> None:
    """Makes torch create gloo process groups with one worker thread instead of two. Idempotent.

    Groups that already exist keep their threads.

    When a worker has finished a collective, it assigns the collective's name to a string of the
    group without a lock (torch 2.11 to 2.15, ProcessGroupGloo::runLoop). If both workers do so at
    once and the name is too long to be stored inside the string object, as ALLGATHER_COALESCED is,
    its memory is freed twice. docs/notes/gloo.md has the evidence. With one worker, the collectives
    of a group run in the order in which they were called, as with NCCL.
    """
    global _mended
    if _mended:
        return
    _mended = True
    group: Any = dist.ProcessGroupGloo
    original = group.__init__

    def initialize(self: Any, store: Any, rank: int, size: int, **named: Any) -> None:
        options = group._Options()
        options._threads = 1
        options._devices = [group.create_default_device()]
        if (timeout := named.pop("timeout", None)) is not None:
            options._timeout = timeout
        for name, value in named.items():  # torch 2.15 passes enable_reconfigure
            setattr(options, name, value)
        original(self, store, rank, size, options)

    group.__init__ = initialize
