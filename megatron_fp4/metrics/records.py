"""The records of a report: the metrics of each operand, weight and gradient, as metrics.jsonl has
them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_fp4.metrics import gradients, operands, weights
from megatron_fp4.recipe import OPERANDS

Record = dict[str, Any]
# All operands, as (GEMM, letter), in the order of `layer_records`' first sums.
PLACES = [(gemm, letter) for gemm, letters in OPERANDS.items() for letter in letters]


FILE = "metrics.jsonl"  # in which a run writes its records


def layer_records(
    step: int,
    name: str,
    of_operands: list[list[float]],
    confidence: list[float],
    gradient: list[float],
    changes: list[list[float]],
    oscillation: list[float],
) -> Iterator[Record]:
    """The records of one layer from its sums over all ranks."""
    underflow = None
    for (gemm, letter), sums in zip(PLACES, of_operands, strict=True):
        if sums[0]:
            metrics = operands.operand_metrics(sums)
            place = {"layer": name, "gemm": gemm, "operand": letter}
            yield {"kind": "operand", "step": step, **place, "metrics": metrics}
            if (gemm, letter) == ("wgrad", "dy"):
                underflow = metrics["underflow"]
    steps = [each for each in changes if any(each)]  # the others were not seen
    changed = weights.change_metrics(steps) | weights.confidence_metrics(confidence)
    if steps and confidence[0]:
        changed |= weights.oscillation_metrics(oscillation)
    elif steps:
        del changed["r_quantized"]  # fprop multiplies W itself
    if changed:
        yield {"kind": "weight", "step": step, "layer": name, "metrics": changed}
    if gradient[1]:
        metrics = gradients.gradient_metrics(gradient, underflow)
        yield {"kind": "gradient", "step": step, "layer": name, "metrics": metrics}
