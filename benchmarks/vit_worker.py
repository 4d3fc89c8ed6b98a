"""examples/vit/pretrain_vit.py with a measurement of oscillation; run by benchmarks/vit.py.

Before each of the last WINDOW + 1 optimizer steps it takes the FP32 main weights of the
transformer's linears, and what the quantizer of the forward pass makes of them. Where the forward
pass keeps W in high precision, it is the quantizer of `tetrajet`.
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

from megatron_fp4 import get_recipe, quantize
from megatron_fp4.metrics.weights import WINDOW, Changes, change_metrics, oscillation_metrics

VIT = Path(__file__).resolve().parents[1] / "examples" / "vit"
sys.path.insert(0, str(VIT))
import pretrain_vit  # noqa: E402  # found in the folder of the example alone


class Meter:
    """The oscillation of all linears of a model in one process."""

    def __init__(self) -> None:
        self._changes = Changes()

    @torch.no_grad()
    def add(self, model: torch.nn.Module) -> None:
        """Adds the weights as they are before an optimizer step."""
        layers = list(_linears(model))
        weights = [getattr(layer.weight, "main_param", layer.weight) for layer in layers]
        self._changes.update(weights, list(map(quantized, layers, weights)))

    def result(self) -> dict[str, Any]:
        """Means over the linears, and the shares of all their elements together."""
        changes, oscillation = self._changes.take()
        each = [change_metrics(steps) for steps in changes.tolist()]
        of_all = oscillation_metrics(oscillation.sum(0).tolist())
        return {
            "steps": changes.shape[1],
            "r(W)": sum(one["r"] for one in each) / len(each),
            "r(W_Q)": sum(one["r_quantized"] for one in each) / len(each),
            "R_w, mean": of_all["oscillation"],
            "oscillating": of_all["oscillating"],
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


def _linears(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield module


def measured(meter: Meter) -> Any:
    """The example's forward step, which adds to `meter` in the last WINDOW + 1 steps."""
    seen = -1

    @functools.wraps(pretrain_vit.forward_step)
    def forward_step(data_iterator: Any, model: Any) -> Any:
        nonlocal seen
        args, inner = get_args(), unwrap_model(model)
        step = args.curr_iteration
        if inner.training and step != seen and step >= args.train_iters - WINDOW - 1:
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
