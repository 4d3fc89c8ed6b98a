"""Mistakes in the exchange of gradients, and situations in which it has to be right.

Each mistake is a function that puts it into the exchange. A situation is a function of a bucket,
which changes it before it is sent.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.optimizer import optimizer
from torch import Tensor
from torch import distributed as dist

from benchmarks.traffic import Traffic
from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.messages import RankRounding
from megatron_fp4.mcore.exchange import coding, places, slots
from megatron_fp4.mcore.exchange.buckets import ExchangingBucketGroup
from megatron_fp4.mcore.exchange.slots import _Flight


def rounds_alike() -> None:
    """All ranks round with the bits of rank 0."""
    changed = functools.partial(RankRounding, rank=0)
    slots.RankRounding = lambda key, stream, _: changed(key, stream)  # type: ignore[misc,assignment]


def keeps_own_sums() -> None:
    """The owner of a shard goes on with its sums, the other ranks with what it sent."""
    own: list[tuple[Tensor, Any]] = []
    finish = _Flight.finish

    def summed(arrived: Any, shard: Any, form: Any) -> Tensor:
        own.append((messages.summed(arrived, shard, form), shard))
        return own[-1][0]

    def finish_and_keep(self: Any) -> None:
        finish(self)
        messages.store(*own.pop(0), self._piece.gradients)

    changed = types.SimpleNamespace(**vars(messages) | {"summed": summed})
    coding.messages = changed  # type: ignore[attr-defined,assignment]
    _Flight.finish = finish_and_keep  # type: ignore[method-assign]


def rounds_apart() -> None:
    """What tensor-parallel ranks hold alike is rounded with other bits on each of them."""
    at = places._place

    def _place(shard: Any, begin: int) -> Any:
        return at(shard, begin + 2**20 * mpu.get_tensor_model_parallel_rank())

    places._place = _place


def shares_noise() -> None:
    """What ranks of tensor and pipeline parallelism hold in common is rounded with the same bits,
    also where their gradients differ and are summed later."""
    places._is_summed = lambda *given: False
    places._name_in_vector = lambda name, parameter: name


def takes_other_scales() -> None:
    """Codes are decoded with the scales of the rank before."""

    def summed(arrived: list[Tensor], shard: Any, form: Any) -> Tensor:
        codes = sum(len(segment) for segment in shard) * form.dtype.itemsize
        others = [arrived[-1], *arrived[:-1]]
        pairs = zip(arrived, others, strict=True)
        mixed = [torch.cat([one[:codes], other[codes:]]) for one, other in pairs]
        return messages.summed(mixed, shard, form)

    changed = types.SimpleNamespace(**vars(messages) | {"summed": summed})
    coding.messages = changed  # type: ignore[attr-defined,assignment]


def shifts_blocks() -> None:
    """A segment is cut within a block, so that later blocks begin elsewhere."""
    from megatron_fp4.mcore.exchange import buckets

    pieces = buckets.pieces
    buckets.pieces = lambda shards, most, block: pieces(shards, most - most % 8 - 8, 8)  # type: ignore


def scales_twice() -> None:
    prepare = ExchangingBucketGroup._prepare

    def _prepare(self: Any) -> None:
        prepare(self)
        for bucket in self.buckets:
            bucket.grad_data *= bucket.gradient_scaling_factor

    ExchangingBucketGroup._prepare = _prepare  # type: ignore[method-assign]


class Late:
    """An all-to-all that arrives when it is waited for, and not before."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.start = start

    def wait(self) -> None:
        self.start().wait()


def sums_early() -> None:
    """Shards are summed before they have arrived."""
    sum_, send = _Flight.sum, dist.all_to_all_single

    def late(*given: Any, **named: Any) -> Late:
        given[0].zero_()
        return Late(lambda: send(*given, **named))

    def sum_early(self: Any) -> None:
        work, self._work = self._work, Late(lambda: types.SimpleNamespace(wait=lambda: None))
        sum_(self)
        work.wait()

    changed = types.SimpleNamespace(**vars(dist) | {"all_to_all_single": late})
    slots.dist = changed  # type: ignore[attr-defined,assignment]
    _Flight.sum = sum_early  # type: ignore[method-assign]


def waits_at_once() -> None:
    """A bucket is waited for before the next one's gradients are computed."""
    send = slots.Slots.send

    def send_and_wait(self: Any, *given: Any) -> Any:
        pending = send(self, *given)
        pending.wait()
        return pending

    slots.Slots.send = send_and_wait  # type: ignore[method-assign, assignment]


def takes_the_norm_before_the_sum() -> None:
    """The norm by which gradients are clipped is that of what each rank had."""
    local: list[Tensor] = []
    prepare = ExchangingBucketGroup._prepare

    def _prepare(self: Any) -> None:
        prepare(self)
        local.extend(bucket.grad_data.double().square().sum() for bucket in self.buckets)

    def norm(*given: Any, **named: Any) -> float:
        total = torch.stack(local).sum()
        local.clear()
        dist.all_reduce(total)
        return float(total.sqrt().item())

    ExchangingBucketGroup._prepare = _prepare  # type: ignore[method-assign]
    optimizer.get_grad_norm_fp32 = norm


