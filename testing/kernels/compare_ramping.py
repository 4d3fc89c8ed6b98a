"""Compares the kernel of Q-Ramping's step with its formulas in numpy's float32, on a GPU or in
Triton's interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_ramping

Prints a line for each case that differs in a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from megatron_fp4.arithmetic.ramping import Adam, Ramped
from megatron_fp4.kernels.ramping import update

STEPS = 8
F = np.float32


def formulas(of: list[np.ndarray], gradient: np.ndarray, adam: Adam) -> None:
    """docs/numerics.md, Q-Ramping: numpy rounds each operation to float32, and fuses none."""
    weight, first, second, summed, count, period = of
    beta1, beta2 = adam.betas
    weight *= F(1 - adam.lr * adam.weight_decay)
    summed += gradient
    count += 1
    due = count % period == 0
    number = count.astype(F)
    mean = summed / number
    new_first = first + F(1 - beta1) * (mean - first)
    new_second = second * F(beta2) + F(1 - beta2) * (mean * mean)
    divisor = np.sqrt(new_second) / F((1 - beta2**adam.step) ** 0.5) + F(adam.eps)
    rate = F(-adam.lr / (1 - beta1**adam.step))
    stepped = weight + number * rate * new_first / divisor
    for old, new in ((weight, stepped), (first, new_first), (second, new_second)):
        old[due] = new[due]
    summed[due], count[due] = 0, 0


def differences(device: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(7)
    for size in (1, 1024, 1025, 50_000):
        for betas in ((0.9, 0.95), (0.3, 0.999), (0.0, 0.5)):
            period = torch.randint(1, 5, (size,), generator=generator).to(torch.int16)
            start = [torch.randn(size, generator=generator), *(torch.zeros(size),) * 2]
            start += [torch.zeros(size), torch.zeros(size, dtype=torch.int16), period]
            found = Ramped(*(tensor.clone().to(device) for tensor in start))
            wanted = [tensor.clone().numpy() for tensor in start]
            for n in range(1, STEPS + 1):
                adam = Adam(n, 1e-2 / n, betas, 1e-8, 0.1)
                gradient = torch.randn(size, generator=generator) * 10.0 ** (2 - n)
                update(found, gradient.to(device), adam)
                with np.errstate(under="ignore"):
                    formulas(wanted, gradient.numpy(), adam)
            yield from compared(f"{size} elements, betas {betas}", found, wanted)


def compared(case: str, found: Ramped, wanted: list[np.ndarray]) -> Iterator[str]:
    tensors: list[Tensor] = list(vars(found).values())
    for name, tensor, other in zip(vars(found), tensors, wanted, strict=True):
        off = int((tensor.cpu().numpy() != other).sum())
        if off:
            yield f"{case}: {off} of {name} differ"


if __name__ == "__main__":
    print("\n".join(differences("cpu")))
