"""Compares the kernels of gradients on their way with the reference, on a GPU or in Triton's
interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_messages [WORDS]

Prints a line for each case that differs in a bit. WORDS: choose the cases whose names contain them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, product

import torch
from torch import Tensor

from megatron_fp4.arithmetic import messages as reference
from megatron_fp4.arithmetic.messages import FORMS, GradientForm, RankRounding
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.segments import Place, Segment, segments
from megatron_fp4.kernels import messages as kernels

KEY, STREAM = Key((5 << 40) + 77, 2**33 + 12), 0x9E3779B1  # each has a word beyond int32
RANKS = 3
# (first element in the buffer, element behind the last, place) of each parameter, and the borders
# of the shards. Gaps between parameters are padding.
ALIGNED = (
    [
        (0, 1500 * 8, Place(0, 4000, 8000)),
        (12032, 12032 + 520, Place(2**37, 520, 520)),
        (12608, 12608 + 2048, Place(2**40 + 8, 8, 64)),
        (14720, 14728, Place(16, 8, 8)),
    ],
    [0, 5120, 12288, 15360],
)
UNALIGNED = (
    [
        (0, 1237, Place(0, 1237, 1237)),
        (1237, 1240, Place(1240, 3, 9)),
        (1241, 1241 + 3600, Place(2**35, 12, 37)),
        (5000, 8333, Place(2**41, 3333, 3333)),
    ],
    [0, 3001, 3001, 8340],
)
CASES = {"aligned": ALIGNED, "unaligned": UNALIGNED}


def gradients(size: int, seed: int) -> Tensor:
    """Numbers of many magnitudes, with blocks of zeros, of subnormal numbers, of NaN and Inf, and
    the format's largest numbers."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=draw) * 2.0 ** torch.randint(-20, 9, (size,), generator=draw)
    x[:130] = 0
    x[200], x[700], x[1100] = float("nan"), float("inf"), float("-inf")
    x[1300:1420] *= 2.0**-135
    x[1500:1600] = torch.tensor([448.0, -448.0, 57344.0, 57345.0, 0.0]).repeat(20)
    x[1600:1700] *= 2.0**118
    x[-3:] = torch.tensor([-0.0, 3.4e38, 1e-42])
    return x


def differences(device: str, words: str = "") -> Iterator[str]:
    for (name, (parameters, borders)), (element, form) in product(CASES.items(), FORMS.items()):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            case = f"{name} {element} {str(dtype).removeprefix('torch.')}"
            if words in case:
                shards = segments(parameters, borders)
                sources = [gradients(borders[-1], seed).to(dtype) for seed in range(RANKS)]
                for found in of_case(shards, form, sources, device):
                    yield f"{case}: {found}"


def of_case(
    shards: Sequence[Sequence[Segment]], form: GradientForm, sources: list[Tensor], device: str
) -> Iterator[str]:
    """What differs of what RANKS ranks send of these gradients."""
    lengths = [reference.length(shard, form) for shard in shards]
    starts = [0, *accumulate(lengths)]
    every = kernels.table(shards, form, starts[:-1], torch.device(device))
    sent = []
    for rank, source in enumerate(sources):
        rounding = RankRounding(KEY, STREAM, rank)
        found = torch.full((starts[-1],), 0xAB, dtype=torch.uint8, device=device)
        kernels.encode(every, form, source.to(device), found, rounding)
        wanted = torch.cat(
            [
                reference.encoded(reference.of_shard(source, shard), shard, form, rounding)
                for shard in shards
            ]
        )
        name = f"message of rank {rank}"
        yield from compared(name, in_codes(found.cpu(), form), in_codes(wanted, form))
        sent.append(wanted)
    for owner, shard in enumerate(shards):
        parts = [each[starts[owner] : starts[owner + 1]] for each in sent]
        yield from of_sums(f"sums of shard {owner}", shard, form, parts, sources[0], device)


def of_sums(
    name: str,
    shard: Sequence[Segment],
    form: GradientForm,
    parts: list[Tensor],
    buffer: Tensor,
    device: str,
) -> Iterator[str]:
    """What differs of the sums of a shard, in a buffer like `buffer` and as a message."""
    total = reference.summed(parts, shard, form)
    wanted = buffer.clone()
    reference.store(total, shard, wanted)
    arrived, length = torch.cat(parts).to(device), len(parts[0])
    of = kernels.table([shard], form, [0], torch.device(device))
    found = buffer.clone().to(device)
    kernels.write_sums(of, form, arrived, len(parts), length, found)
    yield from compared(name, found.cpu(), wanted)
    rounding = RankRounding(KEY, STREAM, len(parts) - 1)
    after = torch.cat([reference.encoded(total, shard, form, rounding), *parts[1:]])
    kernels.encode_sums(of, form, arrived, len(parts), length, rounding)
    yield from compared(f"encoded {name}", in_codes(arrived.cpu(), form), in_codes(after, form))


def in_codes(messages: Tensor, form: GradientForm) -> Tensor:
    """Messages as elements of the dtype of their codes: uint8 for FP8, whose bytes PyTorch cannot
    compare as FP8, and BF16 otherwise."""
    return messages.view(torch.uint8 if form.dtype.itemsize == 1 else form.dtype)


def compared(name: str, found: Tensor, wanted: Tensor) -> Iterator[str]:
    """NaN may have any bits."""
    same = (found == wanted) & (found.signbit() == wanted.signbit())
    same |= found.isnan() & wanted.isnan()
    if off := int((~same).sum()):
        yield f"{off} of {same.numel()} of the {name} differ"


def main() -> None:
    print("\n".join(differences("cpu", " ".join(sys.argv[1:]))))


if __name__ == "__main__":
    main()
