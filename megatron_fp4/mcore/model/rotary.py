"""Rotary embedding of a model's query and key in one kernel, which splits QKV too.

Import this module only where Triton runs.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fp4.kernels import rotary


class Rotation:
    """Rotates by angles that all layers of a model share, and makes their tables once.

    Angles are [sequence, batch or 1, 1, r], and their two halves are equal. Elements i and i + r/2
    of a head are rotated together, for i below r/2; the elements from r on stay. Cosine and sine
    are computed in FP32 and multiplied by a scale.
    """

    def __init__(self) -> None:
        self._tables = _Tables()

    def split(
        self, mixed: Tensor, d: int, angles: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the output of the QKV projection, and rotates query and key.

        mixed: [sequence, batch, groups, (n + 2) * d]. Each group has n query heads, then a key
        head, then a value head, of d elements each. angles, scale: see the class.

        Returns (query, key, value): [sequence, batch, groups * n, d], and [sequence, batch, groups,
        d] for the other two, all in memory of their own.
        """
        cos, sin = self._tables.of(angles, mixed.shape[0], mixed.shape[1], scale)
        query, key, value = _Split.apply(mixed, d, cos, sin)
        return query, key, value

    def heads(self, t: Tensor, angles: Tensor, scale: float) -> Tensor:
        """Rotates query or key alone, where QKV is split already.

        t: [sequence, batch, heads, d]. angles, scale: see the class. Returns a new tensor of t's
        shape.
        """
        cos, sin = self._tables.of(angles, t.shape[0], t.shape[1], scale)
        (rotated,) = _Split.apply(t, t.shape[-1], cos, sin)
        return rotated


class _Split(torch.autograd.Function):
    """`rotary.split`, whose gradient is `rotary.join`."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, d: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return rotary.split(mixed, d, cos, sin)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return rotary.join(gradients, *ctx.saved_tensors), None, None, None


class _Tables:
    """Cosine and sine, float32 [tokens, rotated / 2] each, of the angles that were asked for last.

    All layers of a model rotate by the same tensor of angles, and so compute and save them once. A
    CUDA graph computes its own: its replays must not read what may be freed, and others must not
    read what its replays write over.
    """

    def __init__(self) -> None:
        self._angles: ref[Tensor] | None = None
        self._form: tuple[int | float, ...] = ()
        self._made: tuple[Tensor, Tensor]

    def of(self, angles: Tensor, sequence: int, batch: int, scale: float) -> tuple[Tensor, Tensor]:
        """For [sequence, batch] tokens. angles, scale: see `Rotation`."""
        is_captured = angles.is_cuda and torch.cuda.is_current_stream_capturing()
        # What is made in inference mode has no version, and cannot be saved for a backward pass.
        if is_captured or angles.is_inference() or torch.is_inference_mode_enabled():
            return self._computed(angles, sequence, batch, scale)
        form = angles._version, sequence, batch, scale
        if self._angles is not None and self._angles() is angles and self._form == form:
            return self._made
        self._made = self._computed(angles, sequence, batch, scale)
        self._angles, self._form = ref(angles), form
        return self._made

    def __reduce__(self) -> Any:
        return _Tables, ()  # a copy of a model, or one from a file, makes its own

    @staticmethod
    def _computed(angles: Tensor, sequence: int, batch: int, scale: float) -> tuple[Tensor, Tensor]:
        halves = angles[..., 0, : angles.shape[-1] // 2].float()
        halves = halves.expand(sequence, batch, -1).flatten(0, 1)
        return torch.cos(halves) * scale, torch.sin(halves) * scale
