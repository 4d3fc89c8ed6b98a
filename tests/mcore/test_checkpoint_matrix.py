"""Every precision, optimizer and checkpoint format that Megatron's flags offer: a resumed run ends
where the uninterrupted one does, bit for bit, or is refused before its first step."""

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from testing.worlds.checkpoint_contents import contents, flat
from testing.worlds.checkpoints import (
    ENDS,
    PP2,
    SHARDED,
    SMALL,
    TORCH,
    TP2_SP,
    again,
    good,
    run_in_turn,
    saving,
    told,
)
from testing.worlds.launch import OVERLAP, Result

PRECISIONS = {
    "fp32": "",
    "bf16": "--bf16",
    # Its gradients fit at the third or fourth step: at the second there is no optimizer state.
    "fp16": "--fp16 --initial-loss-scale 8388608 --hysteresis 1",
    "fp16-constant": "--fp16 --loss-scale 128",
}
SHARDINGS = {
    "whole": "",
    "sharded": "--use-distributed-optimizer",
    "reshardable": SHARDED,
    "overlapped": " ".join(OVERLAP),
}
FORMATS = {"torch_dist": "", "torch": TORCH}
LAYOUTS = {"": "", "dp2": "", "tp2": TP2_SP, "pp2": PP2}
FULL = ("fp32", "bf16")  # the precisions that emerging optimizers support
HAS_EMERGING = importlib.util.find_spec("emerging_optimizers") is not None

Runs = dict[str, Result]


@dataclass(frozen=True)
class Case:
    precision: str
    optimizer: str
    sharding: str = "whole"
    format: str = "torch_dist"
    layout: str = ""
    recipe: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, vars(self).values()))

    @property
    def flags(self) -> str:
        recipe = self.recipe and f"--fp4-recipe {self.recipe}"
        return (
            f"{PRECISIONS[self.precision]} --optimizer {self.optimizer} {SHARDINGS[self.sharding]} "
            f"{FORMATS[self.format]} {LAYOUTS[self.layout]} {recipe}"
        )


QUICK = Case("fp32", "adam")
ON_ONE = [
    *(Case(p, "adam", s, f) for p in PRECISIONS for s in SHARDINGS for f in FORMATS),
    *(Case(p, "sgd", format=f) for p in PRECISIONS for f in FORMATS),
    *(Case(p, "adam", recipe="tetrajet") for p in PRECISIONS),
]
ON_TWO = [
    *(Case(p, "adam", s, layout="dp2") for p in PRECISIONS for s in SHARDINGS),
    *(Case(p, "adam", "sharded", "torch", "dp2") for p in PRECISIONS),
    *(Case(p, "adam", layout="tp2") for p in PRECISIONS),
    *(Case(p, "sgd", layout="pp2") for p in PRECISIONS),
    *(Case(p, "adam", "sharded", layout="pp2", recipe="tetrajet") for p in PRECISIONS),
]
OF_EMERGING = [
    *(Case(p, o, format=f, layout="dp2") for p in FULL for o in ("muon", "lion") for f in FORMATS),
    *(Case(p, "soap", format="torch", layout="dp2") for p in FULL),
    *(Case("bf16", o, "sharded", f, "tp2") for o in ("muon", "lion") for f in FORMATS),
    *(Case("bf16", "dist_muon", format=f, layout="tp2") for f in FORMATS),
    Case("bf16", "soap", "sharded", "torch", "tp2"),
    Case("bf16", "muon", layout="tp2", recipe="tetrajet"),
]

# Resumed with another learning rate.
RATES = [QUICK, Case("bf16", "adam", "sharded")]
# Saved under TP2, loaded under others.
RESHARDED = {"fp32": "", "fp16": "--fp16 --initial-loss-scale 1024"}

