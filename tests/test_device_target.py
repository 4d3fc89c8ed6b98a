"""Devices that a linear is planned for, and what is said where the kernels cannot run."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import triton

from megatron_fp4 import ConfigError, __main__
from megatron_fp4.mcore import pretrain
from megatron_fp4.mcore.runtime import cpu
from megatron_fp4.multipliers import choose
from megatron_fp4.target import ROCM, Target, gpu_named, kernels_problem, target_of, triton_problem
from testing.builders.products import asked

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    triton_problem.cache_clear()
    yield
    triton_problem.cache_clear()


def test_here_nothing_is_wrong() -> None:
    assert triton_problem() is None


@pytest.mark.parametrize("found", ["none", "3.1.0", "2.3"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_a_triton_that_is_missing_or_too_old_is_named_with_the_remedy(
    found: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if found == "none":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(triton, "__version__", found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    problem = kernels_problem(target_of(GPU))
    assert problem is not None and "pip install 'triton>=3.4'" in problem
    assert ("not installed" if found == "none" else found) in problem
    choice = choose(asked(), target_of(GPU))
    assert choice.multiplier.name == "bf16"
    # The multipliers of this GPU name it too; those of another say so.
    reasons = [why for _, why in choice.passed_over]
    assert (problem in reasons) == (capability != (8, 0)) and len(reasons) == 4


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU is AMD's, of a number that is Hopper's too (gfx90a)."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "AMD Instinct MI250X")


@pytest.mark.usefixtures("rocm")
def test_no_kernel_is_compiled_for_rocm() -> None:
    assert kernels_problem(target_of(GPU)) == ROCM
    choice = choose(asked(), target_of(GPU))
    assert choice.multiplier.name == "reference" and ("bf16", ROCM) in choice.passed_over
    assert f"AMD Instinct MI250X, not supported: {ROCM}" in __main__.info()


@pytest.mark.usefixtures("rocm")
def test_a_launch_on_rocm_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "_mode", None)
    with pytest.raises(SystemExit) as end:
        pretrain.main()
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 1 and line.startswith(f"megatron-fp4: error: {ROCM}: hide the GPUs")


def test_a_gpu_by_its_name() -> None:
    assert gpu_named("sm_90") == Target("cuda", (9, 0))
    assert gpu_named("sm_100a").capability == (10, 0) and gpu_named("sm_120").capability == (12, 0)
    with pytest.raises(ConfigError, match="'hopper' is no GPU architecture; give sm_90"):
        gpu_named("hopper")
