"""Averages of weights in every layout and precision: numpy's recurrence over the main weights, the
bits of one process where a layout repeats it, and a resumed run that ends with the same bits."""

from __future__ import annotations

import functools
import importlib.util
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from testing.worlds import checkpoint_contents
from testing.worlds.checkpoint_contents import averages, contents, flat, weights
from testing.worlds.checkpoints import EP2, MOE, PP2, SCRIPT, SHARDED, TP2_SP, good, saving
from testing.worlds.conversions import GPT2, LLAMA
from testing.worlds.launch import Result, result_of, spawn

pytestmark = pytest.mark.outside

BETA = 0.75
EMA = (
    "--fp4-recipe tetrajet-ema --fp4-recipe-option ema_beta=0.75 --fp4-recipe-option ema_delay=0 "
    "--clip-grad 0"  # a norm of gradients would be summed in another order in each layout
)
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
DEEP = f"{LLAMA} --num-layers 4"
DIVIDED = f"{LLAMA} --num-layers 3"  # the halves of its parameters divide a linear's weight
EXPERTS = f"{LLAMA} {MOE}"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
TP2_DP2 = f"{TP2_SP} {SHARDED}"
FROZEN = "freezes=.mlp.linear_fc1"
FP16 = "--fp16 --loss-scale 128 --accumulate-allreduce-grads-in-fp32"


@dataclass(frozen=True)
class Case:
    """A model in a layout.

    model: flags. layout: of `processes` processes. training: precision and optimizer. fault: of
    pretrain_with_faults.py. repeats: whether the layout repeats one process bit for bit. Others sum
    in another order, or round other numbers to FP16.
    """

    model: str
    processes: int
    layout: str
    training: str = "--bf16"
    fault: str = ""
    repeats: bool = True


CASES = {
    "dp2": Case(LLAMA, 2, ""),
    "dp2-overlapped": Case(DIVIDED, 2, OVERLAPPED),
    "dp2-fp16": Case(DIVIDED, 2, SHARDED, FP16, repeats=False),
    "dp2-fp32": Case(DIVIDED, 2, OVERLAPPED, ""),
    "tp2": Case(LLAMA, 2, TP2_SP, repeats=False),
    "tp2-dp2": Case(LLAMA, 4, TP2_DP2, repeats=False),
    "pp2": Case(LLAMA, 2, PP2),
    "pp2-fp16": Case(LLAMA, 2, PP2, FP16),
    "pp2-fp32": Case(LLAMA, 2, PP2, ""),
    "vpp2": Case(DEEP, 2, VPP2),
    "vpp2-overlapped": Case(DEEP, 2, f"{VPP2} {OVERLAPPED}"),
    "muon": Case(LLAMA, 2, "", "--bf16 --optimizer muon"),
    "ep2": Case(EXPERTS, 2, EP2, repeats=False),
    "ep2-overlapped": Case(EXPERTS, 2, f"{EP2} {OVERLAPPED}", repeats=False),
    "tied-pp2": Case(GPT2, 2, PP2, repeats=False),
    "tied-tp2": Case(GPT2, 2, TP2_DP2, repeats=False),
    "frozen-dp2": Case(LLAMA, 2, OVERLAPPED, fault=FROZEN),
    "frozen-pp2": Case(LLAMA, 2, PP2, "", fault=FROZEN),
}

if importlib.util.find_spec("emerging_optimizers") is None:
    del CASES["muon"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


def launch(case: Case, flags: str, recipe: str = EMA) -> Result:
    words = f"{case.fault} {case.model} {case.training} {case.layout} {recipe} {flags}"
    return result_of(spawn(case.processes, SCRIPT, *shlex.split(words)))


@functools.cache
def one(folder: Path, case: Case) -> Path:
    """What one process saves, in four steps, of the model of a case."""
    sharded = SHARDED if "--use-distributed-optimizer" in case.layout else ""
    alone = replace(case, processes=1, layout=sharded, repeats=True)
    return trained(folder, "one", alone) if alone == case else one(folder, alone)


@functools.cache
def trained(folder: Path, name: str, case: Case, start: Path | None = None) -> Path:
    """What a case saves in its four steps, or in the last two, after the second step of `start`."""
    path = folder / f"{name}-{len(list(folder.iterdir()))}"
    if start is None:
        result = launch(case, saving(path, 1))
        assert result.status == 0, result.output[-4000:]
    else:
        good(launch(case, f"--load {start} --ckpt-step 2 {saving(path, 1)}"))
    return path


def step(path: Path, number: int) -> Path:
    return path / f"iter_{number:07d}"


def is_blended(before: Path, after: Path) -> bool:
    return checkpoint_contents.is_blended(before, after, BETA)


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in flat(contents(path)) if torch.is_tensor(leaf)}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", CASES)
def test_averages_are_numpys_of_the_main_weights(folder: Path, name: str) -> None:
    path = trained(folder, name, CASES[name])
    for number in (2, 3, 4):
        assert is_blended(step(path, number - 1), step(path, number))
    assert not is_blended(step(path, 1), step(path, 3))  # the control: another step's
    linears = {key for key in weights(step(path, 4)) if key.startswith("decoder.layers")}
    linears = {key for key in linears if ".linear_" in key and key.endswith(".weight")}
    frozen = {key for key in linears if CASES[name].fault and ".mlp.linear_fc1." in key}
    assert len(linears) == 4 and len(frozen) == bool(CASES[name].fault)
    assert averages(step(path, 4)).keys() == linears - frozen


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_with_the_same_bits(folder: Path, name: str) -> None:
    whole = trained(folder, name, CASES[name])
    rest = trained(folder, name, CASES[name], whole)
    assert are_equal(tensors(step(whole, 4)), tensors(step(rest, 4)))
    assert not are_equal(tensors(step(whole, 3)), tensors(step(rest, 4)))  # the control


@pytest.mark.parametrize("name", CASES)
def test_a_layout_goes_on_from_one_process_as_that_does(folder: Path, name: str) -> None:
    case = CASES[name]
    start = one(folder, case)
    path = trained(folder, name, case, start)
    assert is_blended(step(start, 2), step(path, 3)) and is_blended(step(path, 3), step(path, 4))
    ours, wanted = (averages(step(saved, 4)) for saved in (path, start))
    assert ours.keys() == wanted.keys() and all(ours[k].shape == wanted[k].shape for k in ours)
    if case.repeats:
        assert are_equal(ours, wanted)
    assert not are_equal(averages(step(start, 3)), wanted)  # the control


@pytest.mark.parametrize("name", CASES)
def test_one_process_goes_on_from_a_layout(folder: Path, name: str) -> None:
    case, start = CASES[name], trained(folder, name, CASES[name])
    alone = replace(case, processes=1, layout=SHARDED if "--use-dist" in case.layout else "")
    path = trained(folder, f"{name}-alone", alone, start)
    assert is_blended(step(start, 2), step(path, 3)) and is_blended(step(path, 3), step(path, 4))
    if case.repeats:
        assert are_equal(averages(step(path, 4)), averages(step(start, 4)))


@pytest.mark.parametrize("training", ["--bf16", FP16, ""])
def test_the_average_of_a_frozen_weight_is_the_weight(training: str) -> None:
    """Rounding towards it is then rounding to nearest, as in TetraJet alone."""
    case = Case(LLAMA, 2, OVERLAPPED, training, "freezes=.linear_")
    losses = launch(case, "").losses
    assert (
        len(losses) == 4
        and losses == launch(case, "", "--fp4-recipe tetrajet --clip-grad 0").losses
    )
    trains = replace(case, fault="")  # the control
    assert launch(trains, "").losses != losses
