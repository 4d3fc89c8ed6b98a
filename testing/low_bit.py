"""Optimizers with moments in few bits, and numbers for them to round."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fp4.arithmetic.low_bit import Owned
from megatron_fp4.arithmetic.low_bit_adamw import LowBitAdamW
from megatron_fp4.arithmetic.moments import FIRST, SECOND, MomentForm, Moments
from megatron_fp4.arithmetic.segments import Place, place_of
from testing.oracles import normal

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
EXACT = Moments("fp32", "fp32")
ALL = [Moments(m, v) for m in FIRST for v in SECOND]
LOW = [Moments(), Moments("fp8", "fp8"), Moments("bf16", "bf16")]
SHAPES = [(9, 17), (333,), (4,), ()]


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(normal(shape, i)) for i, shape in enumerate(SHAPES)]


def groups_of(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def owned(name: str, start: int = 0, place: Place | None = None) -> Owned:
    """place: None for a parameter that is not sharded."""
    return Owned(name, place or place_of([2**40], 0), start)


def low_bit(params: list[torch.nn.Parameter], moments: Moments, **options: Any) -> LowBitAdamW:
    optimizer = LowBitAdamW(groups_of(params), moments, seed=7, **OPTIONS | options)
    for i, param in enumerate(params):
        optimizer.place(param, owned(f"layer.{i}"))
    return optimizer


def train(optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for n in numbers:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + n / 10)
        for i, param in enumerate(parameters(optimizer)):
            param.grad = normal(tuple(param.shape), 1000 * i + n)
        optimizer.step()


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file)
    return found


def losses_of_closures(optimizer: Any, params: list[torch.nn.Parameter], steps: int) -> list[float]:
    """What steps return that get the loss, the sum of squares of `params`, as a closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([param.square().sum() for param in params]).sum()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(steps)]


def spread(n: int, seed: int, size: float = 4.0) -> Tensor:
    """Gaussian numbers over many orders of magnitude."""
    return normal((n,), seed) * (size * normal((n,), seed + 1)).exp()


def bits_of(n: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 65536, n).astype(np.int32))


def through(form: MomentForm, x: Tensor, bits: Tensor | None, start: int = 0) -> Tensor:
    codes, scales = form.encode(x, start, bits)
    assert codes.dtype == form.dtype and codes.shape == x.shape
    return form.decode(codes, scales, start)