def hides_overflows() -> None:
    """What is not finite is replaced before it is encoded."""
    of_shard = messages.of_shard
    changed = vars(messages) | {"of_shard": lambda *given: of_shard(*given).nan_to_num(0, 0, 0)}
    coding.messages = types.SimpleNamespace(**changed)  # type: ignore[attr-defined,assignment]


def gathers_nothing() -> None:
    """Ranks that need all sums get those of their own shards."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Upstream

    ExchangingBucketGroup.finish_grad_sync = (  # type: ignore[method-assign]
        lambda self, force_all_reduce=False: Upstream.finish_grad_sync(self, force_all_reduce)
    )


def ignores_graphs() -> None:
    """Gradients are sent while a CUDA graph still adds to them."""
    torch.cuda.current_stream().wait_event = lambda event: None  # type: ignore[method-assign]


def tells_events() -> None:
    """Makes rank 0 print a line when a parameter's gradient is ready, when a piece is sent, when it
    has arrived, and when the optimizer's step begins. This is no mistake: nothing else changes."""
    ready, finish = ExchangingBucketGroup.register_grad_ready, _Flight.finish

    def tell(event: str) -> None:
        if dist.get_rank() == 0:
            print(f"event: {event}", flush=True)

    class Told(_Flight):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            tell("sent")

        def finish(self) -> None:
            finish(self)
            tell("arrived")

    def register_grad_ready(self: Any, *given: Any, **named: Any) -> None:
        tell("ready")
        ready(self, *given, **named)

    norm = optimizer.get_grad_norm_fp32

    def get_grad_norm_fp32(*given: Any, **named: Any) -> float:
        tell("step")
        return norm(*given, **named)

    slots._Flight = Told  # type: ignore[misc,assignment]
    ExchangingBucketGroup.register_grad_ready = register_grad_ready  # type: ignore[method-assign]
    optimizer.get_grad_norm_fp32 = get_grad_norm_fp32


def tells_traffic() -> None:
    """No mistake: rank 0 prints the bytes that it sends of gradients in a step, as they are counted
    by the operators of torch.distributed."""
    traffic, norm = Traffic(), optimizer.get_grad_norm_fp32

    def counting(function: Callable[..., None]) -> Any:
        def counted(*given: Any, **named: Any) -> None:
            with traffic:
                function(*given, **named)

        return counted

    def get_grad_norm_fp32(*given: Any, **named: Any) -> float:
        if dist.get_rank() == 0:
            print(f"traffic: {json.dumps(traffic.sent)}", flush=True)
        traffic.sent.clear()
        return norm(*given, **named)

    _Flight.__init__ = counting(_Flight.__init__)  # type: ignore[method-assign]
    _Flight.sum = counting(_Flight.sum)  # type: ignore[method-assign]
    optimizer.get_grad_norm_fp32 = get_grad_norm_fp32


MISTAKES: dict[str, Callable[[], None]] = {
    "alike": rounds_alike,
    "keeps": keeps_own_sums,
    "apart": rounds_apart,
    "shared": shares_noise,
    "scales": takes_other_scales,
    "shifted": shifts_blocks,
    "twice": scales_twice,
    "early": sums_early,
    "at-once": waits_at_once,
    "norm": takes_the_norm_before_the_sum,
    "finite": hides_overflows,
    "ungathered": gathers_nothing,
    "unwaited": ignores_graphs,
    "events": tells_events,
    "traffic": tells_traffic,
}


# --- situations --------------------------------------------------------------------------------


class Replay:
    """The event of a CUDA graph that is still being replayed: until the event is waited for, the
    gradients are not there."""

    def __init__(self, bucket: Any) -> None:
        self.bucket, bucket.true_gradients = bucket, bucket.grad_data.clone()
        bucket.grad_data.zero_()

    def complete(self) -> None:
        self.bucket.grad_data.copy_(self.bucket.true_gradients)


def replays(bucket: Any) -> None:
    """CUDA graphs still add to the gradients of a bucket when it is sent."""
    stream: Any = torch.cuda.current_stream()
    if not hasattr(stream, "waits"):
        stream.waits = True
        if "wait_event" not in vars(stream):
            stream.wait_event = lambda event: event.complete()
    event = Replay(bucket)
    for parameter in bucket.params_list:
        parameter._cudagraph_wgrad_ready_event = event


def overflows(bucket: Any) -> None:
    """Sets an element of the gradients of rank 1 to Inf in the second step."""
    from megatron.training import get_args

    if dist.get_rank() == 1 and get_args().curr_iteration == 1:
        bucket.grad_data[3] = torch.inf


SITUATIONS: dict[str, Callable[[Any], None]] = {"replays": replays, "overflows": overflows}
