"""Operands made by the Triton kernels, where these make them: on a GPU, in MXFP4."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from megatron_fp4.backends.base import Operand, Preparation
from megatron_fp4.philox import Noise
from megatron_fp4.quantizer import QuantizedTensor


@cache
def triton_is_here() -> bool:
    """Without it operands are made in plain PyTorch."""
    return importlib.util.find_spec("triton") is not None


def prepare(x: Tensor | QuantizedTensor, *preparations: Preparation) -> list[Operand] | None:
    """Operands of one matrix [rows, columns], read once for two copies that differ in their axis
    alone; None where the kernels do not make one of them."""
    if x.device.type != "cuda" or not triton_is_here():
        return None
    from megatron_fp4.kernels.quantize import Copy, quantize, takes  # imports Triton

    copies = []
    for p in preparations:
        plain = p.fold is None and p.widest is None
        if p.quantizer is None or not plain or not takes(x, p.quantizer, p.axis, p.group):
            return None
        copies.append((p.quantizer, Copy(p.axis, p.noise, p.signs), p.group))
    with torch.cuda.device(x.device):  # Triton launches on the current one
        if len(preparations) == 2 and _together(*preparations):
            (quantizer, one, group), (_, other, _) = copies
            return [*quantize(x, quantizer, [one, other], group)]
        return [quantize(x, quantizer, [copy], group)[0] for quantizer, copy, group in copies]


def _together(one: Preparation, other: Preparation) -> bool:
    def common(p: Preparation) -> tuple[object, ...]:
        return p.quantizer, p.group, p.signs is None, _draw(p.noise)

    return one.axis != other.axis and common(one) == common(other)


def _draw(noise: Noise | None) -> tuple[object, ...] | None:
    """What two operands' draws must share: all but the stream."""
    if noise is None:
        return None
    place = noise.placement
    at = [None if t is None else (t.data_ptr(), len(t)) for t in (place.rows, place.groups)]
    return noise.key, *at, place.groups_per_row
