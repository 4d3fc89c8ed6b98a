"""Compares the kernel of AdamW in few bits with its formulas in numpy's float32 and the reference's
formats, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_low_bit_adamw [CASES]

Prints a line for each case that differs in a bit. CASES: a part of the names of some cases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fp4.arithmetic.low_bit import LowBit, Owned
from megatron_fp4.arithmetic.moments import FIRST, SECOND, Moments
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.ramping import Adam
from megatron_fp4.arithmetic.segments import Place, place_of
from megatron_fp4.kernels.low_bit_adamw import step

STEPS = 3
SEED = 2**40 + 7
F = np.float32
# (first element, number of elements), as of ranges of the distributed optimizer.
RANGES = [(a, n) for a in (0, 4, 11, 48, 10304) for n in (1, 7, 127, 128, 129, 4096 + 5)]
PLACES = {
    "whole": place_of([2**20], 0),
    "far": place_of([2**20], 2**33 + 8),
    "columns": place_of([2**10, 64], 0, axis=1, ranks=4, rank=3),
    "odd columns": place_of([2**10, 37], 0, axis=1, ranks=2, rank=1),
}


def formulas(of: LowBit, gradient: Tensor, adam: Adam) -> None:
    """docs/numerics.md, Adam's moments: numpy rounds each operation to float32, and fuses none."""
    beta1, beta2 = adam.betas
    g, m, v = (x.numpy() for x in (gradient, of.decoded("exp_avg"), of.decoded("exp_avg_sq")))
    m = m + F(1 - beta1) * (g - m)
    v = v * F(beta2) + F(1 - beta2) * (g * g)
    divisor = np.sqrt(v) / F((1 - beta2**adam.step) ** 0.5) + F(adam.eps)
    weight = of.weight.numpy() * F(1 - adam.lr * adam.weight_decay)
    rate = F(-adam.lr / (1 - beta1**adam.step))
    of.weight.copy_(torch.from_numpy(weight + rate * m / divisor))
    for key, moment in (("exp_avg", m), ("exp_avg_sq", v)):
        of.store(key, torch.from_numpy(moment), of.bits(key, Key(SEED, adam.step)))


def cases() -> Iterator[tuple[str, Moments, Place, int, int]]:
    every = [Moments(m, v, r) for m in FIRST for v in SECOND for r in ("stochastic", "nearest")]
    for moments in every:
        yield f"{moments} formats", moments, PLACES["whole"], 11, 1400
    for name, place in PLACES.items():
        yield f"place {name}", Moments(), place, 48, 1400
        yield f"place {name} from 8", Moments("bf16", "fp8"), place, 8, 700
    for start, size in RANGES:
        yield f"range {start} {size}", Moments(), PLACES["whole"], start, size


def gradients(size: int, n: int) -> Tensor:
    """Gradients over many orders of magnitude, with zeros, and in step 2 with NaN and Inf."""
    generator = torch.Generator().manual_seed(100 * size + n)
    found = torch.randn(size, generator=generator) * 10.0 ** torch.randint(
        -12, 3, (size,), generator=generator
    )
    found[::5] = 0
    if n == 2 and size > 600:
        found[3], found[size // 2] = torch.nan, torch.inf
    return found


def differences(device: str, chosen: str = "") -> Iterator[str]:
    for name, moments, place, start, size in cases():
        if chosen not in name:
            continue
        weight = gradients(size, 50).clamp(-9, 9)
        found = begun(weight.to(device), moments, Owned("layer.weight", place, start))
        wanted = begun(weight.clone(), moments, found.owned)
        for n in range(1, STEPS + 1):
            adam = Adam(n, 1e-2 / n, (0.9, 0.95), 1e-8, 0.1)
            step(found, gradients(size, n).to(device), adam, SEED)
            with np.errstate(all="ignore"):
                formulas(wanted, gradients(size, n), adam)
        yield from compared(name, found, wanted)


def begun(weight: Tensor, moments: Moments, owned: Owned) -> LowBit:
    """A parameter with moments of zeros."""
    found = LowBit(weight, {}, moments, owned)
    for key in moments.forms:
        found.store(key, torch.zeros_like(weight))
    return found


def compared(case: str, found: LowBit, wanted: LowBit) -> Iterator[str]:
    pairs: dict[str, Any] = {"weight": (found.weight, wanted.weight)}
    pairs |= {key: (found.state[key], wanted.state[key]) for key in wanted.state}
    for name, (mine, theirs) in pairs.items():
        same = mine.cpu() == theirs
        if mine.is_floating_point():
            same |= mine.cpu().isnan() & theirs.isnan()
            same &= (mine.cpu().signbit() == theirs.signbit()) | theirs.isnan()
        if off := int((~same).sum()):
            yield f"{case}: {off} of {len(theirs)} of {name} differ"


if __name__ == "__main__":
    print("\n".join(differences("cpu", " ".join(sys.argv[1:]))))
