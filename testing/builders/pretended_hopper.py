"""Lets tests run the host code for a Hopper GPU on a machine without one.

Linears are planned for compute capability 9.0. Launches of kernels and calls of cuBLASLt do
nothing, so all results are uninitialized memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_fp4.kernels import carrier, cublaslt, launch
from megatron_fp4.kernels.quantize import _quantize_launch, _transform_launch
from megatron_fp4.plan import cache
from megatron_fp4.target import Target


@contextmanager
def pretended_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which linears on the CPU are planned for a Hopper GPU, and launch nothing."""
    compiled = launch._Compiled(None, _launched, ())
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch.Launch, "_compile", lambda self, aligned: compiled)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
    monkeypatch.setattr(cublaslt, "_function", _function)
    # Memory on a CPU is not always aligned to 256 bytes, and another alignment is another plan.
    monkeypatch.setattr(cublaslt, "_plan", _aligned(cublaslt._Plan))
    monkeypatch.setattr(cache, "target_of", lambda device: Target("cuda", (9, 0), None))
    _forget()
    yield
    _forget()


def _forget() -> None:
    """Clears the caches of plans and launches, which differ within and outside."""
    caches: list[Any] = [cache.plan_for, _quantize_launch, _transform_launch, carrier._launch]
    for each in caches:
        each.cache_clear()


def _launched(*arguments: Any) -> None:
    pass


def _function(name: str) -> Any:
    def call(*arguments: Any) -> int:
        if name == "cublasLtMatmulAlgoGetHeuristic":
            arguments[-1]._obj.value = 1  # one algorithm is found
        return 0

    return call


def _aligned(make: Any) -> Any:
    plans: dict[Any, Any] = {}

    def plan(shape: Any, types: Any, alpha: float, adds: bool, alignment: int, device: Any) -> Any:
        kind = shape, types, alpha, adds
        if kind not in plans:
            plans[kind] = make(shape, types, alpha, adds, 256, device)
        return plans[kind]

    return plan