# Launches that stop, and a part of their line.
REFUSED = {
    "--optimizer sgd --use-distributed-optimizer": "--optimizer sgd does not support",
    "--optimizer muon --fp16": "use --bf16",
    "--optimizer muon --use-distributed-optimizer": "needs --bf16: add it, or use --optimizer muon",
    "--optimizer dist_muon": "needs --bf16: add it, or use --optimizer muon",
    "--optimizer soap --bf16 --load nowhere": "use --ckpt-format torch",
    "--use-torch-fsdp2 --ckpt-format torch_dcp": "--use-torch-fsdp2 needs a GPU",
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor": "--use-megatron-fsdp needs a GPU",
    "--ckpt-format torch_dcp": "torch_dcp is only tested with FSDP",
    "--ckpt-format fsdp_dtensor": "fsdp_dtensor is only tested with Megatron FSDP",
}
# Launches that do not fit the checkpoint of QUICK.
MISFITS = {
    "--optimizer sgd": "--optimizer was adam and is sgd; give what was, or add --no-load-optim",
    "--bf16": "was trained in FP32, without --bf16 and --fp16; launch so",
    "--lr 2e-3": "--lr was 0.001 and is 0.002; add --override-opt_param-scheduler",
}
RATE = "--lr 2e-3 --override-opt_param-scheduler"
SAVED_RATE = "--lr 2e-3 --use-checkpoint-opt_param-scheduler"
# The mends of optimizer_compat.py, a case that needs each, and what upstream does there.
MENDS = {
    "initial_state": (Case("fp16", "adam"), "KeyError"),
    "initial_state of SGD": (Case("bf16", "sgd"), "'NoneType' object is not callable"),
    "fp32_shards": (Case("fp32", "adam", "sharded"), "a view of a leaf Variable"),
    "distributed_adam": (Case("bf16", "adam", "reshardable"), "KeyError: 'step'"),
}
# --ckpt-step 2 after four steps, where upstream reads the state of the fourth.
STEP = Case("bf16", "adam", "sharded", "torch")


# --- what a checkpoint holds -----------------------------------------------------------------


def differences(one: Path, other: Path) -> list[str]:
    """Names of what is not equal, bit for bit, in two checkpoints of one format."""
    a, b = dict(flat(contents(one))), dict(flat(contents(other)))
    assert sum(isinstance(leaf, torch.Tensor) for leaf in a.values()) > 8
    return [name for name in a.keys() | b.keys() if not equal(a.get(name), b.get(name))]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


# --- the runs ----------------------------------------------------------------------------------


def twice(cases: list[Case], folder: Path) -> dict[str, str]:
    """Flags of a run that saves its second and fourth step, and of one that resumes the second."""
    runs = {}
    for case in cases:
        kept, resumed = folder / str(case), folder / f"{case}-resumed"
        runs[f"{case} saves"] = f"{case.flags} {saving(kept)}"
        runs[str(case)] = f"{case.flags} {again(kept)} {saving(resumed)}"
    return runs


def check(folder: Path, case: Case, result: Result) -> None:
    good(result)
    kept, resumed = folder / str(case), folder / f"{case}-resumed"
    assert differences(kept / "iter_0000004", resumed / "iter_0000004") == []
    assert differences(kept / "iter_0000002", kept / "iter_0000004") != []  # the control


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def one(folder: Path) -> Runs:
    runs = twice(ON_ONE, folder) | {flags: flags for flags in REFUSED}
    runs |= without_mends(folder) | misfits(folder) | other_rates(folder)
    return run_in_turn(1, runs, sizes=SMALL)


def without_mends(folder: Path) -> dict[str, str]:
    runs = {}
    for name, (case, _) in MENDS.items():
        without, kept = f"without={name.split()[0]} {case.flags}", folder / name.replace(" ", "-")
        runs[f"{name} saves"] = f"{without} {saving(kept)}"
        runs[name] = f"{without} {again(kept)}"
    return runs | {"ckpt_step": f"without=ckpt_step {STEP.flags} {again(folder / str(STEP))}"}


def misfits(folder: Path) -> dict[str, str]:
    bare = folder / "bare"
    runs = {f"misfit {flags}": f"{flags} {again(folder / str(QUICK))}" for flags in MISFITS}
    runs["saves bare"] = f"--no-save-optim {saving(bare)}"
    return runs | {"bare": f"--load {bare}"}


def other_rates(folder: Path) -> dict[str, str]:
    runs = {}
    for case in RATES:
        flags = f"{case.flags} {again(folder / str(case))}"
        runs[f"{case} rate"] = f"{flags} {RATE} {saving(folder / f'{case}-rate')}"
        runs[f"{case} rate unmended"] = f"without=learning_rates {flags} {RATE}"
    kept, resumed = again(folder / str(QUICK)), saving(folder / "saved-rate")
    return runs | {"saved rate": f"{QUICK.flags} {kept} {SAVED_RATE} {resumed}"}


@pytest.fixture(scope="module")
def two(folder: Path) -> Runs:
    runs = twice(ON_TWO, folder) | {"unequal": "--bf16 --optimizer dist_muon"}
    for precision, flags in RESHARDED.items():
        saved = folder / f"{precision}-tp2"
        runs[f"{precision} saves"] = f"{flags} {TP2_SP} {ENDS} {saving(saved)}"
        for layout in ("dp2", "pp2"):
            runs[f"{precision} {layout}"] = (
                f"{flags} {LAYOUTS[layout]} {ENDS} {again(saved)} "
                f"--save {folder / f'{precision}-{layout}'}"
            )
    return run_in_turn(2, runs, sizes=SMALL)


