"""pretrain_gpt.py that checks each gather of --fp4-param-gather.

    torchrun ... pretrain_gathering.py [WORD] FLAGS ...

After a gather every rank must have the codes and scales that plain PyTorch makes of the weights and
averages of all ranks, gathered as upstream does, and all other parameters of the bucket. Prints
"blocks are cut" if borders of shards cut blocks.

WORD is a situation or a mistake. The situations: with `broadcasts` runs of other parameters are
broadcast from 1 KiB on; `fused-adam` takes the optimizer of testing/fused_adam.py. The mistakes:
`float32` quantizes the main weights without rounding them to BF16; `zeros` completes cut blocks
with zeros; `stale` saves, evaluates in BF16 and hashes without gathering the weights first;
`unturned` gathers nothing when a phase begins that reads W where codes were gathered, or the
reverse.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.gather import sent_shards
from megatron_fp4.mcore.gather.buckets import CodesBucket, GatheringBucketGroup
from megatron_fp4.mcore.gather.sent_shards import WeightRange
from megatron_fp4.mcore.loop import whole_weights
from megatron_fp4.mcore.runtime import cpu
from testing import fused_adam


def main() -> None:
    cpu.install()
    CodesBucket.__init__ = noting(CodesBucket.__init__)  # type: ignore[method-assign]
    CodesBucket.send = checked(CodesBucket.send)  # type: ignore[method-assign]
    if sys.argv[1] in WORDS:
        WORDS[sys.argv.pop(1)]()
    pretrain.main()


def noting(upstream: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, bucket: Any, group: Any, weights: Any, states: Any) -> None:
        upstream(self, bucket, group, weights, states)
        self.checked = bucket, weights
        if self._head and not dist.get_rank():
            print("blocks are cut", file=sys.__stdout__)  # what is printed now is held back

    return init


def checked(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def send(self: CodesBucket) -> Any:
        wanted = expected(self)
        pending = upstream(self)

        def check(_: None) -> None:
            for found, right in wanted:
                assert torch.equal(found, right), "what was gathered differs"

        return pending.then(check)

    return send


@torch.no_grad()
def expected(self: Any) -> list[tuple[Tensor, Tensor]]:
    """(tensor that the gather writes, what it must have) for each parameter of the bucket."""
    bucket, weights = self.checked
    buffer, own = bucket.param_data, self._own
    whole = torch.empty_like(buffer)
    dist.all_gather_into_tensor(whole, buffer[own.low : own.high].clone(), group=self._group)
    found = []
    for parameter, (start, stop) in bucket.param_to_index.items():
        values = whole[start:stop]
        sent = weights.by_parameter.get(parameter)
        if sent is None:
            found.append((buffer[start:stop], values))
            continue
        average = None
        if sent.rounds_to_average:
            average = torch.zeros(stop - start)
            for piece in own.sent:
                if piece.weight is sent:
                    first, last = piece.within
                    average[first:last] = self._average(piece)
            dist.all_reduce(average, group=self._group)
            average = average.view(parameter.shape)
        matrix, quantizer = values.view(parameter.shape), sent.codes.quantizer
        right = quantize_matrix(matrix, quantizer, axis=1, average=average)
        found += [(sent.codes.codes, right.codes), (sent.codes.scales, right.scales)]
    return found


# --- mistakes ----------------------------------------------------------------------------------


def unrounded() -> None:
    def _encoded(self: Any, blocks: WeightRange, values: Tensor, averages: Tensor) -> Any:
        main: Tensor = blocks.weight.weight.main_param  # type: ignore[attr-defined]
        begin = max(self._own.low - blocks.start, 0)  # of this rank's part of the weight
        first, last = blocks.within
        made = blocks.weight.quantized(main[first - begin : last - begin], None)
        return made.codes.view(-1), made.scales.view(-1)

    CodesBucket._encoded = _encoded  # type: ignore[method-assign]


def with_zeros() -> None:
    after_shard = CodesBucket._after_shard

    def _after_shard(self: CodesBucket) -> tuple[Tensor, Tensor]:
        values, averages = after_shard(self)
        return torch.zeros_like(values), averages

    CodesBucket._after_shard = _after_shard  # type: ignore[method-assign]


def stale() -> None:
    whole_weights.gather_weights = lambda model: None


def unturned() -> None:
    def turn_to(self: GatheringBucketGroup, codes: bool) -> None:
        self.gathers_codes = codes

    GatheringBucketGroup.turn_to = turn_to  # type: ignore[method-assign]


def broadcasting() -> None:
    sent_shards.LONG = 1024


WORDS = {
    "broadcasts": broadcasting,
    "float32": unrounded,
    "fused-adam": fused_adam.install,
    "stale": stale,
    "unturned": unturned,
    "zeros": with_zeros,
}


if __name__ == "__main__":
    main()
