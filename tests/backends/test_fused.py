"""What is said where the kernels cannot run."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import triton

from megatron_fp4 import __main__, get_recipe
from megatron_fp4.backends import ROCM, choose, fused, kernels_problem
from megatron_fp4.mcore import cpu, pretrain

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    fused.problem.cache_clear()
    choose.cache_clear()
    yield
    fused.problem.cache_clear()
    choose.cache_clear()


def test_here_nothing_is_wrong() -> None:
    assert fused.problem() is None and kernels_problem(torch.device("cpu")) is None


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
    problem = kernels_problem(GPU)
    assert problem is not None and "pip install 'triton>=3.4'" in problem
    assert ("not installed" if found == "none" else found) in problem
    choice = choose(get_recipe("tetrajet").fprop, GPU, torch.bfloat16)
    assert choice.backend.name == "bf16"
    # The backends of this GPU name it too; those of another say so.
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
    assert kernels_problem(GPU) == ROCM
    choice = choose(get_recipe("tetrajet").fprop, GPU, torch.bfloat16)
    assert choice.backend.name == "reference" and ("bf16", ROCM) in choice.passed_over
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
