"""pretrain_gpt.py whose data-parallel ranks exchange gradients in FP8, and check each exchange.

    torchrun ... pretrain_exchanging.py FORM FLAGS ...

FORM: e4m3, e5m2, or none for upstream's collectives. A mistake may follow, as in `e4m3:alike`:
`alike` rounds with the bits of rank 0 on all ranks; `keeps` leaves the owner of a shard with its
own sums, where the other ranks have what it sent; `apart` rounds what tensor-parallel ranks hold
alike with other bits on each of them.

Before a bucket is sent, all ranks' gradients of it are gathered in float32. What the exchange must
give is computed from them on every rank.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args, training
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.fp8_blocks import Fp8Blocks
from megatron_fp4.arithmetic.messages import Rounding
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.exchange import buckets
from megatron_fp4.mcore.exchange import places as places_of
from megatron_fp4.mcore.exchange.buckets import Exchange, Fp8BucketGroup
from megatron_fp4.mcore.exchange.places import places, sharded
from megatron_fp4.mcore.runtime import cpu


def main() -> None:
    cpu.install()
    element, _, mistake = sys.argv.pop(1).partition(":")
    if element != "none":
        training.get_megatron_optimizer = exchanging(training.get_megatron_optimizer, element)
        Fp8BucketGroup._send = checked(Fp8BucketGroup._send)  # type: ignore[method-assign]
    if mistake:
        MISTAKES[mistake]()
    pretrain.main()


def exchanging(upstream: Callable[..., Any], element: str) -> Callable[..., Any]:
    def get_megatron_optimizer(config: Any, model: list[Any], *given: Any, **named: Any) -> Any:
        args = get_args()
        key = lambda: Key(args.seed, args.curr_iteration or 0)  # noqa: E731
        where = places([chunk.module for chunk in model])
        buckets.install(model, Exchange(Fp8Blocks(element), key, where))
        return upstream(config, model, *given, **named)

    return get_megatron_optimizer


# --- what must come out ------------------------------------------------------------------------


def checked(send: Callable[..., Any]) -> Callable[..., Any]:
    def _send(self: Any, bucket: Any, group: Any, to_all: bool) -> Any:
        every = gathered(bucket.grad_data.float(), group)
        pending = send(self, bucket, group, to_all)
        wanted = expected(self, bucket, every)
        replicated = {
            self.exchange.places[parameter]
            for parameter in bucket.params_list
            if not getattr(parameter, "tensor_model_parallel", False)
            and sharded(parameter).copies == 1
        }

        def check(_: None) -> None:
            own = self.exchange.shards_of(bucket, group.size())
            if self.ddp_config.use_distributed_optimizer and not to_all:
                own = [own[group.rank()]]
            for shard in own:
                found, right = (messages.of_shard(x, shard) for x in (bucket.grad_data, wanted))
                assert torch.equal(found, right.to(bucket.grad_data.dtype).float()), "sums differ"
            if not self.ddp_config.use_distributed_optimizer:
                assert alike(bucket.grad_data, group), "ranks differ"
            tensor_parallel = mpu.get_tensor_model_parallel_group()
            for shard in own:
                for segment in shard:
                    if segment.place in replicated:
                        part = bucket.grad_data[segment.start : segment.stop]
                        assert alike(part, tensor_parallel), "tensor-parallel ranks differ"

        return pending.then(check)

    return _send


def alike(buffer: Tensor, group: Any) -> bool:
    ranks = gathered(buffer, group)
    return all(torch.equal(ranks[0], one) for one in ranks[1:])


def gathered(buffer: Tensor, group: Any) -> list[Tensor]:
    every = [torch.empty_like(buffer) for _ in range(group.size())]
    dist.all_gather(every, buffer.contiguous(), group=group)
    return every


def expected(group: Any, bucket: Any, every: list[Tensor]) -> Tensor:
    """The buffer that an exchange must give: for each shard the sum of what all ranks send of it.

    group: a Fp8BucketGroup. bucket: one of its buckets. every: the float32 gradients of the bucket
    that each rank has before it sends them.
    """
    exchange, ranks = group.exchange, len(every)
    form, key, wanted = exchange.form, exchange.key(), torch.zeros_like(every[0])
    for owner, shard in enumerate(exchange.shards_of(bucket, ranks)):
        sent = [
            messages.encoded(
                messages.of_shard(one, shard), shard, form, Rounding(key, buckets.SENT, rank)
            )
            for rank, one in enumerate(every)
        ]
        total = torch.zeros(sum(map(len, shard)))
        for message in sent:
            total = total + messages.decoded(message, shard, form)
        if not group.ddp_config.use_distributed_optimizer:
            rounding = Rounding(key, buckets.SUMMED, owner)
            total = messages.decoded(messages.encoded(total, shard, form, rounding), shard, form)
        messages.store(total, shard, wanted)
    return wanted


# --- mistakes ----------------------------------------------------------------------------------


def round_alike() -> None:
    buckets.Rounding = lambda key, stream, rank: Rounding(key, stream, 0)  # type: ignore


def keep_own_sums() -> None:
    share = Fp8BucketGroup._share

    def _share(self: Any, total: Tensor, shards: Any, buffer: Tensor, group: Any, key: Key) -> None:
        share(self, total, shards, buffer, group, key)
        messages.store(total, shards[group.rank()], buffer)

    Fp8BucketGroup._share = _share  # type: ignore[method-assign]


def keep_apart() -> None:
    at = places_of._place

    def _place(shard: Any, begin: int) -> Any:
        return at(shard, begin + 2**20 * mpu.get_tensor_model_parallel_rank())

    places_of._place = _place


MISTAKES = {"apart": keep_apart, "alike": round_alike, "keeps": keep_own_sums}


if __name__ == "__main__":
    main()
