"""The layouts that are compared with one process, what each must keep, and the bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.worlds.launch import spawn

WORKER = Path(__file__).with_name("worker.py")

Row = dict[str, Any]  # layout, model, recipe, mode, figures; see `holds`


@dataclass(frozen=True)
class Layout:
    """How a model is spread over tp * pp * dp processes; experts over ep of them, each expert over
    etp (None: as many as tp). models: which of model.py's it trains."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int | None = None
    sp: bool = False
    ep: int = 1
    etp: int | None = None
    models: tuple[str, ...] = ("llama",)

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp


MOE = ("moe",)
WITH_SP = ("llama", "frozen", "gpt2", "qkv-bias", "mtp", "mtp-repeated")
WITH_PP = ("llama", "gpt2", "tied", "mtp-repeated")
ONE = "one"  # the process that all others are compared with
MODES = ("fresh", "recompute", "resumed")
LAYOUTS = {
    ONE: Layout(),
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sp=True, models=WITH_SP),
    "pp2": Layout(pp=2, models=WITH_PP),
    "pp2-vpp2": Layout(pp=2, vpp=2, models=("llama", "tied")),
    "dp2": Layout(dp=2),
    "ep2": Layout(dp=2, ep=2, models=MOE),
    "tp4": Layout(tp=4),
    "tp2-sp-dp2": Layout(tp=2, sp=True, dp=2),
    "tp2-pp2": Layout(tp=2, pp=2),
    "pp4": Layout(pp=4),
    "ep4": Layout(dp=4, ep=4, models=MOE),
    "pp2-ep2": Layout(pp=2, dp=2, ep=2, models=MOE),
    "tp2-sp-ep2": Layout(tp=2, sp=True, dp=2, ep=2, etp=1, models=MOE),  # two copies of an expert
    "tp2-sp-ep2-etp2": Layout(tp=2, sp=True, dp=2, ep=2, etp=2, models=MOE),
    "tp8": Layout(tp=8, models=("wide",)),
    "tp4-sp-dp2": Layout(tp=4, sp=True, dp=2),
    "pp4-tp2": Layout(tp=2, pp=4),
    "tp2-sp-pp2-vpp2-dp2": Layout(tp=2, sp=True, pp=2, vpp=2, dp=2),
    "tp2-sp-ep4": Layout(tp=2, sp=True, dp=4, ep=4, etp=1, models=MOE),
}

RECIPES = ("mxfp4", "tetrajet", "mxfp4-rht-sr", "dge", "dge-occ", "stochastic")
# Models that differ from another in a detail run what hangs on most: noise in all three GEMMs.
SIDE_RECIPES = ("stochastic",)

# In float64 the layouts' summation orders part by 1e-16, so no rounding decision of FP4 can change.
# In float32 they part by 1e-7, and now and then a value lies so near to a rounding boundary that
# its code moves. FP4 being discontinuous, what follows from it parts like trajectories, by 1e-3.
# Where each operand is given one process's inputs, none can move, and float32 agrees too.
FLOAT64, FLOAT32, PARTED = 1e-10, 1e-5, 1e-3
# A known mistake must move more than this.
NOTICED = {"differing codes": 100, "gradients": 1e-3, "shared noise rows": 100}


def recipes_of(model: str) -> tuple[str, ...]:
    return RECIPES if model in ("llama", "wide", "moe") else SIDE_RECIPES


def local_parts(layout: Layout, recipe: str) -> tuple[int, int]:
    """In how many parts dge-occ takes its quantiles of a token whose features are sharded, and of
    an expert's: by the contract those are the local shard's, and one process is to take them so."""
    return (layout.tp, layout.expert_tp) if recipe == "dge-occ" else (1, 1)


def chosen(names: Iterable[str], processes: int) -> list[str]:
    """The named layouts (all, if none is) that so many processes can run, the smallest first."""
    found = [name for name in names or LAYOUTS if name != ONE]
    return sorted(
        (name for name in found if LAYOUTS[name].processes <= processes),
        key=lambda name: LAYOUTS[name].processes,
    )


def run_layout(name: str, folder: Path, *options: str) -> list[Row]:
    """What worker.py finds about a layout. ONE must have run in `folder` with its models."""
    run = spawn(LAYOUTS[name].processes, WORKER, str(folder), name, *options, timeout_s=900)
    if run.returncode:
        raise RuntimeError(f"{name}: {_first_traceback(run.stdout)}")
    return json.loads((folder / f"{name}.json").read_text())


def _first_traceback(output: str) -> str:
    """Of the rank that told one first: the ranks' lines mix. All output where there is none."""
    rank = re.search(r"^(\[rank\d+\]:) Traceback", output, re.MULTILINE)
    lines = [line for line in output.splitlines() if rank is None or line.startswith(rank[1])]
    return "\n".join(lines)[-6000:]


def run_one(names: Iterable[str], folder: Path, *options: str) -> None:
    """One process, with the models of these layouts."""
    models = dict.fromkeys(model for name in names for model in LAYOUTS[name].models)
    run_layout(ONE, folder, "--models", *models, *options)


def holds(row: Row) -> bool:
    """Whether a row's figures are what docs/numerics.md states."""
    figures = row["figures"]
    if row["mode"] == "control":  # a known mistake, which must be noticed
        return all(value > NOTICED[name] for name, value in figures.items())
    if row["mode"] != "fresh":  # bit for bit
        return all(value == 0 for name, value in figures.items() if name != "codes")
    parted = FLOAT32 if not figures["float32 differing codes"] else PARTED
    bounds = {"": FLOAT64, "same inputs ": FLOAT32}
    return (
        all(figures[f"{prefix}differing codes"] == 0 for prefix in bounds)
        and figures["shared noise rows"] == 0
        and all(
            figures.get(prefix + name, 0) < bound
            for prefix, bound in bounds.items()
            for name in ("loss", "gradients")
        )
        and figures.get("float32 loss", 0) < parted
    )
