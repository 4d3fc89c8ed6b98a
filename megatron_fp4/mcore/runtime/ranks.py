"""What the ranks of a run do in common: work on files that all go on from or all fail at, and lines
that one of them prints."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Raised:
    error: OSError


def on_all[T](work: Callable[[], T]) -> list[T]:
    """What `work` returned on each rank, by rank. All ranks must call it.

    Raises on every rank the OSError that it raised on the first rank where it did. Without process
    groups, this process is the only rank.
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


def on_first[T](work: Callable[[], T]) -> T:
    """What `work` returned on rank 0, the only one that runs it. All ranks must call it.

    Raises on every rank the OSError that it raised there.
    """
    result = on_all(lambda: work() if _rank() == 0 else None)[0]
    return result  # type: ignore[return-value]  # rank 0's


def my_share[T](items: list[T]) -> list[T]:
    """Every how-many-ranks-th of `items`, beginning with this rank's number."""
    if not torch.distributed.is_initialized():
        return items
    return items[torch.distributed.get_rank() :: torch.distributed.get_world_size()]


def once(key: str) -> bool:
    """True in the first process of the run that asks for `key`, False in the others: it may print.

    Needs the process group; where its store has gone with the process that kept it, True in all
    that ask.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        return store.add(f"megatron_fp4:{key}", 1) == 1
    except torch.distributed.DistError:
        return True


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
