"""Backends: who prepares the operands and multiplies them.

`choose` says which backend runs a GEMM and why the faster ones do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from megatron_fp4.backends import fused
from megatron_fp4.backends.base import ROCM, Backend, Decoded, Operand, Preparation, finish
from megatron_fp4.backends.bf16 import Bf16
from megatron_fp4.backends.blackwell import Blackwell
from megatron_fp4.backends.hopper import Hopper
from megatron_fp4.backends.nvfp4 import Nvfp4
from megatron_fp4.backends.reference import Reference
from megatron_fp4.backends.sm100 import Sm100
from megatron_fp4.recipe import GemmRecipe

__all__ = [
    "BACKENDS",
    "ROCM",
    "Backend",
    "Choice",
    "Decoded",
    "Operand",
    "Preparation",
    "choose",
    "finish",
    "kernels_problem",
]

# The fastest first.
BACKENDS: tuple[Backend, ...] = (Sm100(), Blackwell(), Nvfp4(), Hopper(), Bf16(), Reference())


@dataclass(frozen=True)
class Choice:
    """backend: the one that runs. passed_over: (name, reason) of each faster one."""

    backend: Backend
    passed_over: tuple[tuple[str, str], ...]


def kernels_problem(device: torch.device) -> str | None:
    """Why operands are made without the kernels on a GPU, where they are."""
    return fused.problem() if device.type == "cuda" else None


@cache
def choose(gemm: GemmRecipe, device: torch.device, dtype: torch.dtype) -> Choice:
    """The fastest backend that can run `gemm` of a model that computes in `dtype` on `device`."""
    passed_over: list[tuple[str, str]] = []
    for backend in BACKENDS:
        reason = backend.unavailable(gemm, device, dtype)
        if reason is None:
            return Choice(backend, tuple(passed_over))
        passed_over.append((backend.name, reason))
    raise AssertionError("the reference backend runs everything")
