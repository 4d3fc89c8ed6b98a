"""SwiGLU and its gradient in Triton, as arithmetic/swiglu.py defines them.

The quantize kernel computes them as it reads a matrix, so that the matrix itself need not be in
memory (`kernels/mxfp4.py`). Where something else reads it, the kernels here write it.

Matrices are read as words of two BF16, int32, or of two E4M3, int16. Numbers are computed in
float32 and rounded once to BF16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.decode import halves
from megatron_fp4.kernels.encode import rounded_pairs
from megatron_fp4.kernels.launch import INTERPRETED, Launch, in_words, kernel, planned, tiles

_WORDS, _WARPS = 1024, 4  # words of the result that a program writes


@triton.jit
def halves_of_y(words, INTERPRETED: tl.constexpr):
    """(low, high): the numbers in the low and in the high half of each word, in float32."""
    if words.dtype == tl.int16:
        low, high = _halves_in_e4m3(words.to(tl.int32), INTERPRETED)
    else:
        low, high = halves(words)
    return low, high


@triton.jit
def _halves_in_e4m3(words, INTERPRETED: tl.constexpr):
    """As `halves`, of the E4M3 in the two low bytes of int32 words. Both conversions are exact."""
    if INTERPRETED:
        return _of_e4m3(words), _of_e4m3(words >> 8)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 pair, low, high;
        .reg .b32 both;
        cvt.u16.u32 pair, $2;
        cvt.rn.f16x2.e4m3x2 both, pair;
        mov.b32 {low, high}, both;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }
        """,
        "=f,=f,r",
        [words],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _of_e4m3(byte):
    """The E4M3 in the lowest byte of int32 words, in float32. 0x7F and 0xFF are NaN."""
    magnitude = byte & 0x7F
    # With its bits where a float32 has them, the number is 2^-120 times what it is.
    bits = (magnitude << 20) | ((byte & 0x80) << 24)
    number = bits.to(tl.float32, bitcast=True) * 2.0**120
    return tl.where(magnitude == 0x7F, float("nan"), number)


@triton.jit
def _sigmoid(x, INTERPRETED: tl.constexpr):
    """1 / (1 + exp(-x)), float32, to a few units in the last place; 0 where it is below 2^-126.

    The GPU's own approximations take four instructions, and an exact division about ten more.
    """
    power = x * -1.4426950408889634  # exp(-x) is 2 to this power
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp2(power))
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _activated(gate, up, INTERPRETED: tl.constexpr):
    """silu(gate) * up, float32."""
    return gate * _sigmoid(gate, INTERPRETED) * up


@triton.jit
def activated_words(gate, up, INTERPRETED: tl.constexpr):
    """Words of two BF16: the SwiGLU of two words of the gate and of two of `up`."""
    gate_low, gate_high = halves(gate)
    up_low, up_high = halves(up)
    low = _activated(gate_low, up_low, INTERPRETED)
    high = _activated(gate_high, up_high, INTERPRETED)
    return rounded_pairs(low, high, INTERPRETED)


@triton.jit
def _gradients(gradient, gate, up, INTERPRETED: tl.constexpr):
    """The gradients of the gate and of `up`, float32, from that of the SwiGLU."""
    sigmoid = _sigmoid(gate, INTERPRETED)
    silu = gate * sigmoid
    return gradient * up * (sigmoid + silu * (1.0 - sigmoid)), gradient * silu


@triton.jit
def gradient_words(gradient, gate, up, INTERPRETED: tl.constexpr):
    """(words of the gradient of the gate, words of that of `up`), of two BF16.

    gradient: that of the SwiGLU, in words of two BF16. gate, up: in words of two BF16 or E4M3.
    """
    low, high = halves(gradient)
    gate_low, gate_high = halves_of_y(gate, INTERPRETED)
    up_low, up_high = halves_of_y(up, INTERPRETED)
    of_gate_low, of_up_low = _gradients(low, gate_low, up_low, INTERPRETED)
    of_gate_high, of_up_high = _gradients(high, gate_high, up_high, INTERPRETED)
    of_gate = rounded_pairs(of_gate_low, of_gate_high, INTERPRETED)
    return of_gate, rounded_pairs(of_up_low, of_up_high, INTERPRETED)


@triton.jit
def _flat(words, WORDS: tl.constexpr):
    """(row, index in the row, whether it is inside) of the words of a program.

    words: in a row of the result; the second axis of the grid goes over them, and the first over
    the rows.
    """
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    return tl.program_id(0).to(tl.int64), at, at < words


@kernel(fp_fusion=True)
def swiglu_kernel(y_ptr, out_ptr, words, WORDS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The SwiGLU of y [rows, 4 * words] BF16: out, [rows, 2 * words] BF16.

    words: of a row of `out`.
    """
    row, at, inside = _flat(words, WORDS)
    gate = tl.load(y_ptr + row * (2 * words) + at, mask=inside, other=0)
    up = tl.load(y_ptr + row * (2 * words) + words + at, mask=inside, other=0)
    tl.store(out_ptr + row * words + at, activated_words(gate, up, INTERPRETED), mask=inside)


@kernel(fp_fusion=True)
def swiglu_gradient_kernel(
    gradient_ptr, y_ptr, out_ptr, words, WORDS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The gradient of y [rows, 4 * words], BF16 or E4M3, from that of its SwiGLU, [rows, 2 * words]
    BF16: out, BF16."""
    row, at, inside = _flat(words, WORDS)
    gradient = tl.load(gradient_ptr + row * words + at, mask=inside, other=0)
    place = row * (2 * words) + at
    gate = tl.load(y_ptr + place, mask=inside, other=0)
    up = tl.load(y_ptr + place + words, mask=inside, other=0)
    of_gate, of_up = gradient_words(gradient, gate, up, INTERPRETED)
    tl.store(out_ptr + place, of_gate, mask=inside)
    tl.store(out_ptr + place + words, of_up, mask=inside)


def swiglu(y: Tensor) -> Tensor:
    """The SwiGLU of y, BF16 [rows, 2 n] with n even: BF16 [rows, n]."""
    y = in_words(y)
    rows, words = y.shape[0], y.shape[1] // 4
    out = y.new_empty((rows, 2 * words))
    if rows:
        _launch(swiglu_kernel, rows, words, torch.int32)(y.device, y, out, words)
    return out


def swiglu_gradient(gradient: Tensor, y: Tensor) -> Tensor:
    """The gradient of y, BF16 or E4M3 [rows, 2 n] with n even, from `gradient`, that of its
    SwiGLU: BF16."""
    gradient, y = in_words(gradient), in_words(y)
    rows, words = y.shape[0], y.shape[1] // 4
    out = gradient.new_empty(y.shape)
    if rows:
        start = _launch(swiglu_gradient_kernel, rows, words, words_of(y))
        start(y.device, gradient, y, out, words)
    return out


def words_of(y: Tensor) -> torch.dtype:
    """The dtype of words of two elements of y, BF16 or E4M3."""
    return torch.int16 if y.dtype == torch.float8_e4m3fn else torch.int32


@planned
def _launch(kernel: triton.JITFunction, rows: int, words: int, of_y: torch.dtype) -> Launch:
    """of_y: see `words_of`."""
    before = () if kernel is swiglu_kernel else (torch.int32,)
    return Launch(
        kernel,
        (rows, tiles(words, _WORDS)),
        (*before, of_y, torch.int32, words),
        dict(WORDS=_WORDS, INTERPRETED=INTERPRETED),
        num_warps=_WARPS,
    )
