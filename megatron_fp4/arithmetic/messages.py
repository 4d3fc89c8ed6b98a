"""The bytes in which a shard of gradients travels between data-parallel ranks.

A message has the codes of all segments of a shard (segments.py), in their order, and after them
their scales, if the form has any. Blocks begin at the first element of each segment, so that a
block never has elements of two parameters or of two shards.

Source: gradients communicated in FP8 with scales are those of arXiv 2310.18313 (FP8-LM, section
2.1), with one scale for a tensor, and of arXiv 2501.17116. Blocks and stochastic rounding are this
package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_fp4.arithmetic.bf16 import Bf16Elements
from megatron_fp4.arithmetic.fp8_blocks import Fp8Blocks, bits_at
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.segments import Segment
from megatron_fp4.errors import ConfigError

SLOTS = 2  # the number of pieces of gradients that travel at a time
PIECE_BYTES = 2**26  # the most bytes of a piece, over all of its shards, without scales
RANK = 2**48  # the distance of two ranks' indices: more than a model has elements
# The elements in which gradients travel, by the value of --fp4-grad-comm. The first is the default.
ELEMENTS = {"fp8": ("e4m3", "e5m2"), "bf16": ("bf16",)}


class GradientForm(Protocol):
    """How gradients travel; see `fp8_blocks.FloatBlocks`.

    dtype: of the codes. bits: of an element, its share of a scale included. block: the elements
    that are encoded together, from the beginning of a segment on.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def bits(self) -> float: ...

    @property
    def block(self) -> int: ...

    def blocks(self, elements: int) -> int: ...

    def encode(self, x: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor: ...


FORMS: dict[str, GradientForm] = {
    "e4m3": Fp8Blocks("e4m3"),
    "e5m2": Fp8Blocks("e5m2"),
    "bf16": Bf16Elements(),
}  # by element


def element_of(kind: str | None, element: str | None, flag: str = "--fp4-grad-comm") -> str | None:
    """The element that the flags --fp4-grad-comm (kind) and --fp4-grad-comm-element name; None
    without them.

    flag: the name of the first, which begins that of the second. Raises ConfigError for an element
    of another kind.
    """
    if element is None:
        return None if kind is None else ELEMENTS[kind][0]
    if kind is None or element not in ELEMENTS[kind]:
        raise ConfigError(
            f"{flag}-element {element} needs {flag} {kind_of(element)}: add it, or leave out "
            f"{flag}-element"
        )
    return element


def kind_of(element: str) -> str:
    """The value of --fp4-grad-comm that has an element."""
    return next(kind for kind, elements in ELEMENTS.items() if element in elements)


def form_name(element: str) -> str:
    """A form in words, such as "FP8 (E4M3)". element: a key of FORMS."""
    kind = kind_of(element)
    return kind.upper() if element == kind else f"{kind.upper()} ({element.upper()})"


@dataclass(frozen=True)
class RankRounding:
    """What identifies the random bits by which a rank rounds what it sends.

    key: seed and step. stream: the number of the random stream. rank: the rank in the data-parallel
    group, below 2^15. Ranks that rounded equal gradients by the same bits would err alike, and the
    error of their mean would not fall with their number.
    """

    key: Key
    stream: int
    rank: int

    def bits(self, segment: Segment, device: torch.device) -> Tensor:
        """The bits of a segment's elements: int32 [len(segment)]."""
        return bits_at(segment.indices(device) + self.rank * RANK, self.key, self.stream)


def length(shard: Sequence[Segment], form: GradientForm) -> int:
    """The bytes of a message."""
    size = form.dtype.itemsize
    return sum(size * len(segment) + form.blocks(len(segment)) for segment in shard)


def of_shard(gradients: Tensor, shard: Sequence[Segment]) -> Tensor:
    """Copies the gradients of a shard out of a buffer, without the padding between its segments.

    gradients: the buffer, one axis. Returns float32 [elements of the shard], the segments in their
    order.
    """
    parts = [gradients[segment.start : segment.stop] for segment in shard]
    return torch.cat([*parts, gradients[:0]]).float()


def encoded(
    values: Tensor,
    shard: Sequence[Segment],
    form: GradientForm,
    rounding: RankRounding | None = None,
) -> Tensor:
    """The message of a shard: uint8 [length(shard, form)].

    values: of the shard, as `of_shard` returns them. rounding: None rounds to nearest.
    """
    codes, scales = [], []
    for segment, x in zip(shard, values.split([len(part) for part in shard]), strict=True):
        bits = None if rounding is None else rounding.bits(segment, x.device)
        found = form.encode(x, bits)
        codes.append(found[0].view(torch.uint8))
        scales.append(found[1])
    return torch.cat([*codes, *scales, values.new_empty(0, dtype=torch.uint8)])


def decoded(message: Tensor, shard: Sequence[Segment], form: GradientForm) -> Tensor:
    """The values of a message, as `of_shard` returns them: float32 [elements of the shard]."""
    lengths = [form.dtype.itemsize * len(segment) for segment in shard]
    blocks = [form.blocks(len(segment)) for segment in shard]
    parts = message.split(lengths + blocks)
    codes, scales = parts[: len(shard)], parts[len(shard) :]
    values = [
        form.decode(code.view(form.dtype), scale) for code, scale in zip(codes, scales, strict=True)
    ]
    return torch.cat([*values, message.new_empty(0, dtype=torch.float32)])


def summed(messages: Sequence[Tensor], shard: Sequence[Segment], form: GradientForm) -> Tensor:
    """The sum of what all ranks sent of a shard: float32, as `decoded`.

    messages: of ranks 0, 1, ..., which are added in this order.
    """
    total = decoded(messages[0], shard, form)
    for message in messages[1:]:
        total += decoded(message, shard, form)
    return total


def store(values: Tensor, shard: Sequence[Segment], gradients: Tensor) -> None:
    """Writes the values of a shard, as `decoded` returns them, to its places in the buffer.

    Padding between segments keeps what it has.
    """
    parts = values.split([len(segment) for segment in shard])
    for segment, part in zip(shard, parts, strict=True):
        gradients[segment.start : segment.stop] = part.to(gradients.dtype)
