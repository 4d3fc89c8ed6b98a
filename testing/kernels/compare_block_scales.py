"""Compares the kernels of kernels/blocks.py and kernels/block_values.py with the PyTorch reference.

These kernels quantize BF16 matrices with E4M3 and UE5M3 scales, and float32 matrices with E8M0
scales. They also decode such matrices, and undo Hadamard transforms. Runs on a GPU, or in
Triton's interpreter:

    TRITON_INTERPRET=1 python -m testing.kernels.compare_block_scales [e4m3]

Prints a line for each case that differs. With a word: only the quantizers whose name contains it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_fp4 import Quantizer, get_quantizer
from megatron_fp4.arithmetic import hadamard
from megatron_fp4.arithmetic.hadamard import FIXED_SIGNS
from megatron_fp4.arithmetic.philox import Key, Noise, Placement, Signs
from megatron_fp4.arithmetic.quantize import largest_magnitudes, quantize_matrix
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.kernels.block_values import decoded, decodes, dequantized, inverse, restores
from megatron_fp4.kernels.blocks import find_largest, quantize, scale_format
from megatron_fp4.kernels.tile_hadamard import Transform
from megatron_fp4.makers.base import Given
from megatron_fp4.makers.block_scales import BlockScaleKernel
from megatron_fp4.makers.pytorch import PyTorch, make_operand
from testing.builders.operand_plans import made_in_pytorch, plan

ROWS, COLUMNS = 96, 160  # tiles do not fill it
NVFP4 = get_quantizer("nvfp4")
QUANTIZERS = {
    "nvfp4": NVFP4,
    "nvfp4-17-16-sr": get_quantizer("nvfp4-17-16-sr"),
    "2d": replace(NVFP4, block=(16, 16)),
    "e4m3-up-sr": Quantizer(scale="e4m3", block=(1, 32), rule="up", rounding="stochastic"),
    "e4m3": Quantizer(scale="e4m3", block=(1, 16), rule="nearest"),
    "ue5m3": Quantizer(scale="ue5m3", block=(1, 32), rule="nearest"),
    "ue5m3-up": Quantizer(scale="ue5m3", block=(1, 16), rule="up"),
    "ue5m3-sr": Quantizer(scale="ue5m3", block=(32, 32), rule="nearest", rounding="stochastic"),
    "in-fp8-16": Quantizer(scale="ue5m3", block=(1, 16), rule="mse-fp8"),
    "in-fp8-32": Quantizer(scale="e4m3", block=(1, 32), rule="mse-fp8"),
    "in-fp8-tensor": Quantizer(scale="e4m3", block=(1, 16), rule="mse-fp8", tensor_max=256.0),
    "four-over-six": get_quantizer("nvfp4-four-over-six"),
    "four-over-six-32": Quantizer(
        scale="ue5m3", block=(1, 32), rule="four-over-six", inflate=17 / 16
    ),
    "gain": Quantizer(scale="e4m3", block=(1, 16), rule="nearest", tensor_max=256.0, unit_gain=32),
    "gain-drawn": Quantizer(
        scale="e4m3",
        block=(1, 16),
        rule="nearest",
        tensor_max=256.0,
        inflate=17 / 16 * 0.93,
        unit_gain=32,
        scale_rounding="stochastic",
    ),
    "gain-ue5m3": Quantizer(
        scale="ue5m3",
        block=(1, 16),
        rule="four-over-six",
        unit_gain=16,
        scale_rounding="stochastic",
    ),
    "prescaled": Quantizer(
        scale="e4m3", block=(1, 16), rule="nearest", rounding="stochastic", prescale=0.9
    ),
}

# Of float32 matrices.
POWERS = {
    "e8m0-ceil-sr": Quantizer(rule="ceil", rounding="stochastic"),
    "e8m0-ceil": Quantizer(rule="ceil", block=(1, 16)),
    "e8m0-floor": Quantizer(rule="floor", block=(32, 32)),
    "e8m0-floor-sr": Quantizer(rule="floor", rounding="stochastic", prescale=0.75),
    "e8m0-nearest": Quantizer(rule="nearest"),
    "e8m0-nearest-sr": Quantizer(rule="nearest", rounding="stochastic", block=(1, 16)),
}


def matrix() -> Tensor:
    """BF16 [ROWS, COLUMNS] with magnitudes of all sizes, ties, zeros, NaN and Inf.

    Some blocks need scales that saturate, that are subnormal, or that are rounded to zero.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x *= torch.exp(3 * torch.randn(ROWS, COLUMNS // 16, generator=generator)).repeat_interleave(
        16, 1
    )
    x[1], x[2, :50], x[3], x[4] = 0, -0.0, x[3] * 1e-38, x[4] * 1e-5
    x[8:24] = torch.randint(-24, 25, (16, COLUMNS), generator=generator) / 4
    x[8:24, ::16] = 6
    x[30, 5], x[44, 70], x[45, 71] = torch.nan, torch.inf, -torch.inf
    x[50, 20:30] = 1e30
    return x.bfloat16()


def differences(device: str, of: str = "") -> Iterator[str]:
    """of: a key of QUANTIZERS, a part of several, or "transformed", "float32" or "restored" and
    more words of its cases."""
    if not of or of.startswith("transformed"):
        yield from transformed(device, of)
    if not of or of.startswith("float32"):
        yield from in_float32(device, of)
    if not of or of.startswith("restored"):
        yield from restored(device, of)
    x = matrix()
    ordinary = torch.where(x.isfinite() & (x.abs() < 1e20), x, 1.0)
    named = [of] if of in QUANTIZERS else [name for name in QUANTIZERS if of in name]
    for name in named:
        quantizer = QUANTIZERS[name]
        for source, axis in ((x, 1), (x, 0)) if quantizer.tensor_max else ():
            wanted = PyTorch().largest(source, plan(source, quantizer, axis), Given())
            if not torch.equal(find_largest(source.to(device), quantizer, axis).cpu(), wanted):
                yield f"{name} {axis}: the largest magnitude"
        for source, axis in ((x, 1), (x, 0), (ordinary, 1), (ordinary, 0), (0 * ordinary, 1)):
            assert BlockScaleKernel().refuses(plan(source, quantizer, axis)) is None
            for is_shard in (False, True) if quantizer.draws and source is x else (False,):
                for largest in (None, largest_magnitudes(8 * ordinary, quantizer, axis)):
                    if largest is not None and not quantizer.tensor_max:
                        continue
                    noises = [_noise(place, is_shard) for place in (device, "cpu")]
                    found = quantize(
                        source.to(device), quantizer, axis,
                        noises[0] if quantizer.draws else None,
                        None if largest is None else largest.to(device),
                    )  # fmt: skip
                    made = made_in_pytorch(
                        source, quantizer, axis, noise=noises[1], largest=largest
                    )
                    told = _differing(found, made)
                    if source is x:
                        told = told or _decoded_otherwise(found)
                    if told:
                        yield f"{name} {axis} {is_shard} {largest is None}: {told}"


def transformed(device: str, of: str = "") -> Iterator[str]:
    """A line for each operand with a Hadamard transform that differs from the reference.

    of: of those whose name contains these words: "transformed", the quantizer and the group's size.

    The kernel applies the transform, except in groups of 8, where PyTorch does. Matrices of small
    integers must give equal codes, since their sums are exact in any order. Of other matrices 1e-4
    of the codes may differ, since tensor cores add in another order than PyTorch.
    """
    named = ("nvfp4", 16), ("ue5m3-up", 32), ("nvfp4-17-16-sr", 16), ("2d", 64), ("gain", 128)
    both = torch.bfloat16, torch.float32
    every = list(itertools.product((*named, ("four-over-six", 128)), (0, 1), both, (True,)))
    every += [(("ue5m3", 8), 1, torch.bfloat16, True)]
    every += [(("ue5m3", 64), 0, dtype, False) for dtype in both]
    every += [(("e8m0-ceil-sr", 32), axis, torch.float32, True) for axis in (0, 1)]
    for (name, group), axis, dtype, whole in every:
        if of in f"transformed {name} {group}":
            yield from _transformed(device, name, group, axis, dtype, whole)


def _transformed(
    device: str, name: str, group: int, axis: int, dtype: torch.dtype, whole: bool
) -> Iterator[str]:
    """The same for one operand. whole: whether its matrix has small integers."""
    generator, shape = torch.Generator().manual_seed(7), (80, 384) if axis else (384, 80)
    x = torch.randn(shape, generator=generator) * 4
    x[5], x[:, 7] = 0, 0
    x = (x.round() if whole else x).to(dtype).to(device)
    quantizer = (QUANTIZERS | POWERS)[name]
    step = torch.tensor(5, device=device) if axis else 5
    drawn = Signs(Key(2**63 + 11, step), 0xFFFFFFF1, 3 if axis else None)
    given = Given(signs=drawn if quantizer.scale == "ue5m3" else FIXED_SIGNS if axis else None)
    if quantizer.draws:
        given.noise = _noise(device, False)
    wanted = plan(x, quantizer, axis, group=group)
    assert BlockScaleKernel().refuses(wanted) is None
    in_pytorch = BlockScaleKernel().transforms_in_pytorch(wanted)
    assert in_pytorch == (group == 8)
    [found] = BlockScaleKernel().make(x, [wanted], [given])
    made = make_operand(x, wanted, given)
    assert isinstance(found.operand, QuantizedTensor) and isinstance(made, QuantizedTensor)
    told = _differing(found.operand, made)
    other = int((found.operand.codes != made.codes).sum())
    if told and (whole or other > 1e-4 * x.numel()):
        yield f"{name} transformed {axis} {group} {dtype}: {told}"
    if quantizer.tensor_max:
        largest = BlockScaleKernel().largest(x, wanted, given).cpu()
        if not torch.equal(largest, PyTorch().largest(x, wanted, given).cpu()):
            yield f"{name} transformed {axis} {group} {dtype}: the largest magnitude"


def in_float32(device: str, of: str = "") -> Iterator[str]:
    """A line for each float32 matrix whose E8M0 scales or codes are not the reference's.

    of: "float32" and a key of POWERS, or "". Numbers have the bits of float32, next to ties too.
    """
    x = matrix().float()
    generator = torch.Generator().manual_seed(9)
    x *= 1 + torch.randn(x.shape, generator=generator) * 1e-3
    x[8:24] = matrix()[8:24].float()
    x[12:16] = torch.nextafter(x[12:16], torch.full_like(x[12:16], 9))
    x[16:20] = torch.nextafter(x[16:20], torch.full_like(x[16:20], -9))
    x[51, :64], x[52] = torch.finfo(torch.float32).max, x[52] * 1e-38
    for name, quantizer in POWERS.items():
        for axis in (0, 1) if of in f"float32 {name}." else ():
            assert BlockScaleKernel().refuses(plan(x, quantizer, axis)) is None
            noises = [_noise(place, axis == 0) for place in (device, "cpu")]
            found = quantize(x.to(device), quantizer, axis, noises[0] if quantizer.draws else None)
            made = made_in_pytorch(x, quantizer, axis, noise=noises[1])
            told = _differing(found, made) or _decoded_otherwise(found)
            if told:
                yield f"float32 {name} {axis}: {told}"


def restored(device: str, of: str = "") -> Iterator[str]:
    """A line for each matrix whose codes' inverse transform is not the reference's.

    of: "restored", the format of the scales and the group's size, or words that begin so. In groups
    of one block of E8M0 scales sums are exact, and so are all bits, the signs of zeros too. In
    others float32 numbers may differ by the order of their sums.
    """
    both: list[Transform] = [Transform(g, FIXED_SIGNS.vector(g)) for g in (16, 32, 128)]
    powers, floats = Quantizer(rule="ceil"), QUANTIZERS["ue5m3"]
    for quantizer, transform in itertools.product((powers, floats), [*both, Transform(64, None)]):
        group, signs = transform
        if of not in f"restored {quantizer.scale} {group}":
            continue
        assert restores(quantizer, group)
        x = torch.randn(72, 384, generator=torch.Generator().manual_seed(4)) * 4
        x[5], x[6], x[7], x[8, 3], x[9, 40] = 0, x[6] * 1e-38, x[7] * 1e30, torch.nan, torch.inf
        turned = hadamard.transform(x, group, signs).bfloat16()
        made = quantize_matrix(turned.to(device), quantizer, axis=1)
        given = None if signs is None else signs.to(device)
        found = inverse(made, Transform(group, given)).cpu()
        wanted = hadamard.inverse(made.dequantize(torch.float32).cpu(), group, signs)
        other = (found.view(torch.int32) != wanted.view(torch.int32)) & ~wanted.isnan()
        if quantizer is floats or group > quantizer.block[1]:
            other &= (found - wanted).abs() > 1e-6 * wanted.abs().amax(1, keepdim=True)
        if other.any() or not torch.equal(found.isnan(), wanted.isnan()):
            yield f"restored {quantizer.scale} {group}: {int(other.sum())}"


def _noise(device: str, is_shard: bool) -> Noise:
    place = Placement()
    if is_shard:
        rows = torch.arange(ROWS, device=device) * 3 + 2**31 - 90
        groups = torch.arange(COLUMNS // 8, device=device) + 40
        place = Placement(rows=rows, groups=groups, groups_per_row=80)
    step = torch.tensor(2**32 + 5, device=device) if is_shard else 2**32 + 5
    return Noise(Key(2**63 + 11, step), 0xFFFFFFF0, place)


def _differing(found: QuantizedTensor, made: QuantizedTensor) -> str:
    assert (found.shape, found.axis, found.scales.shape) == (
        made.shape, made.axis, made.scales.shape,
    )  # fmt: skip
    codes, scales = (int((a.cpu() != b.cpu()).sum()) for a, b in (
        (found.codes, made.codes), (found.scales, made.scales)))  # fmt: skip
    units = [None if q.tensor_scale is None else float(q.tensor_scale) for q in (found, made)]
    nan = int((made.scales == scale_format(made.quantizer)[2]).sum())
    tally = found.tally().tolist()
    same = units[0] == units[1] and tally == [0, nan]
    return (
        "" if same and not codes + scales else f"{codes} codes, {scales} scales, {units}, {tally}"
    )


def _decoded_otherwise(x: QuantizedTensor) -> str:
    """How the decoding kernel differs from PyTorch, if it does; in the signs of zeros too."""
    assert decodes(x.quantizer)
    pairs = {"values": (decoded(x).values, x.with_row_factors(torch.bfloat16)[0])}
    for dtype in (torch.bfloat16, torch.float32):
        pairs[f"dequantized {dtype}"] = dequantized(x, dtype), x.dequantize(dtype)
    for name, (found, made) in pairs.items():
        bits = torch.int16 if made.dtype == torch.bfloat16 else torch.int32
        other = found.contiguous().view(bits) != made.contiguous().view(bits)
        other &= ~(found.isnan() & made.isnan())
        if other.any():
            return f"{int(other.sum())} {name}"
    return ""


if __name__ == "__main__":
    print("\n".join(differences("cpu", "".join(sys.argv[1:]))))
