"""Layout independence, as docs/numerics.md states it: a real torchrun world for each layout.

In float64 the layouts' summation orders part by 1e-16, so no rounding decision of FP4 can change:
codes must be equal and gradients agree to 1e-10. In float32, loss and gradients agree to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
# A Hadamard transform's output is rounded to BF16, so a difference of 1e-7 in a product moves a
# value by 2^-9 now and then, and at most 1e-4 of the codes by one. A code moves its element by at
# most half of itself: the product moves by less than 1/2 sqrt(1e-4).
TRANSFORMED, TRANSFORMED_BOUND = {"mxfp4-rht-sr"}, 5e-3
Results = dict[tuple[str, torch.dtype], dict[str, Any]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """The results of a layout, run when first asked for; "tp1" is one process."""
    folder, done = tmp_path_factory.mktemp("layouts"), {}

    def get(layout: str) -> Results:
        if layout not in done:
            out = folder / f"{layout}.pt"
            ranks = 1 if layout == "tp1" else 2
            run = spawn(ranks, WORKER, str(out), *LAYOUTS.get(layout, ()))
            assert run.returncode == 0, run.stdout[-3000:]
            done[layout] = torch.load(out, weights_only=False)
        return done[layout]

    return get


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_codes_are_equal(results: Callable[[str], Results], layout: str, case: str) -> None:
    one, many = (results(name)[case, torch.float64]["operands"] for name in ("tp1", layout))
    assert differing_codes(one, many) == 0


@pytest.mark.parametrize(("layout", "case"), CASES)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
def test_first_step_agrees(
    results: Callable[[str], Results], layout: str, case: str, dtype: torch.dtype, bound: float
) -> None:
    one, many = (results(name)[case, dtype] for name in ("tp1", layout))
    if case in TRANSFORMED and dtype == torch.float32 and layout.startswith("tp"):
        bound = TRANSFORMED_BOUND
        operands = one["operands"], many["operands"]
        assert differing_codes(*operands) <= 1e-4 * sum(
            codes.numel() for *_, codes, _ in operands[1]
        )
    assert abs(many["loss"] / one["loss"] - 1) < bound
    assert one["gradients"].keys() == many["gradients"].keys()
    for name, gradient in one["gradients"].items():
        error = (many["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < bound, name


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_layout_dependent_noise_is_caught(results: Callable[[str], Results], layout: str) -> None:
    """Noise blind to SwiGLU's two ranges (tp2), to the stage (pp2), to the rank (dp2)."""
    good = results("tp1")["tetrajet", torch.float64]
    bad = results(layout)["tetrajet-broken", torch.float64]
    assert differing_codes(good["operands"], bad["operands"], strict=False) > 100
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    error = (bad["gradients"][name] - good["gradients"][name]).norm()
    assert error / good["gradients"][name].norm() > 1e-3


def differing_codes(one: list[Any], many: list[Any], strict: bool = True) -> int:
    """How many codes of `many`'s shards differ from those of `one`'s whole operands.

    Where a gradient is zero in exact arithmetic (the first token's query, whose softmax has one
    entry), a block holds rounding noise alone and so do its codes: decoded values below 1e-12 of
    the operand's largest do not count. strict: every shard belongs to an operand of `one`.
    """
    whole = {record[0]: record[1:] for record in one}
    differing, covered = 0, set()
    for key, rows, columns, codes, values in many:
        if key not in whole and not strict:
            continue
        covered.add(key)
        all_rows, _, all_codes, all_values = whole[key]
        local = _positions(all_rows, rows)
        negligible = 1e-12 * all_values.abs().max()
        counts = torch.maximum(values.abs(), all_values[local][:, columns].abs()) > negligible
        differing += int(((all_codes[local][:, columns] != codes) & counts).sum())
    assert not strict or covered == whole.keys()
    return differing


def _positions(haystack: Tensor, needles: Tensor) -> Tensor:
    order = haystack.argsort()
    found = order[torch.searchsorted(haystack[order], needles).clamp(max=len(order) - 1)]
    assert torch.equal(haystack[found], needles), "rows that the whole operand does not have"
    return found
