"""Compares the kernel that updates averages of weights with the reference, on a GPU or in Triton's
interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_averages

Prints a line for each case that differs in a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_fp4.arithmetic.weight_states import blend as reference
from megatron_fp4.kernels.averages import blend


def differences(device: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(5)
    for size in (1, 2048, 2049, 70_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for beta in (0.0, 0.5, 0.998, 1 - 2**-20):
                average = torch.randn(size, generator=generator)
                weight = torch.randn(size, generator=generator).to(dtype)
                average[:1], weight[-1:] = 1e-42, 0.0  # subnormal, and a zero
                found = average.clone().to(device)
                blend(found, weight.to(device), beta)
                reference(average, weight, beta)
                if not torch.equal(found.cpu(), average):
                    off = (found.cpu() != average).sum().item()
                    yield f"{size} elements in {dtype}, beta {beta}: {off} differ"


if __name__ == "__main__":
    print("\n".join(differences("cpu")))
