"""The random signs of a Hadamard transform as a vector, in Triton, for transforms that PyTorch
computes.

PyTorch's operators would draw them too, but take the step and the microbatch as numbers: C++ could
not repeat them (`cpp.following.refusal`), and they would take about fifty launches.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.philox import GROUP, Noise, Signs, signed
from megatron_fp4.kernels.launch import NUMBER, Launch, kernel, planned
from megatron_fp4.kernels.philox import key_of, sign_words
from megatron_fp4.kernels.quantize import RANDOM, in_two_forms, is_in_memory, random_of
from megatron_fp4.recording import DRAW

MOST_SIGNS = 128  # signs that one draw gives


@kernel(fp_fusion=True)
def signs_kernel(
    signs_ptr,
    stream,
    draw,
    draw_in_memory,
    random,
    COUNT: tl.constexpr,
    IN_MEMORY: tl.constexpr,
):
    """Writes the first COUNT random signs of a draw.

    signs_ptr: float32 [COUNT], +1 or -1. stream, draw: stream and draw word of the signs.
    draw_in_memory: int64 [], holds the draw word instead if IN_MEMORY. random: see arguments.py.
    """
    if IN_MEMORY:
        draw = tl.load(draw_in_memory)
    w0, w1, w2, w3 = sign_words(draw, stream, key_of(random, IN_MEMORY))
    i = tl.arange(0, COUNT)
    word = tl.where(i < 64, tl.where(i < 32, w0, w1), tl.where(i < 96, w2, w3))
    bit = (word >> (i & 31)) & 1
    tl.store(signs_ptr + i, 1.0 - 2.0 * bit.to(tl.float32))


def vector(signs: Signs, count: int, like: Tensor) -> Tensor:
    """The first `count` signs, float32 [count], on the device of `like`; see `Signs.vector`.

    count: a power of two, at most MOST_SIGNS.
    """
    made = like.new_empty(count, dtype=torch.float32)
    number = 0 if signs.draw is None else signs.draw
    in_memory = is_in_memory(signs.key.step, number)
    # Of the key alone: signs have no place in a matrix, and a stream of their own.
    random = random_of(like, Noise(signs.key, 0), in_memory, rows=1, columns=GROUP, places=False)
    draw = in_two_forms(number, in_memory, like)
    start = _launch(count, in_memory, signs.draw is not None)
    start(like.device, made, signed(signs.stream), *draw, *random)
    return made


@planned
def _launch(count: int, in_memory: bool, varies: bool) -> Launch:
    """varies: whether the number of the draw differs between calls."""
    types = torch.float32, NUMBER, DRAW if varies else NUMBER, torch.int64, RANDOM
    constants = dict(COUNT=count, IN_MEMORY=in_memory)
    return Launch(signs_kernel, (1,), types, constants, num_warps=1)
