"""The kernel of Q-Ramping's step: one read and one write of a weight and of its state."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp4.arithmetic.ramping import Adam, Ramped
from megatron_fp4.kernels.launch import NUMBER, Launch, bits_of, kernel, planned, tiles

_BLOCK = 1024


class Scalars(NamedTuple):
    """The numbers of an AdamW step with the learning rate lr, each as an int32 with the bits of a
    float32; see `arithmetic.ramping.update`.

    kept: 1 - lr * weight decay. rest1, beta2, rest2: 1 - beta1, beta2, 1 - beta2. root: the square
    root of the second moment's bias correction. eps: AdamW's. rate: -lr divided by the first
    moment's bias correction.
    """

    kept: int
    rest1: int
    beta2: int
    rest2: int
    root: int
    eps: int
    rate: int


_SCALARS = Scalars._fields


@triton.jit
def number(bits):
    """The float32 with these bits, an int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def stepped(weight, first, second, mean, count, rest1, beta2, rest2, root, eps, rate):
    """(weight, moments) after an AdamW step with the mean of `count` gradients."""
    first = first + rest1 * (mean - first)
    second = second * beta2 + rest2 * (mean * mean)
    divisor = tl.div_rn(tl.sqrt_rn(second), root) + eps
    return weight + tl.div_rn(count * rate * first, divisor), first, second


@triton.jit
def _is_due(count, period):
    return count % period == 0


@kernel(fp_fusion=False, do_not_specialize=(*_SCALARS, "size"))
def ramp_kernel(
    weights,
    firsts,
    seconds,
    sums,
    counts,
    periods,
    gradients,
    kept,
    rest1,
    beta2,
    rest2,
    root,
    eps,
    rate,
    size,
    BLOCK: tl.constexpr,
):
    """A step over `size` elements, in place.

    weights, firsts, seconds, sums, gradients: float32. counts, periods: int16. The scalars are
    those of `Scalars`.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    weight = tl.load(weights + place, inside) * number(kept)
    summed = tl.load(sums + place, inside) + tl.load(gradients + place, inside)
    count = tl.load(counts + place, inside, 0).to(tl.int32) + 1
    due = _is_due(count, tl.load(periods + place, inside, 1).to(tl.int32))
    share = count.to(tl.float32)
    new, first, second = stepped(
        weight,
        tl.load(firsts + place, inside),
        tl.load(seconds + place, inside),
        tl.div_rn(summed, share),
        share,
        number(rest1),
        number(beta2),
        number(rest2),
        number(root),
        number(eps),
        number(rate),
    )
    tl.store(weights + place, tl.where(due, new, weight), inside)
    tl.store(firsts + place, first, inside & due)
    tl.store(seconds + place, second, inside & due)
    tl.store(sums + place, tl.where(due, 0.0, summed), inside)
    tl.store(counts + place, tl.where(due, 0, count).to(tl.int16), inside)


def update(of: Ramped, gradient: Tensor, adam: Adam) -> None:
    """`arithmetic.ramping.update` of contiguous float32 tensors on a GPU.

    Each operation is rounded to float32. torch may fuse some of them, so that results differ from
    its own in their last bits, and no bit depends on where a part of a weight begins.
    """
    size = of.weight.numel()
    if size == 0:
        return
    floats = (of.weight, of.first, of.second, of.sum, gradient)
    if not all(each.is_contiguous() and each.dtype == torch.float32 for each in floats):
        raise ValueError("Q-Ramping's kernel updates contiguous weights in float32")
    start = _launch(tiles(size, _BLOCK))
    state = of.weight.detach(), of.first, of.second, of.sum, of.count, of.period
    start(of.weight.device, *state, gradient, *scalars(adam), size)


def scalars(adam: Adam) -> Scalars:
    """What a step needs of AdamW's options, computed in float64 and rounded once."""
    beta1, beta2 = adam.betas
    numbers = (
        1 - adam.lr * adam.weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**adam.step) ** 0.5,
        adam.eps,
        -adam.lr / (1 - beta1**adam.step),
    )
    return Scalars(*map(bits_of, numbers))


@planned
def _launch(programs: int) -> Launch:
    floats, integers = (torch.float32,) * 4, (torch.int16,) * 2
    types = *floats, *integers, torch.float32, *(NUMBER,) * (len(_SCALARS) + 1)
    return Launch(ramp_kernel, (programs,), types, dict(BLOCK=_BLOCK), num_warps=4)
