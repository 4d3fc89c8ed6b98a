"""One process that takes dge-occ's quantiles of a token as tensor-parallel ranks do: each of the
features that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.backends.bf16 import Bf16
from megatron_fp4.backends.reference import Reference
from megatron_fp4.outliers import OutlierClamp, Residual
from tests.mcore.layout_mistakes import patched
from tests.mcore.layout_recorder import EXPERT

linear = import_module("megatron_fp4.linear")  # the package has a function of that name
ROW_PARALLEL = ("linear_proj", "linear_fc2")  # whose X is sharded along its features
Split = Callable[[Any, Tensor, OutlierClamp], tuple[Tensor, Residual]]


@contextmanager
def quantiles_of_parts(dense: int, experts: int) -> Iterator[None]:
    """dense, experts: how many ranks share the features of X, and those of an expert's."""
    parts, fprop = [1], linear.fprop

    def named(x: Tensor, weight: Tensor, bias: Any, recipe: Any, call: Any, *rest: Any) -> Any:
        sharded = call.name.rsplit(".", 1)[-1] in ROW_PARALLEL
        parts[0] = (experts if EXPERT in call.name else dense) if sharded else 1
        return fprop(x, weight, bias, recipe, call, *rest)

    def by_parts(split: Split) -> Split:
        def of_each(backend: Any, x: Tensor, clamp: OutlierClamp) -> tuple[Tensor, Residual]:
            count, parts[0] = parts[0], 1  # one backend asks another
            pieces = [piece.contiguous() for piece in x.chunk(count, dim=1)]
            found = [split(backend, piece, clamp) for piece in pieces]
            width = pieces[0].shape[1]
            places = torch.cat([taken.places + i * width for i, (_, taken) in enumerate(found)], 1)
            values = torch.cat([taken.values for _, taken in found], 1)
            clamped = torch.cat([piece for piece, _ in found], 1)
            return clamped, Residual(values, places, "token", x.shape)

        return of_each

    with (
        patched(linear, "fprop", named),
        patched(Reference, "split", by_parts(Reference.split)),
        patched(Bf16, "split", by_parts(Bf16.split)),
    ):
        yield
