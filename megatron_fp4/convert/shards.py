"""Which part of each weight a rank of a Megatron layout has.

Megatron splits column-parallel linears and the vocabulary over their rows, and row-parallel linears
over their columns. A gated fc1 has two matrices, one below the other, and a rank has rows of both.
The layers are split evenly over pipeline stages; the first also has the embedding, the last what
follows the layers. Ranks are numbered as Megatron numbers them: tensor-parallel ranks first, then
expert-parallel ones, then stages.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_fp4.convert.arguments import whole_number
from megatron_fp4.convert.keys import Address, address
from megatron_fp4.convert.metadata import Region, TensorInfo
from megatron_fp4.errors import ConfigError

_COLUMN = ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer")  # with their biases
_ROW = ("linear_proj", "linear_fc2")


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel dimensions of a launch. gated: whether fc1 is gated (SwiGLU)."""

    tensor: int
    pipeline: int
    expert: int
    layers: int
    gated: bool

    @property
    def ranks(self) -> int:
        """How many ranks have different shards."""
        return self.tensor * self.pipeline * self.expert


def layout_of(args: argparse.Namespace, tensor: int, pipeline: int, expert: int) -> ParallelSizes:
    """The layout for the model of a checkpoint. args: Megatron's, of the run that saved.

    Raises ConfigError if the sizes do not divide the model's.
    """
    layers, experts = whole_number(args, "num_layers"), getattr(args, "num_experts", None) or 1
    gated = any(getattr(args, name, False) for name in ("swiglu", "quick_geglu"))
    sizes = (("tensor", tensor), ("pipeline", pipeline), ("expert", expert))
    for name, size in sizes:
        if size < 1:
            raise ConfigError(f"--{name}-model-parallel-size is 1 or more, not {size}")
    if layers % pipeline:
        raise ConfigError(
            f"{layers} layers are not a multiple of --pipeline-model-parallel-size {pipeline}"
        )
    if experts % expert:
        raise ConfigError(
            f"{experts} experts are not a multiple of --expert-model-parallel-size {expert}"
        )
    return ParallelSizes(tensor, pipeline, expert, layers, gated)


def shards(key: str, info: TensorInfo, layout: ParallelSizes) -> Iterator[tuple[int, Region]]:
    """(rank, part of the tensor) for each part that a rank of its own has.

    A part that several ranks have is given to the first. Raises ConfigError if the layout does not
    divide the tensor.
    """
    at = address(key)
    axis = _axis(at, info)
    ranges = [range(size) if i < at.leading else [None] for i, size in enumerate(info.shape)]
    for index in product(*ranges):
        leading = tuple(i for i in index if i is not None)
        first = _first_rank(at, leading, info, layout)
        rest = info.shape[at.leading :]
        for tensor_rank, start, size in _splits(key, at, axis, rest, layout):
            offset = [0] * len(rest)
            shape = list(rest)
            if axis is not None:
                offset[axis], shape[axis] = start, size
            yield (
                first + tensor_rank,
                ((*leading, *offset), (*(1 for _ in leading), *shape)),
            )


def _first_rank(
    at: Address, leading: tuple[int, ...], info: TensorInfo, layout: ParallelSizes
) -> int:
    """The first tensor-parallel rank that has the part at `leading` of the first axes."""
    stage = layout.pipeline - 1
    if at.is_layer:
        layer = leading[0] if at.is_stacked else at.layer
        assert layer is not None
        stage = min(layer * layout.pipeline // layout.layers, stage)
    elif at.name.startswith("embedding."):
        stage = 0
    expert = 0
    if at.has_experts:
        expert = leading[-1] * layout.expert // info.shape[at.leading - 1]
    return (stage * layout.expert + expert) * layout.tensor


def _axis(at: Address, info: TensorInfo) -> int | None:
    """The axis, after the leading ones, over which tensor-parallel ranks split; None: they do
    not."""
    module, _, parameter = at.name.rpartition(".")
    linear, axes = module.rpartition(".")[2], len(info.shape) - at.leading
    if linear in _COLUMN and (parameter, axes) in (("weight", 2), ("bias", 1)):
        return 0
    return 1 if linear in _ROW and (parameter, axes) == ("weight", 2) else None


def _splits(
    key: str, at: Address, axis: int | None, shape: tuple[int, ...], layout: ParallelSizes
) -> Iterator[tuple[int, int, int]]:
    """(tensor-parallel rank, start, size) of the parts along the axis."""
    if axis is None:
        yield 0, 0, 0
        return
    matrices = 2 if layout.gated and ".linear_fc1." in at.name else 1
    size, left = divmod(shape[axis], matrices * layout.tensor)
    if left:
        raise ConfigError(
            f"{key} has {shape[axis] // matrices} {('rows', 'columns')[axis]}, not a multiple of "
            f"--tensor-model-parallel-size {layout.tensor}"
        )
    for matrix, rank in product(range(matrices), range(layout.tensor)):
        yield rank, (matrix * layout.tensor + rank) * size, size
