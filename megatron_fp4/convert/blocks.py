"""Goes through tensors in blocks, so that computing in float64 takes little memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

ELEMENTS = 1 << 18  # of a block


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same elements of tensors of one size, in one axis, block by block."""
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    yield from zip(*(tensor.split(ELEMENTS) for tensor in flat), strict=True)
