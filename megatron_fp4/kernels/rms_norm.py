"""RMSNorm and its gradients in Triton, as arithmetic/rms_norm.py defines them.

The quantize kernel multiplies by factors and gain as it reads a matrix (source.py), so that the
norm itself need not be in memory. Where something else reads it, `normed` writes it.

Matrices are read as words of two BF16, and a program holds whole rows. Numbers are computed in
float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.rms_norm import RmsNorm
from megatron_fp4.kernels.decode import halves
from megatron_fp4.kernels.encode import rounded_pairs
from megatron_fp4.kernels.launch import (
    INTERPRETED,
    NUMBER,
    Launch,
    bits_of,
    in_words,
    kernel,
    planned,
    tiles,
)

# Rows of which one program sums the weight's gradient: few enough that all programs run at once.
_ROWS = 32
# The longest row, in words, that fits in any GPU's shared memory once for each of three matrices.
_STAGED = 8192


@triton.jit
def _factor(low, high, words, eps):
    """1 / sqrt(mean(x^2) + eps) of a row. low, high: the halves of its words."""
    mean = tl.sum(low * low + high * high, 0) / (2.0 * words)
    return tl.div_rn(tl.full([], 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def gains(word, ZERO_CENTERED: tl.constexpr):
    """(low, high): the gains of two neighbouring columns, float32, from a word of two weights."""
    low, high = halves(word)
    if ZERO_CENTERED:
        low += 1.0
        high += 1.0
    return low, high


@triton.jit
def normed_words(word, factor, weight, ZERO_CENTERED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Words of two BF16: x times the row's factor, then times the gain.

    word: of x. weight: of the norm's weights.
    """
    low, high = halves(word)
    low_gain, high_gain = gains(weight, ZERO_CENTERED)
    return rounded_pairs(low * factor * low_gain, high * factor * high_gain, INTERPRETED)


@triton.jit
def _row_of(ptr, row, words, WORDS: tl.constexpr, inside=True):
    """The words of a row, and zeros after them up to WORDS; zeros if it is not inside."""
    at = tl.arange(0, WORDS)
    return tl.load(ptr + row.to(tl.int64) * words + at, mask=(at < words) & inside, other=0)


@triton.jit
def _store_row(values, ptr, row, words, WORDS: tl.constexpr, inside=True):
    at = tl.arange(0, WORDS)
    tl.store(ptr + row.to(tl.int64) * words + at, values, mask=(at < words) & inside)


@kernel(fp_fusion=True)
def rms_norm_rows_kernel(x_ptr, out_ptr, words, eps_bits, WORDS: tl.constexpr):
    """The factors of x [rows, 2 * words] BF16: out, float32 [rows]. A program reads one row.

    eps_bits: eps in float32. WORDS: `words`, rounded up to a power of two.
    """
    row, eps = tl.program_id(0), eps_bits.to(tl.float32, bitcast=True)
    low, high = halves(_row_of(x_ptr, row, words, WORDS))
    tl.store(out_ptr + row, _factor(low, high, words, eps))


@kernel(fp_fusion=True)
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    words,
    eps_bits,
    WORDS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The norm of x [rows, 2 * words] BF16: out, the same. A program makes one row.

    The other arguments are those of `rms_norm_rows_kernel`.
    """
    row, eps = tl.program_id(0), eps_bits.to(tl.float32, bitcast=True)
    word = _row_of(x_ptr, row, words, WORDS)
    low, high = halves(word)
    weight = _row_of(weight_ptr, row * 0, words, WORDS)
    made = normed_words(word, _factor(low, high, words, eps), weight, ZERO_CENTERED, INTERPRETED)
    _store_row(made, out_ptr, row, words, WORDS)


@kernel(fp_fusion=True)
def rms_norm_gradient_kernel(
    dy_ptr,
    residual_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    dweight_ptr,
    rows,
    words,
    eps_bits,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The gradients of x [rows, 2 * words] BF16 and of the weight.

    dy: of the norm, as x. residual: another gradient of x, which is added if HAS_RESIDUAL.
    dx: of x. dweight: float32 [programs, 2 * WORDS], the sums over ROWS rows. STAGES: the rows that
    are in work at once: with 2 the next one is loaded while one is computed.
    The other arguments are those of `rms_norm_rows_kernel`.
    """
    program, eps = tl.program_id(0), eps_bits.to(tl.float32, bitcast=True)
    weight = _row_of(weight_ptr, program * 0, words, WORDS)
    low_gain, high_gain = gains(weight, ZERO_CENTERED)
    low_sum = tl.zeros((WORDS,), tl.float32)
    high_sum = tl.zeros((WORDS,), tl.float32)
    for i in tl.range(0, ROWS, num_stages=STAGES):
        row = program * ROWS + i
        low, high = halves(_row_of(x_ptr, row, words, WORDS, row < rows))
        low_dy, high_dy = halves(_row_of(dy_ptr, row, words, WORDS, row < rows))
        if HAS_RESIDUAL:
            low_other, high_other = halves(_row_of(residual_ptr, row, words, WORDS, row < rows))
        r = tl.where(row < rows, _factor(low, high, words, eps), 0.0)  # eps may be 0
        low_sum += low_dy * (low * r)
        high_sum += high_dy * (high * r)
        low_dy *= low_gain
        high_dy *= high_gain
        common = r * r * (tl.sum(low_dy * low + high_dy * high, 0) / (2.0 * words))
        low_dx = r * (low_dy - low * common)
        high_dx = r * (high_dy - high * common)
        if HAS_RESIDUAL:
            low_dx += low_other
            high_dx += high_other
        made = rounded_pairs(low_dx, high_dx, INTERPRETED)
        _store_row(made, dx_ptr, row, words, WORDS, row < rows)
    at = dweight_ptr + program * (2 * WORDS) + 2 * tl.arange(0, WORDS)
    tl.store(at, low_sum)
    tl.store(at + 1, high_sum)


