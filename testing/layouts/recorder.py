"""Records the quantized operands of a training step, and compares two steps' records.

Every function that compares is called on all ranks and gives all of them the same answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor
from torch import distributed as dist

from megatron_fp4.arithmetic.formats import unpack
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.execution import backward, forward, making
from megatron_fp4.operands import Computed

EXPERT = ".local_experts."


@dataclass(frozen=True)
class OperandPart:
    """Names a rank's part of an operand: the operand, and its rows and columns when unsharded.

    label: of the operand's random stream. microbatch: None for W, which is the same in every
    microbatch of a step. rows, columns: int64 indices.
    scale: what dY must be multiplied by to be comparable between layouts; 1 for X and W. The
    schedule divides the loss by the number of a rank's microbatches, which is smaller with data
    parallelism.
    """

    label: str
    microbatch: int | None
    rows: Tensor
    columns: Tensor
    scale: int

    @property
    def key(self) -> tuple[str, int | None]:
        return self.label, self.microbatch


@dataclass(frozen=True)
class Record(OperandPart):
    """A rank's part of one quantized operand.

    codes, values, matrix: [rows, columns]: its codes, its decoded values, and the matrix from which
    it was made. draws: whether it was rounded stochastically.
    """

    codes: Tensor
    values: Tensor
    matrix: Tensor
    draws: bool


Teacher = Callable[[OperandPart, Tensor], Tensor]


class Recorder:
    """A context that records each quantized operand that is made inside it, in `records`.

    teacher: (part, matrix) -> the matrix from which the operand is made instead.
    """

    def __init__(self, teacher: Teacher = lambda part, matrix: matrix) -> None:
        self.records: list[Record] = []
        self.teacher = teacher

    def __enter__(self) -> Recorder:
        self._make = making.make_operands

        def recording(makings: Any, matrices: Any, folds: Any, site: Any, call: Any) -> Any:
            made: dict[Any, Any] = {}
            for one in makings:
                made |= self._made(one, matrices[one.matrix], folds, site, call)
            return made

        forward.make_operands = backward.make_operands = recording
        return self

    def __exit__(self, *_: Any) -> None:
        forward.make_operands = backward.make_operands = self._make

    def _made(self, one: Any, matrix: Any, folds: Any, site: Any, call: Any) -> Any:
        if isinstance(matrix, Computed):
            matrix = matrix.by(one.compute)
        parts = [_part_of(operand, matrix, site, call) for operand in one.operands]
        if isinstance(matrix, Tensor):  # else the codes of fprop, which are compared there
            matrix = self.teacher(parts[0], matrix)
        made = self._make([one], {one.matrix: matrix}, folds, site, call)
        for operand, part in zip(one.operands, parts, strict=True):
            found = made[operand].operand
            if operand.quantizer is not None and isinstance(found, QuantizedTensor):
                self.records.append(_record(part, matrix, found))
        return made


def _part_of(operand: Any, matrix: Any, site: Any, call: Any) -> OperandPart:
    placement, (rows, columns) = site.placement(operand, call), matrix.shape
    groups = torch.arange(columns // 8) if placement.groups is None else placement.groups.cpu()
    return OperandPart(
        label=site.label(operand, call),
        microbatch=None if operand.letter == "w" else call.microbatch,
        rows=torch.arange(rows) if placement.rows is None else placement.rows.cpu(),
        columns=(groups[:, None] * 8 + torch.arange(8)).flatten(),
        scale=get_num_microbatches() if operand.letter == "dy" else 1,
    )


def _record(part: OperandPart, matrix: Tensor, operand: QuantizedTensor) -> Record:
    codes = unpack(operand.codes) if operand.quantizer.format.packed else operand.codes
    return Record(
        **vars(part),
        codes=codes.cpu().view(torch.uint8).movedim(-1, operand.axis),
        values=operand.dequantize(torch.float64).cpu().float() * part.scale,
        matrix=matrix.cpu() * part.scale,
        draws=operand.quantizer.draws,
    )


# --- against one process -------------------------------------------------------------------------


def differing_codes(
    one: Iterable[Record],
    many: Iterable[Record],
    dtype: torch.dtype,
    compared: Callable[[str], bool],
    strict: bool = True,
) -> int:
    """The number of elements whose code or scale differs between one process and a layout.

    one: the records of one process. many: this rank's records. compared: which labels are compared.
    strict: assert that every shard belongs to an operand of `one`, and that all of them are found.

    A gradient can be zero in exact arithmetic, as that of the first token's query is, whose softmax
    has one entry. Its blocks then contain only rounding errors. Values below 64 epsilons of `dtype`
    (the model's) times the operand's largest value are therefore not counted.
    """
    whole = {record.key: record for record in one if compared(record.label)}
    differing, covered = 0, set()
    for part in many:
        if part.key in whole:
            covered.add(part.key)
            differing += _differing(whole[part.key], part, dtype)
        else:
            assert not strict or not compared(part.label), f"{part.key} is none of one process's"
    everywhere = gathered(covered)
    assert not strict or set().union(*everywhere) == whole.keys(), "operands are missing"
    return total(differing)


def _differing(whole: Record, part: Record, dtype: torch.dtype) -> int:
    rows = positions(whole.rows, part.rows)
    codes, values = whole.codes[rows][:, part.columns], whole.values[rows][:, part.columns]
    negligible = 64 * torch.finfo(dtype).eps * whole.values.abs().max()
    counts = torch.maximum(values.abs(), part.values.abs()) > negligible
    # Scales of a whole row or tensor are not rounded to a power of two.
    scaled = (values - part.values).abs() > 1e-4 * values.abs()
    return int((((codes != part.codes) | scaled) & counts).sum())


def positions(haystack: Tensor, needles: Tensor) -> Tensor:
    order = haystack.argsort()
    found = order[torch.searchsorted(haystack[order], needles).clamp(max=len(order) - 1)]
    assert torch.equal(haystack[found], needles), "rows that the whole operand does not have"
    return found


def differing_tokens(
    one: Iterable[Record], many: Iterable[Record], compared: Callable[[str], bool]
) -> int:
    """The number of rows of experts' operands whose codes only one process or only the layout has.

    The call that gets a token, and the token's row in it, depend on the layout. Rows are therefore
    matched by their codes. Each shard of the features is compared by itself. Rows of zeros, which
    fill the last block, are left out.
    """
    rank = mpu.get_expert_tensor_parallel_rank()
    mine: dict[Any, Counter[bytes]] = defaultdict(Counter)
    for part in many:
        if compared(part.label):
            mine[part.label, tuple(part.columns.tolist()), rank] += _tokens(part)
    everyone: dict[Any, Counter[bytes]] = defaultdict(Counter)
    for counters in gathered(dict(mine)):
        for key, counter in counters.items():
            everyone[key] += counter
    whole = [record for record in one if compared(record.label)]
    assert {label for label, *_ in everyone} == {record.label for record in whole}
    differing = 0
    for (label, columns, _), found in everyone.items():
        wanted: Counter[bytes] = Counter()
        for record in whole:
            if record.label == label:
                wanted += _tokens(record, list(columns))
        differing += ((found - wanted) + (wanted - found)).total()
    return differing


def _tokens(record: Record, columns: Any = slice(None)) -> Counter[bytes]:
    there = record.values.abs().sum(1) > 0
    return Counter(row.tobytes() for row in record.codes[there][:, columns].numpy())


def shared_noise_rows(records: Iterable[Record]) -> int:
    """The number of rows of random bits of X and dY that are drawn more than once.

    Calls, microbatches and data-parallel ranks must draw different rows. Tensor-parallel ranks that
    have parts of one operand share its rows, and are not counted.
    """
    calls: Counter[str] = Counter()
    mine: list[tuple[str, tuple[int, int], list[int]]] = []
    for record in records:
        if record.draws and record.microbatch is not None:
            expert = EXPERT in record.label
            copy = mpu.get_expert_data_parallel_rank() if expert else mpu.get_data_parallel_rank()
            mine.append((record.label, (copy, calls[record.label]), record.rows.tolist()))
            calls[record.label] += 1
    drawn: dict[str, dict[tuple[int, int], set[int]]] = defaultdict(lambda: defaultdict(set))
    for part in gathered(mine):
        for label, call, rows in part:
            # Streams may not be shared by two operands. A repeated call has its own stream.
            drawn[label][call].update(rows)
    return sum(
        sum(map(len, of_label.values())) - len(set().union(*of_label.values()))
        for of_label in drawn.values()
    )


# --- bit for bit ---------------------------------------------------------------------------------


def changed_codes(kept: Iterable[Record], again: Iterable[Record]) -> int:
    """The number of elements whose code or value differs between two steps on one layout.

    A recomputed operand is recorded twice, and both records are compared with the original.
    """
    wanted = {record.key: record for record in kept}
    found = {record.key for record in again}
    differing = sum(record.codes.numel() for key, record in wanted.items() if key not in found)
    for record in again:
        same = wanted.get(record.key)
        if same is None or same.codes.shape != record.codes.shape:
            differing += record.codes.numel()
        else:
            differing += int(((same.codes != record.codes) | (same.values != record.values)).sum())
    return total(differing)


# --- all ranks -----------------------------------------------------------------------------------


def gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def total(count: float) -> Any:
    return sum(gathered(count))


def largest(value: float) -> float:
    return max(gathered(value))
