"""Layout independence, as docs/numerics.md states it: a real torchrun world for each layout.

In float64 the layouts' summation orders part by 1e-16, so no rounding decision of FP4 can change:
codes must be equal and gradients agree to 1e-10. In float32, loss and gradients agree to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.mcore.layouts import (
    CASES,
    Results,
    differing_codes,
    gradient_errors,
    loss_error,
    run_layout,
)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="layouts take two GPUs")

# A Hadamard transform's output is rounded to BF16, so a difference of 1e-7 in a product moves a
# value by 2^-9 now and then, and at most 1e-4 of the codes by one step, about a third of the
# operand's RMS: the product moves by about 1/3 sqrt(1e-4).
TRANSFORMED, TRANSFORMED_BOUND = {"mxfp4-rht-sr"}, 5e-3


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """The results of a layout, run when first asked for."""
    folder = tmp_path_factory.mktemp("layouts")
    done: dict[str, Results | None] = {}

    def get(layout: str) -> Results:
        if layout not in done:
            done[layout] = None  # a world that fails does so once
            done[layout] = run_layout(layout, folder / f"{layout}.pt")
        found = done[layout]
        assert found is not None, f"{layout} failed before"
        return found

    return get


@pytest.mark.parametrize(("layout", "case"), CASES)
def test_codes_are_equal(results: Callable[[str], Results], layout: str, case: str) -> None:
    one, many = (results(name)[case, torch.float64]["operands"] for name in ("tp1", layout))
    assert differing_codes(one, many, torch.float64) == 0


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
        codes = sum(record[3].numel() for record in many["operands"])
        assert differing_codes(one["operands"], many["operands"], dtype) <= 1e-4 * codes
    assert loss_error(one, many) < bound
    for name, error in gradient_errors(one, many).items():
        assert error < bound, name


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_layout_dependent_noise_is_caught(results: Callable[[str], Results], layout: str) -> None:
    """Noise blind to SwiGLU's two ranges (tp2), to the stage (pp2), to the rank (dp2)."""
    good = results("tp1")["tetrajet", torch.float64]
    bad = results(layout)["tetrajet-broken", torch.float64]
    assert differing_codes(good["operands"], bad["operands"], torch.float64, strict=False) > 100
    assert gradient_errors(good, bad)["decoder.layers.1.mlp.linear_fc1.weight"] > 1e-3
