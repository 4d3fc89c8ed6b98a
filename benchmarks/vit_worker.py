"""examples/vit/pretrain_vit.py with a measurement of oscillation; run by benchmarks/vit.py.

Before each of the last 201 optimizer steps it takes the FP32 main weights of the transformer's
linears, and what the quantizer of the forward pass makes of them. Where the forward pass keeps W in
high precision, it is the quantizer of `tetrajet`.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from torch import Tensor

from benchmarks.oscillation import OSCILLATING, STEPS, Oscillation
from megatron_fp4 import get_recipe, quantize

VIT = Path(__file__).resolve().parents[1] / "examples" / "vit"
sys.path.insert(0, str(VIT))
import pretrain_vit  # noqa: E402  # found in the folder of the example alone


class Meter:
    """The oscillation of all linears of a model in one process, by name."""

    def __init__(self) -> None:
        self.found: dict[str, Oscillation] = {}

    @torch.no_grad()
    def add(self, model: torch.nn.Module) -> None:
        """Adds the weights as they are before an optimizer step."""
        for name, layer in _linears(model):
            weight = getattr(layer.weight, "main_param", layer.weight)
            self.found.setdefault(name, Oscillation()).add(weight, quantized(layer, weight))

    def result(self) -> dict[str, Any]:
        """Means over the linears, and the shares of all their elements together."""
        each = list(self.found.values())
        ratios = torch.cat([one.ratios().flatten() for one in each])
        return {
            "steps": each[0].steps,
            "r(W)": sum(one.rate() for one in each) / len(each),
            "r(W_Q)": sum(one.rate_quantized() for one in each) / len(each),
            "R_w, mean": float(ratios.mean()),
            "oscillating": float((ratios > OSCILLATING).double().mean()),
        }


def quantized(layer: Any, weight: Tensor) -> Tensor:
    """Q(W) of a linear's FP32 weight, dequantized, by the quantizer of its forward pass."""
    state: Any = getattr(layer, "fp4", None)
    if state is None or state.recipe.fprop.b is None:
        quantizer, average = get_recipe("tetrajet").fprop.b, None
    else:
        quantizer, average = state.recipe.fprop.b, state.site.average
    assert quantizer is not None
    return quantize(weight, quantizer, average=average).dequantize()


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield name, module


def measured(meter: Meter) -> Any:
    """The example's forward step, which adds to `meter` in the last STEPS + 1 steps."""
    seen = -1

    @functools.wraps(pretrain_vit.forward_step)
    def forward_step(data_iterator: Any, model: Any) -> Any:
        nonlocal seen
        args, inner = get_args(), unwrap_model(model)
        step = args.curr_iteration
        if inner.training and step != seen and step >= args.train_iters - STEPS - 1:
            seen = step
            meter.add(inner)
        return pretrain_vit.forward_step(data_iterator, model)

    return forward_step


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--oscillation", type=Path, required=True, metavar="JSON")
    return pretrain_vit.add_flags(parser)


def main() -> None:
    meter = Meter()
    pretrain_vit.main(measured(meter), add_flags)
    get_args().oscillation.write_text(json.dumps(meter.result()))


if __name__ == "__main__":
    main()
