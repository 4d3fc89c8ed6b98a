"""Lets one process take dge-occ's quantiles of a token as tensor-parallel ranks take them.

Each rank takes them over its shard of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.execution import autograd
from testing.layouts.recorder import EXPERT
from testing.patching import patched

ROW_PARALLEL = ("linear_proj", "linear_fc2")  # whose X is sharded along its features
Split = Callable[[Tensor], tuple[Tensor, Residual]]


@contextmanager
def quantiles_of_parts(dense: int, experts: int) -> Iterator[None]:
    """A context in which quantiles are taken over so many parts of the features of X.

    dense: the number of parts in a row-parallel linear. experts: in one of an expert.
    """
    forward = autograd.forward

    def with_parts(plan: Any, x: Tensor, weight: Tensor, bias: Any, site: Any, *rest: Any) -> Any:
        sharded = site.name.rsplit(".", 1)[-1] in ROW_PARALLEL
        count = (experts if EXPERT in site.name else dense) if sharded else 1
        if plan.splitting is not None and count > 1:
            split = partial(_of_parts, plan.splitting.split, count)
            plan = replace(plan, splitting=plan.splitting._replace(split=split))
        return forward(plan, x, weight, bias, site, *rest)

    with patched(autograd, "forward", with_parts):
        yield


def _of_parts(split: Split, count: int, x: Tensor) -> tuple[Tensor, Residual]:
    """Splits outliers from each of `count` parts of X's features; returns (clamped X, residual)."""
    pieces = [piece.contiguous() for piece in x.chunk(count, dim=1)]
    found = [split(piece) for piece in pieces]
    width = pieces[0].shape[1]
    places = torch.cat([taken.places + i * width for i, (_, taken) in enumerate(found)], 1)
    values = torch.cat([taken.values for _, taken in found], 1)
    clamped = torch.cat([piece for piece, _ in found], 1)
    return clamped, Residual(values, places, "token", x.shape)
