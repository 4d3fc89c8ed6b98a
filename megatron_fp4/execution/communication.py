"""Collectives of one linear under tensor parallelism.

Where the plan says so, codes and scales are gathered instead of BF16 matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fp4.arithmetic.hot_channels import Columns, Outliers
from megatron_fp4.arithmetic.outliers import Residual
from megatron_fp4.arithmetic.quantized_tensor import QuantizedTensor
from megatron_fp4.arithmetic.quantizer import WHOLE_AXIS
from megatron_fp4.operands import Operand
from megatron_fp4.recording import current
from megatron_fp4.setting import Sharding


class Pending[A]:
    """The result of an asynchronous operation; computation can go on until `wait` is called.

    arrive: waits for the operation and returns its result; None where `value` is the result, which
    is then ready.
    """

    def __init__(self, arrive: Callable[[], A] | None, value: A | None = None) -> None:
        self._arrive, self._value = arrive, value

    def wait(self) -> A:
        """Waits for the operation and returns its value; a second call returns it at once."""
        if self._arrive is not None:
            self._value, self._arrive = self._arrive(), None
        return self._value  # type: ignore[return-value]

    def then[B](self, function: Callable[[A], B]) -> Pending[B]:
        """A Pending of function(value); the function runs when it is waited for."""
        return Pending(lambda: function(self.wait()))


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel group over which one linear is sharded, and its collectives."""

    group: dist.ProcessGroup
    sharding: Sharding

    @property
    def size(self) -> int:
        return self.sharding.ranks

    def part(self, rows: Tensor) -> Tensor:
        """This rank's part of a tensor whose first axis is the tokens of all ranks."""
        return rows.chunk(self.size)[dist.get_rank(self.group)]

    def maximum(self, maxima: list[Tensor]) -> list[Tensor]:
        """The elementwise maximum of each tensor over the ranks, by one collective for all."""
        flat = torch.cat([m.flatten() for m in maxima])
        _after(
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=self.group, async_op=True), flat
        ).wait()
        sizes = [m.numel() for m in maxima]
        return [f.view(m.shape) for f, m in zip(flat.split(sizes), maxima, strict=True)]

    def gather(self, operand: Operand) -> Pending[Operand]:
        """Gathers the tokens of an operand of which each rank has a part.

        operand: codes and scales, or a matrix [tokens, features] in high precision.
        """
        if isinstance(operand, QuantizedTensor):
            return self._gather_quantized(operand)
        return self._gather([operand], 0).then(itemgetter(0))

    def gather_outliers(self, outliers: Outliers) -> Pending[Outliers]:
        """Gathers the tokens of what was split off X. All ranks have the same channels."""
        if isinstance(outliers, Residual):
            return self._gather_residual(outliers)
        return self._gather([outliers.values], 0).then(
            lambda values: Columns(values[0], outliers.channels)
        )

    def _gather_residual(self, residual: Residual) -> Pending[Outliers]:
        """The lines of scope "channel" and "tensor" span the tokens: a gathered line has one rank's
        elements after the other's.
        """
        tokens, features = residual.shape
        shape = torch.Size((tokens * self.size, features))
        values, places, axis = residual.values, residual.places, 0
        if residual.scope != "token":
            length = tokens if residual.scope == "channel" else tokens * features
            places, axis = places.long() + length * dist.get_rank(self.group), -1
        whole = self._gather([values, places], axis)
        return whole.then(
            lambda parts: replace(residual, values=parts[0], places=parts[1], shape=shape)
        )

    def _gather_quantized(self, part: QuantizedTensor) -> Pending[Operand]:
        tokens = -1 if part.axis == 0 else 0  # tokens come first, or last where they are blocked
        # A scale that spans all tokens is the same on every rank, and is not sent.
        spans = part.quantizer.block[1 if tokens else 0] == WHOLE_AXIS
        travels = [part.codes] if spans else [part.codes, part.scales]
        # So is a row scale along the tokens. That of a token is sent.
        sends_rows = bool(part.quantizer.row_max) and tokens == 0 and part.tensor_scale is not None
        if sends_rows:
            travels.append(part.tensor_scale)  # type: ignore[arg-type]
        shape = torch.Size((part.shape[0] * self.size, *part.shape[1:]))

        def whole(arrived: list[Tensor]) -> Operand:
            outer_scale = arrived.pop() if sends_rows else part.tensor_scale
            codes, scales = (*arrived, part.scales)[:2]
            return replace(
                part, codes=codes, scales=scales, tensor_scale=outer_scale, shape=shape, counts=None
            )

        return self._gather(travels, tokens).then(whole)

    def _gather(self, parts: list[Tensor], axis: int) -> Pending[list[Tensor]]:
        """Gathers several matrices along an axis (0 or -1), by one collective for all of them.

        One launch of a collective costs more host time than a kernel. The matrices are sent as
        bytes, since their dtypes may differ.
        """
        parts = [part.contiguous() for part in parts]
        wholes = [part.new_empty(self.size * len(part), *part.shape[1:]) for part in parts]
        received, sent = ([t.view(torch.uint8) for t in side] for side in (wholes, parts))
        wait = _started(self.group.allgather_into_tensor_coalesced(received, sent))

        def arrive() -> list[Tensor]:
            wait()
            if axis == 0:
                return wholes
            return [torch.cat(whole.chunk(self.size), axis) for whole in wholes]

        return Pending(arrive)

    def scatter_sum(self, partial: Tensor) -> Pending[Tensor]:
        """Reduce-scatters [tokens, features]: the sum over the ranks, of this rank's tokens."""
        part = partial.new_empty(partial.shape[0] // self.size, *partial.shape[1:])
        work = dist.reduce_scatter_tensor(
            part, partial.contiguous(), group=self.group, async_op=True
        )
        return _after(work, part)

    def sum(self, partial: Tensor) -> Pending[Tensor]:
        """All-reduces a tensor in place: the sum over the ranks."""
        return _after(dist.all_reduce(partial, group=self.group, async_op=True), partial)


def _after(work: dist.Work, value: Tensor) -> Pending[Tensor]:
    wait = _started(work)

    def arrive() -> Tensor:
        wait()
        return value

    return Pending(arrive)


def _started(work: dist.Work) -> Callable[[], None]:
    """A function that waits for a collective which was just started, and tells the recorder."""
    recorder = current.recorder
    if recorder is None:
        return work.wait  # type: ignore[return-value]
    collective = recorder.started()

    def wait() -> None:
        with _disable_current_modes():  # gloo's copies are not part of the pass
            work.wait()
        recorder.waited(collective)

    return wait
