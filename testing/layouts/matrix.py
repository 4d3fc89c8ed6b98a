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
class ComparedLayout:
    """How a model is distributed over tp * pp * dp processes.

    vpp: virtual pipeline stages of a process. sp: sequence parallelism. ep: the number of processes
    over which experts are distributed. etp: the tensor-parallel size of an expert; None: `tp`.
    models: the models of model.py that are trained.
    """

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
    ONE: ComparedLayout(),
    "tp2": ComparedLayout(tp=2),
    "tp2-sp": ComparedLayout(tp=2, sp=True, models=WITH_SP),
    "pp2": ComparedLayout(pp=2, models=WITH_PP),
    "pp2-vpp2": ComparedLayout(pp=2, vpp=2, models=("llama", "tied")),
    "dp2": ComparedLayout(dp=2),
    "ep2": ComparedLayout(dp=2, ep=2, models=MOE),
    "tp4": ComparedLayout(tp=4),
    "tp2-sp-dp2": ComparedLayout(tp=2, sp=True, dp=2),
    "tp2-pp2": ComparedLayout(tp=2, pp=2),
    "pp4": ComparedLayout(pp=4),
    "ep4": ComparedLayout(dp=4, ep=4, models=MOE),
    "pp2-ep2": ComparedLayout(pp=2, dp=2, ep=2, models=MOE),
    # Two copies of an expert.
    "tp2-sp-ep2": ComparedLayout(tp=2, sp=True, dp=2, ep=2, etp=1, models=MOE),
    "tp2-sp-ep2-etp2": ComparedLayout(tp=2, sp=True, dp=2, ep=2, etp=2, models=MOE),
    "tp8": ComparedLayout(tp=8, models=("wide",)),
    "tp4-sp-dp2": ComparedLayout(tp=4, sp=True, dp=2),
    "pp4-tp2": ComparedLayout(tp=2, pp=4),
    "tp2-sp-pp2-vpp2-dp2": ComparedLayout(tp=2, sp=True, pp=2, vpp=2, dp=2),
    "tp2-sp-ep4": ComparedLayout(tp=2, sp=True, dp=4, ep=4, etp=1, models=MOE),
}

RECIPES = (
    *("mxfp4", "tetrajet", "mxfp4-rht-sr", "dge", "dge-occ"),
    *("ue5m3", "nvfp4-nvidia", "four-over-six", "quartet-2"),
    *("row-scales", "estimators", "x-mean", "hot-channels", "uniform", "stochastic"),
)
WITH_TENSOR_SCALE = ("ue5m3", "nvfp4-nvidia", "four-over-six", "quartet-2")
# Models that differ from another in a detail run only the recipe that draws in all three GEMMs.
SIDE_RECIPES = ("stochastic",)

# Layouts sum in different orders. In float64 their results differ by 1e-16, which changes no code.
# In float32 they differ by 1e-7. Now and then a value is so near to a rounding boundary that its
# code changes. The results then differ by 1e-3, since FP4 rounding is discontinuous. If each
# operand is given the inputs that one process had, no code can change: float32 results agree too.
FLOAT64, FLOAT32, PARTED = 1e-10, 1e-5, 1e-3
# A known mistake must move more than this.
NOTICED = {"differing codes": 100, "gradients": 1e-3, "shared noise rows": 100}


def recipes_of(model: str) -> tuple[str, ...]:
    """The recipes that are compared for a model.

    A tensor scale, the mean of X, and the norms of its channels span all tokens that an expert is
    sent at once, which depend on the expert-parallel size (docs/numerics.md, Across ranks): "moe"
    is not compared with them.
    """
    if model == "moe":
        others = (*WITH_TENSOR_SCALE, "x-mean", "hot-channels")
        return tuple(recipe for recipe in RECIPES if recipe not in others)
    return RECIPES if model in ("llama", "wide") else SIDE_RECIPES


def local_parts(layout: ComparedLayout, recipe: str) -> tuple[int, int]:
    """The number of parts of a token that have their own quantiles: (dense linear, expert).

    dge-occ takes the quantiles of a token over the local shard of its features (docs/numerics.md,
    Across ranks). One process must take them over the same parts to be compared.
    """
    return (layout.tp, layout.expert_tp) if recipe == "dge-occ" else (1, 1)


def chosen(names: Iterable[str], processes: int) -> list[str]:
    """The named layouts, or all if no name is given, that need at most `processes` processes.

    ONE is left out. The smallest come first.
    """
    found = [name for name in names or LAYOUTS if name != ONE]
    return sorted(
        (name for name in found if LAYOUTS[name].processes <= processes),
        key=lambda name: LAYOUTS[name].processes,
    )


def run_layout(name: str, folder: Path, *options: str) -> list[Row]:
    """Runs worker.py in a torchrun world of this layout, and returns the rows that it wrote.

    name: of the layout, in LAYOUTS. folder: where ONE wrote its steps for the models of this layout
    (`run_one`). options: more arguments of worker.py. Raises RuntimeError with the traceback if the
    world fails.
    """
    run = spawn(LAYOUTS[name].processes, WORKER, str(folder), name, *options)
    if run.returncode:
        raise RuntimeError(f"{name}: {_first_traceback(run.stdout)}")
    return json.loads((folder / f"{name}.json").read_text())


def _first_traceback(output: str) -> str:
    """The lines of the rank that printed a traceback first, since the lines of ranks are mixed.

    All lines if there is no traceback. Only the last 6000 characters are returned.
    """
    rank = re.search(r"^(\[rank\d+\]:) Traceback", output, re.MULTILINE)
    lines = [line for line in output.splitlines() if rank is None or line.startswith(rank[1])]
    return "\n".join(lines)[-6000:]


def run_one(names: Iterable[str], folder: Path, *options: str) -> None:
    """Runs the layout ONE in `folder`, with the models of the layouts `names`; see `run_layout`."""
    models = dict.fromkeys(model for name in names for model in LAYOUTS[name].models)
    run_layout(ONE, folder, "--models", *models, *options)


def holds(row: Row) -> bool:
    """Whether a row's figures are within the bounds of docs/numerics.md, Across ranks.

    A row of mode "control" is a known mistake, and holds if its figures show the mistake.
    """
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
