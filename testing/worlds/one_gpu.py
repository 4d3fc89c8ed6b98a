"""Several ranks on one GPU, over gloo. NCCL refuses two ranks on one GPU.

gloo cannot send tensors of a GPU from rank to rank. Here they are copied to the host, sent, and
copied to the GPU. On a machine without a GPU all tensors are copied, to test the copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch import distributed as dist

from megatron_fp4.mcore.runtime import gloo


class _Arrival:
    """The Work of a tensor that is being received, or of one that is being sent.

    into: what receives the tensor; None for one that is sent. on_host: its copy, which is kept
    until then.
    """

    def __init__(self, work: Any, on_host: Tensor, into: Tensor | None) -> None:
        self._work, self._on_host, self._into = work, on_host, into

    def wait(self) -> bool:
        self._work.wait()
        if self._into is not None:
            self._into.detach().copy_(self._on_host)
        return True


def install() -> None:
    """Makes all ranks of this process's world use GPU 0. Call it before Megatron is imported."""
    os.environ["LOCAL_RANK"] = "0"
    gloo.use_one_worker()
    dist.init_process_group = _without_device(dist.init_process_group)
    for name, copying in (
        ("isend", _isend),
        ("irecv", _irecv),
        ("all_reduce", _all_reduce),
        ("all_gather_into_tensor", _all_gather),
        ("all_to_all_single", _all_to_all),
    ):
        copied = copying(getattr(dist, name))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, copied)


def _without_device(upstream: Callable[..., None]) -> Callable[..., None]:
    # With a device torch would make the other groups by splitting the first one.
    def init_process_group(*others: Any, device_id: Any = None, **named: Any) -> None:
        upstream(*others, **named)

    return init_process_group


def _isend(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def isend(tensor: Tensor, *others: Any, **named: Any) -> _Arrival:
        on_host = _copy(tensor)
        return _Arrival(upstream(on_host, *others, **named), on_host, None)

    return isend


def _irecv(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def irecv(tensor: Tensor, *others: Any, **named: Any) -> _Arrival:
        on_host = _copy(tensor)
        return _Arrival(upstream(on_host, *others, **named), on_host, tensor)

    return irecv


def _all_reduce(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> None:
        assert not async_op
        if dist.get_world_size(group) > 1:  # in Megatron's DDP it would wait for others to coalesce
            on_host = _copy(tensor)
            upstream(on_host, op, group)
            tensor.detach().copy_(on_host)

    return all_reduce


def _all_gather(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_into_tensor(
        output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> _Arrival | None:
        on_host = _copy(output_tensor)
        work = upstream(on_host, _copy(input_tensor), group, async_op)
        return _arrived(work, on_host, output_tensor)

    return all_gather_into_tensor


def _all_to_all(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(
        output: Tensor, input: Tensor, *others: Any, **named: Any
    ) -> _Arrival | None:
        on_host = _copy(output)
        work = upstream(on_host, _copy(input), *others, **named)
        return _arrived(work, on_host, output)

    return all_to_all_single


def _arrived(work: Any, on_host: Tensor, into: Tensor) -> _Arrival | None:
    """The arrival of what a collective receives, if it is asynchronous; else copies it."""
    if work is not None:
        return _Arrival(work, on_host, into)
    into.copy_(on_host)
    return None


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()
