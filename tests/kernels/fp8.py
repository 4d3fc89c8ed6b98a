"""What the FP8 kernel is compared with the reference on, on a GPU and in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.kernels.fp8    # prints what differs
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from megatron_fp4 import Quantizer
from megatron_fp4.kernels.fp8 import quantize, takes
from megatron_fp4.quantizer import quantize_matrix

BLOCKS = ((0, 0), (1, 0))  # the tensor, a row


def differences(device: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 2100, generator=generator) * torch.exp(
        3 * torch.randn(24, 2100, generator=generator)
    )
    x[1], x[2, :50], x[3] = 0, -0.0, x[3] * 1e-38
    for element, block, bad in itertools.product(("e4m3", "e5m2"), BLOCKS, (1.0, torch.nan)):
        x[5, 7] = bad
        quantizer = Quantizer(element=element, scale="fp32", block=block, rule="absmax")  # type: ignore
        assert takes(x.bfloat16(), quantizer, 1) and not takes(x.bfloat16(), quantizer, 0)
        shared = torch.full((24 if block[0] else 1, 1), 1e9)
        for widest in (None, shared) if bad == 1.0 else (None,):
            wanted = quantize_matrix(x.bfloat16(), quantizer, axis=1, widest=widest)
            found = quantize(
                x.bfloat16().to(device), quantizer, None if widest is None else widest.to(device)
            )
            codes = int((found.codes.cpu() != wanted.codes).sum())
            same = torch.equal(found.scales.cpu().nan_to_num(-1), wanted.scales.nan_to_num(-1))
            if codes or not same or found.shape != wanted.shape:
                yield f"{element} {block} {bad} {widest is None}: {codes} codes, scales {same}"


if __name__ == "__main__":
    print("\n".join(differences("cpu")))
