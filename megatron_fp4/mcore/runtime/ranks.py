"""Work that the ranks of a run do together, and lines that only one of them prints.

An OSError on one rank, for example of the file system, is raised on all ranks, so that no rank
waits for another that has failed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Raised:
    """An OSError that `work` raised on a rank, as it is sent to the other ranks."""

    error: OSError


def on_all[T](work: Callable[[], T]) -> list[T]:
    """The results of `work` on all ranks, in the order of the ranks. All ranks must call it.

    If `work` raises an OSError on some ranks, that of the lowest rank is raised on every rank.
    Without torch.distributed this process is the only rank. Results are pickled to be sent.
    """
    mine: T | _Raised
    try:
        mine = work()
    except OSError as error:
        mine = _Raised(error)
    found: list[T | _Raised] = [mine]
    if torch.distributed.is_initialized():
        found *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, mine)
    results: list[T] = []
    for each in found:
        if isinstance(each, _Raised):
            raise each.error
        results.append(each)
    return results


def of_all[T](mine: T) -> list[T]:
    """The values `mine` of all ranks, in the order of the ranks. All ranks must call it."""
    return on_all(lambda: mine)


def on_first[T](work: Callable[[], T]) -> T:
    """The result of `work`, which runs on rank 0 only. All ranks must call it and get the result.

    If `work` raises an OSError on rank 0, it is raised on every rank.
    """
    result = on_all(lambda: work() if _rank() == 0 else None)[0]
    return result  # type: ignore[return-value]  # rank 0's result, which is not the None of others


def my_share[T](items: list[T]) -> list[T]:
    """This rank's share of `items`: items[rank], items[rank + ranks], items[rank + 2 ranks], ...

    `items` has to be the same on all ranks. Without torch.distributed it is returned whole.
    """
    if not torch.distributed.is_initialized():
        return items
    return items[torch.distributed.get_rank() :: torch.distributed.get_world_size()]


def once(key: str) -> bool:
    """True in the first process of the run that asks for `key`, False in all others.

    The process that gets True prints a line that is to be printed once. Needs torch.distributed's
    default process group. If the group's store is gone, because the process that served it has
    exited, every process gets True.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        return store.add(f"megatron_fp4:{key}", 1) == 1
    except torch.distributed.DistError:
        return True


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
