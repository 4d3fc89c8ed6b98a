"""How a tensor of Megatron's is put together from tensors of `transformers`, and taken apart.

`join` makes Megatron's tensor, and `split` is its inverse. Except where a class says otherwise,
both only move rows (the first axis), so that they can be applied to anything that has the same
rows: a weight [out, in], its bias [out], its 4-bit codes [out, in / 2], its block scales
[out, in / 32].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TensorLayout(Protocol):
    def join(self, parts: list[Tensor]) -> Tensor:
        """Megatron's tensor."""

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of `transformers`."""


@dataclass(frozen=True)
class Same:
    """One tensor, the same on both sides."""

    def join(self, parts: list[Tensor]) -> Tensor:
        [part] = parts
        return part

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Rows:
    """Tensors with the same number of rows, one below the other: gate and up make linear_fc1."""

    parts: int = 2

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def split(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(self.parts))


@dataclass(frozen=True)
class Qkv:
    """Q, K and V make linear_qkv.

    `transformers` has all heads of Q, then those of K, then those of V. Megatron has, for each
    query group, the group's heads of Q, its head of K and its head of V.

    groups: query groups, which is the number of heads of K. heads: of Q in one group. size: rows of
    a head.
    """

    groups: int
    heads: int
    size: int

    def join(self, parts: list[Tensor]) -> Tensor:
        grouped = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        grouped = tensor.reshape(self.groups, -1, *tensor.shape[1:])
        sizes = [self.heads * self.size, self.size, self.size]
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


@dataclass(frozen=True)
class Transposed:
    """The `inner` layout of weights that `transformers` keeps as [in, out], as GPT-2's Conv1D does.

    parts: into how many equal parts the [out] of its one tensor is divided for `inner`: 3 for Q, K
    and V in one tensor. A bias [out] is not transposed.
    """

    inner: TensorLayout
    parts: int = 1

    def join(self, parts: list[Tensor]) -> Tensor:
        [part] = parts
        rows = part.mT if part.dim() == 2 else part
        return self.inner.join(list(rows.chunk(self.parts)))

    def split(self, tensor: Tensor) -> list[Tensor]:
        rows = torch.cat(self.inner.split(tensor))
        return [rows.mT if rows.dim() == 2 else rows]


@dataclass(frozen=True)
class PaddedRows:
    """A tensor with a row for each token, and on Megatron's side zeros for the rows after them.

    rows: tokens of the vocabulary. padded: rows of Megatron's tensor.
    """

    rows: int
    padded: int

    def join(self, parts: list[Tensor]) -> Tensor:
        [part] = parts
        return torch.nn.functional.pad(part, (0, 0, 0, self.padded - self.rows))

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [tensor[: self.rows]]


_SAME = Same()


@dataclass(frozen=True)
class Entry:
    """One tensor of Megatron's, or the part of it that belongs to one layer or one expert.

    key: in the checkpoint. shape: of the part, as the settings of the model imply it.
    index: the part's place in the first axes: (), (layer,), or (layer, expert). axes: the sizes of
    those axes.
    names: of the tensors of `transformers`.
    linear: the global module name of the linear whose weight this is, such as
        "decoder.layers.3.mlp.linear_fc1"; None if it is not the weight of a linear that follows a
        recipe.
    """

    key: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    layout: TensorLayout = _SAME
    index: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    linear: str | None = None


@dataclass(frozen=True)
class Layer:
    """Makes the entries of one layer of a decoder.

    number: from 0. layers: of the model. stacked: whether Megatron's checkpoint has one tensor for
        all layers, as it does where all layers have the same tensors.
    prefix: what precedes the number in names of `transformers`.
    """

    number: int
    layers: int
    stacked: bool
    prefix: str = "model.layers"

    def entry(
        self, key: str, shape: tuple[int, ...], names: tuple[str, ...], layout: TensorLayout = _SAME
    ) -> Entry:
        """A tensor. key, names: what follows the number of the layer."""
        return Entry(self._key(key), shape, self._names(names), layout, *self._place())

    def linear(
        self,
        module: str,
        shape: tuple[int, int],
        names: tuple[str, ...],
        layout: TensorLayout = _SAME,
    ) -> Entry:
        """The weight of a linear. module, names: without ".weight"."""
        weights = self._names(tuple(f"{name}.weight" for name in names))
        name = f"decoder.layers.{self.number}.{module}"
        return Entry(self._key(f"{module}.weight"), shape, weights, layout, *self._place(), name)

    def expert(
        self,
        module: str,
        number: int,
        experts: int,
        shape: tuple[int, int],
        names: tuple[str, ...],
        layout: TensorLayout = _SAME,
    ) -> Entry:
        """The weight of a linear of one of the layer's experts.

        module: linear_fc1 or linear_fc2. number: the expert's, from 0. experts: of the layer.
        """
        weights = self._names(tuple(f"{name}.weight" for name in names))
        key = self._key(f"mlp.experts.experts.{module}.weight")
        index, axes = self._place()
        name = f"decoder.layers.{self.number}.mlp.experts.local_experts.{number}.{module}"
        return Entry(key, shape, weights, layout, (*index, number), (*axes, experts), name)

    def _key(self, key: str) -> str:
        return f"decoder.layers.{key}" if self.stacked else f"decoder.layers.{self.number}.{key}"

    def _names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{self.prefix}.{self.number}.{name}" for name in names)

    def _place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return ((self.number,), (self.layers,)) if self.stacked else ((), ())
