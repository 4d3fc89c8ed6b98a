"""The arguments that several kernels take, as named tuples.

Lower-case fields are pointers and integers, of which each launch has its own; upper-case ones are
constants of the compiled kernel. No field is called `values` or `type`, which are attributes of
Triton's own tuples.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Source(NamedTuple):
    """The matrix that is quantized.

    matrix: BF16 in words of two, or words of eight codes. scales: of the codes.
    Of a matrix that is computed as it is read (source.py): y: BF16 or E4M3 in words of two, whose
    gradient through a SwiGLU is quantized. factors: float32, of each row, and weight: BF16 in words
    of two, of an RMSNorm.
    """

    matrix: Any
    scales: Any
    y: Any
    factors: Any
    weight: Any


class Output(NamedTuple):
    """Where one quantized copy of a matrix is written.

    codes: words of eight codes. scales: bytes. carriers: words of four FP8 elements, and counts:
    int32, see `operands.Carriers`; both 0 if no carriers are written. stream: the number of the
    random stream that rounds this copy.
    """

    codes: Any
    scales: Any
    carriers: Any
    counts: Any
    stream: Any


class Random(NamedTuple):
    """What the random bits of a matrix depend on, beside the stream.

    rows, groups: int64, the place of each row, and of each group of eight columns, in the unsharded
    matrix. groups_per_row: of the unsharded matrix. step: the training step; step_in_memory: int64
    [] that holds it, if IN_MEMORY. seed_low, seed_high: the words of the seed.
    """

    rows: Any
    groups: Any
    groups_per_row: Any
    step: Any
    step_in_memory: Any
    seed_low: Any
    seed_high: Any


class Rounding(NamedTuple):
    """How a matrix is quantized: the fields of `Quantizer` that the kernels read.

    BLOCK: the number of elements that share a scale, 16 or 32. RULE: the quantizer's `rule`, by
    which a block's E8M0 scale follows from its largest magnitude. STOCHASTIC, AVERAGED: whether its
    `rounding` is stochastic, or ema. PRESCALE: its `prescale`.
    """

    BLOCK: int
    RULE: str
    STOCHASTIC: bool
    AVERAGED: bool
    PRESCALE: float


class Draws(NamedTuple):
    """How random bits are drawn: whether the step is read from memory, whether groups of columns
    have places of their own, and whether both copies of the matrix draw the same bits (the stream
    is then that of the copy along the rows)."""

    IN_MEMORY: bool
    HAS_GROUPS: bool
    SHARED: bool = False


class Tile(NamedTuple):
    """The part of a matrix that a program reads. EVEN: whether tiles fill the matrix."""

    ROWS: int
    COLUMNS: int
    EVEN: bool
