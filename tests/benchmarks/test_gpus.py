"""Launches go to GPUs that their benchmark may use."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpus import visible_gpus
from benchmarks.study.running import Machine


@pytest.mark.parametrize(
    ("named", "count", "found"),
    [
        (None, 0, ()),
        ("", 0, ()),
        (None, 2, ("0", "1")),
        ("1", 1, ("1",)),
        ("3,1", 2, ("3", "1")),
        ("0,7", 1, ("0",)),  # CUDA stops at the first that there is not
        ("GPU-8932f937", 1, ("GPU-8932f937",)),
    ],
)
def test_gpus_have_the_names_of_the_environment(
    named: str | None, count: int, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == found
    assert Machine(visible_gpus()).places(1) == ([*found] or [""])
