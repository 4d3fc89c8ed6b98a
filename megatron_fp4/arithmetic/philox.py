"""Counter-based random bits: Philox-4x32 (Salmon et al., SC11), seven rounds.

A bit is a function of the run's seed, the step, the stream (which GEMM operand of which module)
and the element's index in the UNSHARDED tensor, and of nothing else. A rerun, a recomputed
activation and another layout therefore draw the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fp4.errors import ConfigError

ROUNDS = 7
GROUP = 8  # elements that share one draw: 4 words of 32 bits, 16 bits an element

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter.

    counter: four int64 tensors (broadcastable) that hold unsigned 32-bit words, lowest first.
    key: two unsigned 32-bit words. Returns four int64 tensors of unsigned 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The 64-bit product wraps in int64; its bits, and so both halves, are still right. c1 and
        # c3 keep a product's high half above their own 32 bits, until a mask drops it.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> 32) ^ c1, (p0 >> 32) ^ c3
        c0 ^= k0
        c0 &= _MASK
        c2 ^= k1
        c2 &= _MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    words = c0, c1 & _MASK, c2, c3 & _MASK
    return torch.broadcast_tensors(*words)  # type: ignore[return-value]


def stream_label(module: str, gemm: str, operand: str = "") -> str:
    """What a stream is named: an operand's "<module>:<gemm>:<operand>", or without an operand the
    Hadamard signs' of the GEMM."""
    return f"{module}:{gemm}:{operand}" if operand else f"{module}:{gemm}"


@cache  # asked for every operand of every call, and a model has a fixed set of names
def stream_id(name: str) -> int:
    """FNV-1a, 32 bits, of a `stream_label`."""
    digest = 0x811C9DC5
    for byte in name.encode():
        digest = ((digest ^ byte) * 0x01000193) & _MASK
    return digest


class Placement(NamedTuple):
    """Where the elements of a local matrix lie in the unsharded one.

    rows: int64 [local rows], the global index of each row; None: first_row, first_row + 1, ...
    groups: int64 [ceil(local columns / 8)], the global index within its row of each group of
        eight columns; None: 0, 1, 2, ...
    groups_per_row: how many groups a row of the unsharded matrix has; None: as many as here.
    """

    rows: Tensor | None = None
    groups: Tensor | None = None
    groups_per_row: int | None = None
    first_row: int = 0


WHOLE = Placement()


@dataclass(frozen=True)
class Key:
    """What the noise of one run and one step is keyed with: the 64-bit seed, and the step, a number
    or where it lies in memory (see `word`). Raises ConfigError for a seed that does not fit, and
    for a step that is neither an integer nor an int64 tensor []."""

    seed: int
    step: int | Tensor = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"a seed is an integer from 0 to 2**64 - 1, not {self.seed!r}")
        step = self.step
        if not isinstance(step, Integral | Tensor):
            raise ConfigError(f"a step is an integer or an int64 tensor [], not {step!r}")
        if isinstance(step, Tensor) and (step.dtype != torch.int64 or step.dim()):
            shape = list(step.shape)
            raise ConfigError(f"a step in memory is an int64 tensor [], not {step.dtype} {shape}")

    @cached_property
    def words(self) -> tuple[int, int]:
        """The Philox key: the seed's low and high word."""
        return self.seed & _MASK, (self.seed >> 32) & _MASK

    @cached_property
    def signed_words(self) -> tuple[int, int]:
        """The same as int32 of the same bits."""
        low, high = (word - 2**32 if word >= 2**31 else word for word in self.words)
        return low, high


def word(number: int | Tensor, device: torch.device | str) -> Tensor:
    """The low 32 bits of a number, or of one that lies in memory: int64 []. A CUDA graph reads that
    whenever it runs, where it would repeat the number that it was captured with."""
    if isinstance(number, Tensor):
        return number.to(device) & _MASK
    return torch.full((), number & _MASK, device=device)


def random_bits16(
    rows: int,
    columns: int,
    key: Key,
    stream: int,
    placement: Placement = WHOLE,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Uniform integers in [0, 65536) for a local matrix: int32 [rows, columns].

    Element j of a group of eight takes word j // 2 of the group's draw, the low half if j is
    even, the high half if it is odd.
    """
    count = -(-columns // GROUP)
    row, first = placement.rows, placement.first_row
    if row is None:
        row = torch.arange(first, first + rows, device=device)
    group = placement.groups if placement.groups is not None else torch.arange(count, device=device)
    index = row[:, None] * (placement.groups_per_row or count) + group
    words = philox4x32(
        (
            index & _MASK,
            (index >> 32) & _MASK,
            word(key.step, device),
            word(stream, device),
        ),
        key.words,
    )
    # Little-endian: viewing a word as two 16-bit halves yields the low half first.
    halves = torch.stack(words, dim=-1).to(torch.int32).view(torch.int16)
    bits = halves.reshape(rows, count * GROUP)[:, :columns]
    return bits.to(torch.int32) & 0xFFFF


def random_signs(
    count: int,
    key: Key,
    stream: int,
    draw: int | Tensor = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`count` random signs (float32, +1 or -1) for a Hadamard transform.

    Index i takes bit i % 32 of word (i % 128) // 32 of the draw i // 128, whose counter is
    (i // 128, draw, step, stream). `draw` makes signs fresh, for each microbatch say.
    """
    low = torch.arange(-(-count // 128), device=device)
    words = philox4x32(
        (low, word(draw, device), word(key.step, device), word(stream, device)), key.words
    )
    bits = torch.stack(words, dim=-1)[..., None] >> torch.arange(32, device=device) & 1
    return 1.0 - 2.0 * bits.flatten()[:count].float()


class Signs(NamedTuple):
    """The random signs of one GEMM's Hadamard transform; see `random_signs`."""

    key: Key
    stream: int
    draw: int | Tensor = 0

    def vector(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """float32 [count], +1 or -1."""
        return random_signs(count, self.key, self.stream, self.draw, device)


class Noise(NamedTuple):
    """The random bits of one operand: what a backend needs to draw them, wherever it draws."""

    key: Key
    stream: int
    placement: Placement = WHOLE

    def bits16(self, like: Tensor) -> Tensor:
        """Bits for a local matrix in the layout in which the model holds it, [rows, columns]."""
        rows, columns = like.shape
        return random_bits16(rows, columns, self.key, self.stream, self.placement, like.device)
