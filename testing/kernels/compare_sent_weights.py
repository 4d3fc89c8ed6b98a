"""Compares the parts of weights that ranks quantize for --fp4-param-gather, as a GPU makes them,
with the reference, on a GPU or, as on Hopper, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_sent_weights

Prints a line for each case that differs in a bit, or that no kernel made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_fp4 import get_recipe
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.makers.base import Maker, OperandPlan
from megatron_fp4.mcore.model import sent_weights
from megatron_fp4.mcore.model.sent_weights import SentWeights, _maker
from megatron_fp4.target import Target
from testing.patching import patched

# Elements of the flattened weight: all, a block, some blocks, some rows of the matrix as which they
# are quantized, and one block more.
PARTS = ((0, 96 * 64), (32, 64), (64, 288), (96, 3168), (96, 3200))


def differences(device: str) -> Iterator[str]:
    generator, makers = torch.Generator().manual_seed(5), set[str]()

    def noted(*given: Any) -> tuple[Maker, OperandPlan]:
        maker, operand = _maker(*given)
        makers.add(maker.name)
        return maker, operand

    with patched(sent_weights, "_maker", noted):
        yield from _differences(device, generator)
    if makers != {"mxfp4 kernel"}:
        yield f"made by {', '.join(makers)}"


def _differences(device: str, generator: torch.Generator) -> Iterator[str]:
    for name in ("tetrajet", "tetrajet-ema"):
        matrix = torch.randn(96, 64, generator=generator).bfloat16()
        average = matrix.float() + 0.2 * torch.randn(96, 64, generator=generator)
        weight = torch.nn.Parameter(matrix.to(device))
        weights, recipe = SentWeights(), get_recipe(name)
        weights.add(weight, recipe)
        sent = weights.by_parameter[weight]
        for first, last in PARTS:
            values, kept = (x.flatten()[first:last] for x in (matrix, average))
            given = kept.to(device) if sent.rounds_to_average else None
            found = sent.quantized(values.to(device), given)
            right = quantize_matrix(
                values.view(-1, 32), sent.codes.quantizer, axis=1, average=kept.view(-1, 32)
            )
            for what in ("codes", "scales"):
                a, b = (getattr(each, what).flatten().cpu() for each in (found, right))
                if not torch.equal(a, b):
                    yield f"{name}, elements {first} to {last}: {(a != b).sum()} {what} differ"


if __name__ == "__main__":
    with patched(sent_weights, "target_of", lambda device: Target("cuda", (9, 0), None)):
        print("\n".join(differences("cpu")))
