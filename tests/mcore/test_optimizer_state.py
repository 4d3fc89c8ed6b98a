"""Training with Adam's moments in few bits, and its checkpoints (--fp4-optimizer-state)."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import pytest
import torch

from megatron_fp4.arithmetic.moments import DEFAULT, Moments
from testing.worlds.checkpoints import EP2, MOE, PP2, SHARDED, TP2_SP, saving
from testing.worlds.launch import OVERLAP, Result
from testing.worlds.moments import (
    DIVIDED,
    DP,
    FP16,
    OVERLAPPED,
    TORCH,
    are_equal,
    dtypes,
    launch,
    step,
    tensors,
    written,
)  # fmt: skip

VPP = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
STORED = {(torch.uint8, torch.float16)}
LAYOUTS = {
    "bf16": (1, "--bf16"),
    "fp32": (1, ""),
    "bf16-torch": (1, f"--bf16 {TORCH}"),
    "fp16-sharded": (1, f"{FP16} {DP}"),
    "dp2": (2, "--bf16"),
    "dp2-sharded": (2, f"--bf16 {DP} {DIVIDED}"),
    "dp2-fully-reshardable": (2, f"--bf16 {SHARDED} {DIVIDED}"),
    "dp2-overlapped": (2, f"--bf16 {OVERLAPPED}"),
    "dp2-overlapped-fp32": (2, OVERLAPPED),
    "dp2-sharded-torch": (2, f"--bf16 {DP} {DIVIDED} {TORCH}"),
    "dp2-in-memory-of-one": (
        2, f"--bf16 {SHARDED} --distrib-optim-fully-reshardable-mem-efficient {DIVIDED}"),
    "tp2": (2, f"--bf16 {TP2_SP}"),
    "pp2-sharded": (2, f"--bf16 {PP2} {DP}"),
    "vpp2-overlapped": (2, f"--bf16 {PP2} {VPP} {shlex.join(OVERLAP)}"),
    "ep2": (2, f"--bf16 {MOE} {EP2}"),
    "ep2-sharded": (2, f"--bf16 {MOE} {EP2} {SHARDED}"),
}  # fmt: skip
QUICK = {"bf16", "dp2-sharded"}


def cases(*names: str) -> list[object]:
    every = names or tuple(LAYOUTS)
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.outside) for name in every
    ]


# --- trainings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases("bf16", "fp32", "dp2-overlapped", "ep2-sharded"))
def test_moments_in_float32_are_a_launch_without_the_flag(name: str, tmp_path: Path) -> None:
    """Bit for bit, with its checkpoint; and moments in few bits are not."""
    processes, flags = LAYOUTS[name]
    found = {}
    for i, moments in enumerate((None, Moments("fp32", "fp32"), DEFAULT)):
        folder = tmp_path / str(i)
        result = launch(folder, f"{flags} {saving(folder, 4)}", processes, moments)
        told = f"Adam's moments are stored as {moments}: {moments and f'{moments.bytes:.4g}'} bytes"
        assert (told in result.output) == (moments is not None)
        found[i] = result.losses, tensors(step(folder, 4))
    assert found[0][0] == found[1][0] and are_equal(found[0][1], found[1][1])
    assert found[0][0][:2] == found[2][0][:2] and found[0][0][3] != found[2][0][3]


@functools.cache
def whole(folder: Path, name: str) -> Result:
    processes, flags = LAYOUTS[name]
    return launch(folder / name, f"{flags} {saving(folder / name, 2)}", processes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moments")


def resumed(folder: Path, to: Path, name: str, mistake: str = "none") -> Result:
    processes, flags = LAYOUTS[name]
    loads = f"--load {folder / name} --ckpt-step 2 {saving(to, 2)}"
    return launch(to, f"{flags} {loads}", processes, mistake=mistake)


@pytest.mark.parametrize("name", cases())
def test_a_run_resumes_bit_for_bit(name: str, folder: Path, tmp_path: Path) -> None:
    one, again = whole(folder, name), resumed(folder, tmp_path, name)
    assert again.losses == one.losses[-len(again.losses) :]
    assert are_equal(tensors(step(tmp_path, 4)), tensors(step(folder / name, 4)))
    assert dtypes(tmp_path) == dtypes(folder / name) == STORED
    for mine, theirs in zip(
        written(tmp_path / "held"), written(folder / name / "held"), strict=True
    ):
        for a, b in zip(mine, theirs, strict=True):
            assert a.owned == b.owned and torch.equal(a.weight, b.weight)
    saved = tensors(step(tmp_path, 4))
    assert {t.dtype for key, t in saved.items() if "exp_avg" in key} == {torch.float32}
    assert not any("exp_avg" in key and "scale" in key for key in saved)


@pytest.mark.parametrize("name", cases("bf16", "dp2-sharded", "dp2-fully-reshardable"))
def test_a_count_of_steps_that_is_not_loaded_shows(name: str, folder: Path, tmp_path: Path) -> None:
    whole(folder, name)
    resumed(folder, tmp_path, name, "steps lost")
    assert not are_equal(tensors(step(tmp_path, 4)), tensors(step(folder / name, 4)))


@pytest.mark.parametrize("name", cases("bf16", "dp2-sharded"))
def test_a_state_that_stays_float32_shows_by_its_dtype(
    name: str, folder: Path, tmp_path: Path
) -> None:
    whole(folder, name)
    resumed(folder, tmp_path, name, "float32 after loading")
    assert dtypes(tmp_path) != STORED


SAVED_WRONG = ["the next block's scale", "the other moment's scale", "scales lost", "codes cast"]


@pytest.mark.parametrize(
    "mistake",
    [SAVED_WRONG[0], *(pytest.param(m, marks=pytest.mark.outside) for m in SAVED_WRONG[1:])],
)
def test_what_is_decoded_wrongly_shows(mistake: str, folder: Path, tmp_path: Path) -> None:
    whole(folder, "dp2-sharded")
    processes, flags = LAYOUTS["dp2-sharded"]
    launch(tmp_path, f"{flags} {saving(tmp_path, 2)}", processes, mistake=mistake)
    assert not are_equal(tensors(step(tmp_path, 2)), tensors(step(folder / "dp2-sharded", 2)))