def factors(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row of x, BF16 [rows, n] with n even:
    float32 [rows, 1]."""
    x = in_words(x)
    rows, words = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, 1), dtype=torch.float32)
    if rows:
        _factor_launch(rows, words)(x.device, x, out, words, bits_of(eps))
    return out


def normed(x: Tensor, norm: RmsNorm) -> Tensor:
    """The norm of x, BF16 [rows, n] with n even: BF16 [rows, n]."""
    x = in_words(x)
    rows, words = x.shape[0], x.shape[1] // 2
    out = x.new_empty(x.shape)
    if rows:
        launch = _normed_launch(rows, words, norm.zero_centered)
        launch(x.device, x, in_words(norm.weight), out, words, bits_of(norm.eps))
    return out


def gradients(
    dy: Tensor, x: Tensor, norm: RmsNorm, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of the weight); see `arithmetic.rms_norm.gradients`.

    x: BF16 [rows, n] with n even. All tensors are BF16.
    """
    dy, x, weight = in_words(dy), in_words(x), in_words(norm.weight)
    residual = None if residual is None else in_words(residual)
    rows, words = x.shape[0], x.shape[1] // 2
    programs, block = tiles(rows, _ROWS), triton.next_power_of_2(words)
    dx = x.new_empty(x.shape)
    sums = x.new_empty((programs, 2 * block), dtype=torch.float32)
    if rows:
        launch = _gradient_launch(rows, words, residual is not None, norm.zero_centered)
        launch(x.device, dy, residual, x, weight, dx, sums, rows, words, bits_of(norm.eps))
    return dx, sums.sum(0)[: x.shape[1]].to(norm.weight.dtype)


def _warps(words: int) -> int:
    return min(max(triton.next_power_of_2(words) // 256, 1), 16)


@planned
def _factor_launch(rows: int, words: int) -> Launch:
    types = torch.int32, torch.float32, words, NUMBER
    constants = dict(WORDS=triton.next_power_of_2(words))
    return Launch(rms_norm_rows_kernel, (rows,), types, constants, num_warps=_warps(words))


@planned
def _normed_launch(rows: int, words: int, zero_centered: bool) -> Launch:
    types = *[torch.int32] * 3, words, NUMBER
    constants = dict(
        WORDS=triton.next_power_of_2(words), ZERO_CENTERED=zero_centered, INTERPRETED=INTERPRETED
    )
    return Launch(rms_norm_kernel, (rows,), types, constants, num_warps=_warps(words))


@planned
def _gradient_launch(rows: int, words: int, has_residual: bool, zero_centered: bool) -> Launch:
    types = *[torch.int32] * 5, torch.float32, rows, words, NUMBER
    block = triton.next_power_of_2(words)
    constants = dict(
        WORDS=block,
        ROWS=_ROWS,
        STAGES=2 if block <= _STAGED else 1,
        HAS_RESIDUAL=has_residual,
        ZERO_CENTERED=zero_centered,
        INTERPRETED=INTERPRETED,
    )
    grid = (tiles(rows, _ROWS),)
    return Launch(rms_norm_gradient_kernel, grid, types, constants, num_warps=_warps(words))
