"""What becomes of main weights that are stored in FP16 with scales, by learning rate.

    python -m benchmarks.main_weights

AdamW updates weights of the size of a LLaMA's (a normal distribution of 0.02) by gradients that are
noise and a tenth of it always in the same direction. After each step the weights are stored in FP16
in blocks of 128 with power-of-two scales, rounded to nearest or stochastically, and go on from
there. Two numbers compare them with weights in float32 that had the same gradients:

- *drift*: the mean movement in the gradients' direction, as a multiple of float32's;
- *noise*: the root mean square of the difference from float32's weights, less its mean, as a
  multiple of the same of how float32's weights moved: what the noise of the gradients alone does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.fp8_blocks import FloatBlocks
from tools import pages
from tools.stamp import stamp

RATES = (1e-3, 1e-4, 3e-5, 1e-5, 1e-6)
SIZE = 0.02  # Megatron's --init-method-std
MEAN = 0.1  # of the gradients, as a multiple of their noise
BETAS = 0.9, 0.95
FP16 = FloatBlocks("fp16", 128)
Row = dict[str, Any]


def stored(weights: Tensor, is_stochastic: bool, draw: torch.Generator) -> Tensor:
    """The weights as FP16 gives them back."""
    bits = None
    if is_stochastic:
        bits = torch.randint(0, 65536, weights.shape, generator=draw, dtype=torch.int32)
    return FP16.decode(*FP16.encode(weights, bits))


def study(elements: int, steps: int) -> Iterator[Row]:
    """A row for each learning rate and way of rounding."""
    for rate in RATES:
        start = SIZE * torch.randn(elements, generator=torch.Generator().manual_seed(1))
        exact, *low = moved(start, rate, steps)
        for rounding, found in zip(("nearest", "stochastic"), low, strict=True):
            yield {"rate": rate, "rounding": rounding, **compared(start, exact, found)}


def moved(start: Tensor, rate: float, steps: int) -> list[Tensor]:
    """The weights after some steps: in float32, and in FP16 with both ways of rounding."""
    noise, draw = (torch.Generator().manual_seed(seed) for seed in (2, 3))
    weights = [start.clone(), *(stored(start, False, draw) for _ in range(2))]
    first, second = torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, steps + 1):
        gradient = MEAN + torch.randn(start.shape, generator=noise)
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square(), 1 - BETAS[1])
        mean, square = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
        update = rate * mean / (square.sqrt() + 1e-8)
        exact, *low = (each - update for each in weights)
        weights = [exact, *(stored(w, i == 1, draw) for i, w in enumerate(low))]
    return weights


def compared(start: Tensor, exact: Tensor, found: Tensor) -> dict[str, float]:
    """The drift and the noise of weights; see above."""
    movement, difference = (exact - start).double(), (found - exact).double()
    drift = 1 + difference.mean() / movement.mean()
    return {"drift": float(drift), "noise": float(difference.std() / movement.std())}


def table(rows: list[Row]) -> list[str]:
    """The result as a Markdown table."""
    body = [
        [f"{row['rate']:g}", row["rounding"], f"{row['drift']:.2f}", f"{row['noise']:.2f}"]
        for row in rows
    ]
    return pages.table(["learning rate", "rounded", "drift", "noise"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/main_weights.json"))
    parser.add_argument("--elements", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    rows = list(study(args.elements, args.steps))
    result = {"stamp": stamp(args.commit), "elements": args.elements, "steps": args.steps}
    args.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
