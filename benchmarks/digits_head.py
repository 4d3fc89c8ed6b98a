"""What the last linear in BF16 changes in stage `digits` of the sweep, which has it in float32.

    python -m benchmarks.digits_head

Trains the stage's classifier with both, on a CPU with one thread, for a few combinations and the
stage's seeds. Data, noise and first weights of a seed are the same for both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tools.stamp import stamp
from tools.sweep import factorial
from tools.sweep.axes import Combination
from tools.sweep.results import BF16
from tools.sweep.stages import digits

_UNDER_TENSOR = ({**scale, **factorial.TENSOR} for scale in (factorial.UE5M3, factorial.E4M3))
_UE5M3, _E4M3 = (Combination(block="16", **each) for each in _UNDER_TENSOR)
_ROUNDED = Combination(block="16", **factorial.E8M0, **factorial.STOCHASTIC)
# Of the committed results of the stage, which has the last three from another host.
COMBINATIONS = [
    BF16["adam"],
    Combination(**factorial.E8M0),
    _ROUNDED,
    replace(_ROUNDED, estimator="dge"),
    _UE5M3,
    _E4M3,
    replace(_ROUNDED, element="e1m2"),
    replace(_ROUNDED, operands="forward"),
    replace(_ROUNDED, x_mean="subtracted"),
]


class _InBF16(nn.Linear):
    """A linear that multiplies in BF16. Its weights, and those of the optimizer, are float32."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


class HeadInBF16(digits.Classifier):
    """The classifier of stage `digits`, with the same first weights, whose last linear multiplies
    in BF16."""

    def __init__(self, combination: Combination, seed: int) -> None:
        super().__init__(combination, seed)
        own = self.last
        self.last = _InBF16(own.in_features, own.out_features)
        self.last.load_state_dict(own.state_dict())


HEADS = {"float32": digits.Classifier, "bf16": HeadInBF16}


def rows() -> Iterator[dict[str, Any]]:
    """Trains each combination with both kinds of last linear, from each seed, and yields one row a
    combination: {"combination": ..., "float32": {seed: held-out loss}, "bf16": the same}."""
    for each in COMBINATIONS:
        losses = {
            head: {
                str(seed): digits.held_out_loss(kind, each, seed)
                for seed in range(1, digits.STAGE.seeds + 1)
            }
            for head, kind in HEADS.items()
        }
        yield {"combination": each.chosen, **losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/digits_head.json"))
    parser.add_argument("--commit", help="where the tree has no git of its own")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = {"stamp": stamp(args.commit), "settings": digits.STAGE.settings, "rows": list(rows())}
    args.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(kept["rows"], indent=1))


if __name__ == "__main__":
    main()
