"""What is said where the kernels cannot run."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
import triton

from megatron_fp4 import get_recipe
from megatron_fp4.backends import choose, fused, kernels_problem

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
