"""Layout independence, as docs/numerics.md states it, in real torchrun worlds: the small part of
the matrix that `make layouts` runs whole."""

from collections.abc import Callable

import pytest
import torch

from testing.layouts.matrix import MODES, ONE, Row, chosen, holds, run_layout

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="layouts take two GPUs")

# The models of each, and the recipes: where tensors are sharded, the kinds of scales.
QUICK = {
    "tp2-sp": (
        ("llama", "frozen", "mtp-repeated"),
        ("mxfp4-rht-sr", "dge-occ", "ue5m3", "uniform", "stochastic"),
    ),
    "pp2": (("llama", "gpt2"), ("stochastic",)),
    "pp2-vpp2": (("llama",), ("stochastic",)),
    "dp2": (("llama",), ("stochastic",)),
    "ep2": (("moe",), ("mxfp4", "stochastic")),
    "tp2-sp-dp2": (("llama",), ("stochastic",)),
    "tp2-pp2": (("llama",), ("stochastic",)),
}
NOISE, REPLAY = "noise of the rank's own", "recomputed without Replay"
NOTICED = {
    "tp2-sp": {NOISE, "quantiles of all ranks", "repeats share noise"},
    "pp2": {NOISE, REPLAY},
    "pp2-vpp2": {REPLAY},
    "dp2": {NOISE},
    "tp2-sp-dp2": {NOISE},
    "tp2-pp2": {NOISE, REPLAY},
}
RUNNABLE = chosen(QUICK, torch.cuda.device_count() or 4)
TIERED = [
    pytest.param(name, marks=() if name == "tp2-pp2" else pytest.mark.slow) for name in RUNNABLE
]
Get = Callable[[str], list[Row]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The rows of a layout, run when first asked for."""
    folder = tmp_path_factory.mktemp("layouts")
    done: dict[str, list[Row] | None] = {}

    def get(layout: str) -> list[Row]:
        if layout not in done:
            done[layout] = None  # a world that fails does so once
            models, recipes = QUICK[layout]
            options = ("--models", *models, "--recipes", *recipes)
            run_layout(ONE, folder, *options)
            done[layout] = run_layout(layout, folder, *options)
        found = done[layout]
        assert found is not None, f"{layout} failed before"
        return found

    return get


@pytest.mark.parametrize("layout", TIERED)
@pytest.mark.parametrize("mode", MODES)
def test_what_numerics_md_states_holds(results: Get, layout: str, mode: str) -> None:
    rows = [row for row in results(layout) if row["mode"] == mode]
    assert {row["model"] for row in rows} == set(QUICK[layout][0])
    assert not [row for row in rows if not holds(row)]


@pytest.mark.parametrize("layout", [each for each in TIERED if each.values[0] in NOTICED])
def test_known_mistakes_are_noticed(results: Get, layout: str) -> None:
    """Random bits blind to SwiGLU's two ranges (tp2-sp), to the stage (pp2) or to the rank (dp2);
    recomputation under both pipeline schedules without Replay; a repeated layer's bits repeated;
    quantiles of whole tokens.
    """
    controls = [row for row in results(layout) if row["mode"] == "control"]
    assert {row["recipe"] for row in controls} == NOTICED[layout]
    assert all(holds(row) for row in controls), controls
