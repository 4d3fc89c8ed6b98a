"""The layouts that are compared with one process, and what comparing them means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.mcore.launch import spawn

WORKER = Path(__file__).with_name("layout_worker.py")
LAYOUTS = {
    "tp2": ("--tp", "2"),
    "tp2-sp": ("--tp", "2", "--sequence-parallel"),
    "pp2": ("--pp", "2"),
    "dp2": (),
}
# dge-occ's token-wise quantiles are those of the local shard, as its description says.
CASES = [
    (layout, case)
    for layout in LAYOUTS
    for case in ("mxfp4", "tetrajet", "mxfp4-rht-sr", "dge", "dge-occ")
    if case != "dge-occ" or not layout.startswith("tp")
]
Results = dict[tuple[str, torch.dtype], dict[str, Any]]


def run_layout(layout: str, out: Path) -> Results:
    """What layout_worker.py writes for a layout; "tp1" is one process."""
    ranks = 1 if layout == "tp1" else 2
    run = spawn(ranks, WORKER, str(out), *LAYOUTS.get(layout, ()))
    assert run.returncode == 0, run.stdout[-3000:]
    return torch.load(out, weights_only=False)


def loss_error(one: dict[str, Any], many: dict[str, Any]) -> float:
    """Relative difference of the first step's loss."""
    return abs(many["loss"] / one["loss"] - 1)


def gradient_errors(one: dict[str, Any], many: dict[str, Any]) -> dict[str, float]:
    """Relative difference of each parameter's gradient."""
    assert one["gradients"].keys() == many["gradients"].keys()
    return {
        name: float((many["gradients"][name] - gradient).norm() / gradient.norm())
        for name, gradient in one["gradients"].items()
    }


def differing_codes(
    one: list[Any], many: list[Any], dtype: torch.dtype, strict: bool = True
) -> int:
    """How many codes of `many`'s shards differ from those of `one`'s whole operands.

    Where a gradient is zero in exact arithmetic (the first token's query, whose softmax has one
    entry), a block holds rounding noise alone and so do its codes: decoded values below 64 epsilons
    of the model's dtype times the operand's largest do not count. strict: every shard belongs to
    an operand of `one`.
    """
    whole = {record[0]: record[1:] for record in one}
    differing, covered = 0, set()
    for key, rows, columns, codes, values in many:
        if key not in whole and not strict:
            continue
        covered.add(key)
        all_rows, _, all_codes, all_values = whole[key]
        local = _positions(all_rows, rows)
        negligible = 64 * torch.finfo(dtype).eps * all_values.abs().max()
        counts = torch.maximum(values.abs(), all_values[local][:, columns].abs()) > negligible
        differing += int(((all_codes[local][:, columns] != codes) & counts).sum())
    assert not strict or covered == whole.keys()
    return differing


def _positions(haystack: Tensor, needles: Tensor) -> Tensor:
    order = haystack.argsort()
    found = order[torch.searchsorted(haystack[order], needles).clamp(max=len(order) - 1)]
    assert torch.equal(haystack[found], needles), "rows that the whole operand does not have"
    return found
