"""pretrain_gpt.py that checks each exchange of gradients between data-parallel ranks.

    torchrun ... pretrain_exchanging.py [WORD ...] FLAGS ...

The flags are those of pretrain_gpt.py, with --fp4-grad-comm. Words before them are a mistake or a
situation (testing/exchanges.py has both); `bytes=N`, the most bytes of a piece; `kernels`, so that
kernels make and read messages; or `fused-adam` (testing/fused_adam.py).

Before a bucket is sent, all ranks' gradients of it are gathered as they are. What the exchange must
give is computed from them on every rank. Ranks that do not sum what they round with each other must
round it with the same random bits if it is the same, and with others if it differs.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.optimizer import optimizer
from megatron.training import get_args
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic import messages
from megatron_fp4.arithmetic.messages import RankRounding
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.segments import Place, Segment
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.exchange import slots, start
from megatron_fp4.mcore.exchange.buckets import ExchangingBucketGroup, ranks_of, shards_of
from megatron_fp4.mcore.exchange.kernel_coding import KernelCoding
from megatron_fp4.mcore.runtime import cpu
from testing import fused_adam
from testing.exchanges import MISTAKES, SITUATIONS

PLACES: dict[Any, Any] = {}  # of the parameters, once the exchange has begun
SQUARES: list[Tensor] = []  # of the sums that this rank owns, in this step


def main() -> None:
    cpu.install()
    words = []
    while not sys.argv[1].startswith("--"):
        words.append(sys.argv.pop(1))
    for word in words:
        if word.startswith("bytes="):
            messages.PIECE_BYTES = int(word.removeprefix("bytes="))
        elif word == "kernels":
            slots.coding_on = lambda device: KernelCoding()
        elif word == "fused-adam":
            fused_adam.install()
        elif word in MISTAKES:
            MISTAKES[word]()
    start.install = remembering(start.install)  # type: ignore[attr-defined]
    group: Any = ExchangingBucketGroup
    group._prepare = seen(
        group._prepare, [SITUATIONS[word] for word in words if word in SITUATIONS]
    )
    group._send = checked(group._send)
    group.finish_grad_sync = gathering(group.finish_grad_sync)
    optimizer.get_grad_norm_fp32 = compared(optimizer.get_grad_norm_fp32)
    pretrain.main()


def remembering(install: Callable[..., Any]) -> Callable[..., Any]:
    def installing(chunks: Any, form: Any, key: Any, places: Any) -> Any:
        PLACES.update(places)
        stages = of_stages([*places.values()])
        assert len(stages) == len(set(stages)), "pipeline stages share noise"
        return install(chunks, form, key, places)

    return installing


# --- what must come out ------------------------------------------------------------------------


def seen(prepare: Callable[..., None], situations: list[Callable[..., None]]) -> Any:
    """`_prepare` that gathers the gradients of all ranks before it."""

    def _prepare(self: Any) -> None:
        for bucket in self.buckets:
            for parameter in bucket.params_with_extra_main_grads:
                parameter.main_grad_copy_in_grad_buffer.copy_(parameter.main_grad)
        for bucket in self.buckets:
            for situation in situations:
                situation(bucket)
            factor = bucket.gradient_scaling_factor
            bucket.every = [
                (each * factor).float() for each in gathered(true_gradients(bucket), ranks_of(self))
            ]
        prepare(self)

    return _prepare


def true_gradients(bucket: Any) -> Tensor:
    """The gradients that a bucket has once no CUDA graph adds to them any more.

    Where a test pretends that a graph is still running (`exchanges.Replay`), the bucket's buffer
    has zeros until then.
    """
    return getattr(bucket, "true_gradients", bucket.grad_data)


def checked(send: Callable[..., Any]) -> Any:
    def _send(self: Any) -> Any:
        wanted = [expected(self, bucket) for bucket in self.buckets]
        pending = send(self)

        def check(_: None) -> None:
            for bucket, right in zip(self.buckets, wanted, strict=True):
                bucket.wanted = right
                compare(self, bucket)

        return pending.then(check)

    return _send


def compare(self: Any, bucket: Any) -> None:
    """Whether a bucket has what an exchange must give."""
    group, is_sharded = ranks_of(self), self.ddp_config.use_distributed_optimizer
    every = shards_of(bucket, group.size(), PLACES)
    own = [every[group.rank()]] if is_sharded else every
    for shard in own:
        found, right = (messages.of_shard(x, shard) for x in (bucket.grad_data, bucket.wanted))
        right = right.to(bucket.grad_data.dtype).float()
        assert torch.equal(found.nan_to_num(7), right.nan_to_num(7)), "sums differ"
    SQUARES.append(messages.of_shard(bucket.grad_data, every[group.rank()]).double().square().sum())
    if not is_sharded:
        assert alike(bucket.grad_data.nan_to_num(7), group), "ranks differ"
    if mpu.get_tensor_model_parallel_world_size() > 1:
        for segment in (segment for shard in own for segment in shard):
            compare_tensor_parallel_ranks(bucket, segment)


def compare_tensor_parallel_ranks(bucket: Any, segment: Segment) -> None:
    """Whether tensor-parallel ranks keep alike what they had alike, and draw bits of their own for
    what they had not."""
    part, group = slice(segment.start, segment.stop), mpu.get_tensor_model_parallel_group()
    if alike(torch.stack([one[part] for one in bucket.every]).nan_to_num(7), group):
        assert alike(bucket.grad_data[part].nan_to_num(7), group), "tensor-parallel ranks differ"
    else:
        first = gathered(torch.tensor([segment.place.first], device=bucket.grad_data.device), group)
        assert len({*map(int, first)}) == group.size(), "tensor-parallel ranks share noise"


def gathering(finish: Callable[..., None]) -> Any:
    """`finish_grad_sync` after which all ranks have all sums, where they are forced to."""

    def finish_grad_sync(self: Any, force_all_reduce: bool = False) -> None:
        finish(self, force_all_reduce)
        for bucket in self.buckets if force_all_reduce else ():
            for shard in shards_of(bucket, ranks_of(self).size(), PLACES):
                found, right = (
                    messages.of_shard(x, shard) for x in (bucket.grad_data, bucket.wanted)
                )
                assert torch.equal(found, right.to(bucket.grad_data.dtype).float()), "not gathered"

    return finish_grad_sync


def compared(norm: Callable[..., float]) -> Callable[..., float]:
    """The norm by which Megatron clips, compared with that of the sums in float64.

    Only without tensor, pipeline and expert parallelism, where the sums of squares that the ranks
    own add up to that of the model, and where nothing divides the sums before the norm is taken.
    """

    def get_grad_norm_fp32(*given: Any, **named: Any) -> float:
        found = norm(*given, **named)
        args = get_args()
        divides = args.fp16 or args.calculate_per_token_loss
        whole = mpu.get_model_parallel_group().size() == 1 and not divides
        if whole and mpu.get_expert_model_parallel_world_size() == 1 and SQUARES:
            total = torch.stack(SQUARES).sum()
            dist.all_reduce(total, group=mpu.get_data_parallel_group())
            right = total.sqrt().item()
            assert not abs(found - right) > 1e-5 * right, f"the norm is {found}, not {right}"
        SQUARES.clear()
        return found

    return get_grad_norm_fp32


def alike(buffer: Tensor, group: Any) -> bool:
    ranks = gathered(buffer, group)
    return all(torch.equal(ranks[0], one) for one in ranks[1:])


def of_stages(places: list[Place]) -> list[Place]:
    """The places of the parameters of all pipeline stages."""
    group = mpu.get_pipeline_model_parallel_group()
    every: list[list[Place]] = [[] for _ in range(group.size())]
    dist.all_gather_object(every, places, group=group)
    return [place for each in every for place in each]


def gathered(buffer: Tensor, group: Any) -> list[Tensor]:
    every = [torch.empty_like(buffer) for _ in range(group.size())]
    dist.all_gather(every, buffer.contiguous(), group=group)
    return every


def expected(group: Any, bucket: Any) -> Tensor:
    """The buffer that an exchange must give: for each shard the sum of what all ranks send of it,
    whole, without pieces."""
    exchange, every = group.exchange, bucket.every
    form, key = exchange.pieces[bucket][0].form, of_this_step(exchange.key())
    wanted = torch.zeros_like(every[0])
    for owner, shard in enumerate(shards_of(bucket, len(every), PLACES)):
        total = torch.zeros(sum(map(len, shard)), device=wanted.device)
        for rank, one in enumerate(every):
            rounding = RankRounding(key, slots.SENT, rank)
            sent = messages.encoded(messages.of_shard(one, shard), shard, form, rounding)
            total = total + messages.decoded(sent, shard, form)
        if not group.ddp_config.use_distributed_optimizer:
            rounding = RankRounding(key, slots.SUMMED, owner)
            total = messages.decoded(messages.encoded(total, shard, form, rounding), shard, form)
        messages.store(total, shard, wanted)
    return wanted


def of_this_step(key: Key) -> Key:
    """The key, if it is that of this step, or of one of the steps of a calibration after it, which
    begin at 2^31 (docs/numerics.md, Random bits)."""
    args = get_args()
    after = int(key.step) - args.curr_iteration
    assert key.seed == args.fp4_seed and (after == 0 or 0 <= after - 2**31 < 100), key
    return key


if __name__ == "__main__":
    main()
