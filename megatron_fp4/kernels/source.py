"""How the quantize kernels read a matrix, in Triton: a tile of it, or a sample.

The matrix is in memory as BF16 or as codes, or it is a SwiGLU, the gradient of one, or an RMSNorm,
which is computed here (READS):

    ""                      x.matrix, as it is
    "swiglu"                the SwiGLU of x.matrix, which has twice as many columns
    "swiglu gradient"       the gradient of x.y, in BF16 or E4M3; x.matrix is the gradient of its
                            SwiGLU, which has half as many columns
    "normed"                the RMSNorm of x.matrix, from x.factors and x.weight
    "normed, zero-centered" the same, with gains of 1 + x.weight
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fp4.kernels import decode
from megatron_fp4.kernels.rms_norm import normed_words
from megatron_fp4.kernels.swiglu import activated_words, gradient_words


@triton.jit
def loaded(ptr, rows, columns, n_rows, n_columns, EVEN: tl.constexpr):
    """The elements at [rows, columns] of a row-major matrix; zeros outside of it.

    rows, columns: int32 tensors of three axes, which are broadcast to each other. n_rows,
        n_columns: the size of the matrix. EVEN: whether all indices are inside, so that no mask is
        needed.

    The hint to the compiler spreads the threads of a warp over the last axis and then over the
    first. Triton orders the axes by how many addresses are contiguous along them, and the order of
    axes with equal numbers differs between Triton 3.6 and 3.9. The hint says 2 for the first axis,
    which nothing else reads, so that no two are equal.
    """
    K: tl.constexpr = columns.shape[2]
    places = ptr + rows.to(tl.int64) * n_columns + columns
    places = tl.max_contiguous(places, [2 if K > 2 else 1, 1, K])
    if EVEN:
        return tl.load(places)
    return tl.load(places, mask=(rows < n_rows) & (columns < n_columns), other=0)


@triton.jit
def read_tile(
    x,
    rows,
    column0,
    n_rows,
    n_columns,
    PACKED: tl.constexpr,
    READS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Reads a tile of COLUMNS columns, or computes it from what is read (READS).

    Returns words of two BF16 [rows / 8, 8, COLUMNS / 2].

    x: a Source with n_rows rows and n_columns columns.
    rows: int32 [rows / 8, 8], the indices of the tile's rows. column0: the first column. PACKED:
    the block size of the source's codes; 0 if it is BF16. EVEN: whether tiles fill the matrix.
    """
    at_rows = rows[:, :, None]
    if PACKED > 0:
        at = column0 // 8 + tl.arange(0, COLUMNS // 8)[None, None, :]
        # Without this hint a thread would load more than the one word of its eight columns.
        at = tl.multiple_of(at, [1, 1, 1])
        words = loaded(x.matrix, at_rows, at, n_rows, n_columns // 8, EVEN)
        at = column0 // PACKED + tl.arange(0, COLUMNS // PACKED)[None, None, :]
        byte = loaded(x.scales, at_rows, at, n_rows, n_columns // PACKED, EVEN)
        return decode.pairs(words, byte.to(tl.int32), PACKED, INTERPRETED)
    at = column0 // 2 + tl.arange(0, COLUMNS // 2)[None, None, :]
    if READS == "swiglu gradient":
        half = n_columns // 2
        is_left = column0 < half  # where the gate's gradient is
        at = at if is_left else at - half // 2
        gradient = loaded(x.matrix, at_rows, at, n_rows, half // 2, EVEN)
        # Without this hint a thread would load eight words of two E4M3, and hand half of them on.
        at = tl.multiple_of(at, [1, 1, 4])
        gate = loaded(x.y, at_rows, at, n_rows, half, EVEN)
        if is_left:
            up = loaded(x.y, at_rows, at + half // 2, n_rows, half, EVEN)
            pairs, _ = gradient_words(gradient, gate, up, INTERPRETED)
        else:
            _, pairs = gradient_words(gradient, gate, gate, INTERPRETED)  # which needs no `up`
        return pairs
    if READS == "swiglu":
        gate = loaded(x.matrix, at_rows, at, n_rows, n_columns, EVEN)
        up = loaded(x.matrix, at_rows, at + n_columns // 2, n_rows, n_columns, EVEN)
        return activated_words(gate, up, INTERPRETED)
    pairs = loaded(x.matrix, at_rows, at, n_rows, n_columns // 2, EVEN)
    if READS == "normed" or READS == "normed, zero-centered":
        factor = tl.load(x.factors + at_rows, mask=at_rows < n_rows, other=0)
        # In every row, so that the threads that have the elements load their weights too.
        weight = loaded(x.weight, at_rows * 0, at, 1, n_columns // 2, EVEN)
        pairs = normed_words(pairs, factor, weight, READS != "normed", INTERPRETED)
    return pairs


@triton.jit
def sampled(x, rows, words, n_columns, READS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Words of two BF16 at some places of a Source that is not packed.

    rows: int64, of the words. words: their indices in the row, which has n_columns / 2 of them.
    """
    matrix = x.matrix.to(tl.pointer_type(tl.int32))
    if READS == "swiglu":
        gate = tl.load(matrix + rows * n_columns + words)
        up = tl.load(matrix + rows * n_columns + words + n_columns // 2)
        return activated_words(gate, up, INTERPRETED)
    if READS == "swiglu gradient":
        half = n_columns // 4  # in words
        at = words % half
        gradient = tl.load(matrix + rows * half + at)
        gate = tl.load(x.y + rows * (2 * half) + at)
        up = tl.load(x.y + rows * (2 * half) + at + half)
        of_gate, of_up = gradient_words(gradient, gate, up, INTERPRETED)
        return tl.where(words < half, of_gate, of_up)
    pairs = tl.load(matrix + rows * (n_columns // 2) + words)
    if READS == "normed" or READS == "normed, zero-centered":
        factor, weight = tl.load(x.factors + rows), tl.load(x.weight + words)
        return normed_words(pairs, factor, weight, READS != "normed", INTERPRETED)
    return pairs