@pytest.fixture(scope="module")
def emerging(folder: Path) -> Runs:
    return run_in_turn(2, twice(OF_EMERGING, folder), sizes=SMALL)


# --- the tests ---------------------------------------------------------------------------------


def test_fp32_goes_on_bit_for_bit(folder: Path) -> None:
    check(folder, QUICK, run_in_turn(1, twice([QUICK], folder), sizes=SMALL)[str(QUICK)])


@pytest.mark.outside
@pytest.mark.parametrize("case", ON_ONE, ids=str)
def test_one_process_goes_on_bit_for_bit(folder: Path, one: Runs, case: Case) -> None:
    check(folder, case, one[str(case)])


@pytest.mark.outside
@pytest.mark.parametrize("case", ON_TWO, ids=str)
def test_two_processes_go_on_bit_for_bit(folder: Path, two: Runs, case: Case) -> None:
    check(folder, case, two[str(case)])


@pytest.mark.outside
@pytest.mark.skipif(not HAS_EMERGING, reason="emerging-optimizers is not installed")
@pytest.mark.parametrize("case", OF_EMERGING, ids=str)
def test_emerging_optimizers_go_on_bit_for_bit(folder: Path, emerging: Runs, case: Case) -> None:
    check(folder, case, emerging[str(case)])


@pytest.mark.outside
def test_fp16_is_saved_before_its_first_step(folder: Path, one: Runs) -> None:
    """The case fp16 is what it is meant to be: the step count is 0 at the second iteration."""
    case = Case("fp16", "adam")
    good(one[str(case)])
    states = [dict(flat(contents(folder / str(case) / f"iter_000000{n}"))) for n in (2, 4)]
    name = next(name for name in states[0] if name.endswith("common_step"))
    assert [float(state[name]) for state in states] == [0, 2]


@pytest.mark.outside
@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_saved_is_refused(folder: Path, one: Runs, flags: str) -> None:
    assert REFUSED[flags] in told(one[flags])


@pytest.mark.outside
@pytest.mark.parametrize("name", MENDS)
def test_without_a_mend_the_checkpoint_cannot_be_loaded(folder: Path, one: Runs, name: str) -> None:
    assert MENDS[name][1] in told(one[name])


@pytest.mark.outside
def test_gloo_has_no_gather_of_unequal_shards(two: Runs) -> None:
    assert "use --optimizer muon without --use-distributed-optimizer" in told(two["unequal"])


@pytest.mark.outside
def test_ckpt_step_chooses_the_state_of_the_distributed_optimizer(one: Runs) -> None:
    assert "] at iteration 2\n" in good(one[str(STEP)]).output
    assert "] at iteration 4\n" in good(one["ckpt_step"]).output  # the control


@pytest.mark.outside
def test_a_launch_that_does_not_fit_a_checkpoint_is_told_how_to(folder: Path, one: Runs) -> None:
    for flags, text in MISFITS.items():
        assert text in told(one[f"misfit {flags}"])
    assert "add --no-load-optim" in told(one["bare"])


@pytest.mark.outside
@pytest.mark.parametrize("case", RATES, ids=str)
def test_a_run_goes_on_with_another_learning_rate(folder: Path, one: Runs, case: Case) -> None:
    good(one[f"{case} rate"])
    assert "0.002" in told(one[f"{case} rate unmended"])
    resumed = dict(flat(contents(folder / f"{case}-rate" / "iter_0000004")))
    assert {rate for name, rate in resumed.items() if name.endswith("max_lr")} == {2e-3}
    # The fourth step's, of a cosine from 2e-3 to 1e-4 over ten.
    rates = {rate for name, rate in resumed.items() if name.endswith("/lr")}
    assert list(rates) == [pytest.approx(1e-4 + 0.95e-3 * (1 + math.cos(math.pi * 0.4)))]


@pytest.mark.outside
def test_a_run_goes_on_with_the_rates_of_its_checkpoint(folder: Path, one: Runs) -> None:
    good(one["saved rate"])
    there, here = (folder / name / "iter_0000004" for name in (str(QUICK), "saved-rate"))
    assert differences(there, here) == []


@pytest.mark.outside
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
@pytest.mark.parametrize("precision", RESHARDED)
def test_another_layout_loads_the_same_state(
    folder: Path, two: Runs, precision: str, layout: str
) -> None:
    good(two[f"{precision} {layout}"])
    then, now = (folder / f"{precision}-{name}" / "iter_0000002" for name in ("tp2", layout))
    assert differences(then, now) == []
