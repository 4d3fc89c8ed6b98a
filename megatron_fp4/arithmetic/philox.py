"""Counter-based random bits: Philox-4x32 with seven rounds.

A bit depends only on the run's seed, the step, the stream (which operand of which GEMM of which
module) and the element's index in the unsharded tensor. A rerun, a recomputed activation and
another parallel layout therefore draw the same bits. docs/numerics.md, Random bits, is the
definition.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11.
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
GROUP = 8  # elements that share one draw: 4 words of 32 bits, 16 bits for each element

_MASK, _SIGN = 0xFFFFFFFF, 0x80000000
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
        # The product overflows int64, but its 64 bits are those of the unsigned product. c1 and c3
        # keep the high half of a product above their own 32 bits; later masks remove it.
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
    """The name of an operand, "<module>:<gemm>:<operand>", or of the Hadamard signs of a GEMM,
    "<module>:<gemm>".

    The random stream of the signs has this name. That of an operand has its `rounding_label`.
    """
    return f"{module}:{gemm}:{operand}" if operand else f"{module}:{gemm}"


def rounding_label(module: str, gemm: str, operand: str) -> str:
    """The name of the random stream that rounds an operand.

    dY has one stream in dgrad and wgrad, that of dgrad. Its two operands are never multiplied by
    each other, so that each product is unbiased, and the bits are drawn once for both.
    """
    return stream_label(module, "dgrad" if operand == "dy" else gemm, operand)


@cache  # called for each operand of each call; a model has a fixed set of names
def stream_id(name: str) -> int:
    """The 32-bit FNV-1a hash of a stream's name: the stream's number in the Philox counter."""
    digest = 0x811C9DC5
    for byte in name.encode():
        digest = ((digest ^ byte) * 0x01000193) & _MASK
    return digest


class Placement(NamedTuple):
    """Where the elements of a rank's matrix lie in the unsharded matrix.

    rows: int64 [local rows], the global index of each row; None: first_row, first_row + 1, ...
    groups: int64 [ceil(local columns / 8)], for each group of eight columns its global index within
        a row; None: 0, 1, 2, ...
    groups_per_row: the number of groups in a row of the unsharded matrix; None: as locally.
    first_row: the global index of the first row, where `rows` is None.
    """

    rows: Tensor | None = None
    groups: Tensor | None = None
    groups_per_row: int | None = None
    first_row: int = 0


WHOLE = Placement()


@dataclass(frozen=True)
class Key:
    """The key of the random bits of one step of a run.

    seed: an integer in [0, 2^64). step: an integer, or an int64 tensor [] that is read when the
    bits are drawn (see `word`). Raises ConfigError for others.
    """

    seed: int
    step: int | Tensor = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int | Integral) or not 0 <= self.seed < 2**64:
            raise ConfigError(f"a seed is an integer from 0 to 2**64 - 1, not {self.seed!r}")
        step = self.step
        if not isinstance(step, int | Integral | Tensor):
            raise ConfigError(f"a step is an integer or an int64 tensor [], not {step!r}")
        if isinstance(step, Tensor) and (step.dtype != torch.int64 or step.dim()):
            shape = list(step.shape)
            raise ConfigError(f"a step in memory is an int64 tensor [], not {step.dtype} {shape}")

    @cached_property
    def words(self) -> tuple[int, int]:
        """The Philox key: the seed's low and high word."""
        return self.seed & _MASK, (self.seed >> 32) & _MASK

    @cached_property
    def signed_words(self) -> tuple[int, int, int]:
        """The step's low word and `words`, as signed 32-bit integers with the same bits.

        The step's word is 0 where the step is a tensor.
        """
        step = 0 if isinstance(self.step, Tensor) else self.step & _MASK
        low, high = self.seed & _MASK, (self.seed >> 32) & _MASK
        # `signed`, without calls
        return (step ^ _SIGN) - _SIGN, (low ^ _SIGN) - _SIGN, (high ^ _SIGN) - _SIGN


def signed(word: int) -> int:
    """The low 32 bits of an integer, as the int32 with the same bits.

    Kernels take words in this form. Triton types an integer by its value: it would compile another
    kernel for one beyond int32, and a kernel for int32 refuses it.
    """
    return ((word & _MASK) ^ _SIGN) - _SIGN


def word(number: int | Tensor, device: torch.device | str) -> Tensor:
    """The low 32 bits of `number` as an int64 tensor [] on `device`.

    A captured CUDA graph reads a tensor again at each replay, and repeats a Python number as it was
    captured.
    """
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
    """Uniform integers in [0, 65536) for a rank's matrix: int32 [rows, columns].

    Element j of a group of eight columns takes word j // 2 of the group's draw: the low half if j
    is even, the high half if it is odd. placement: where the rank's matrix lies in the unsharded
    one.
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

    Sign i takes bit i % 32 of word (i % 128) // 32 of draw i // 128, whose Philox counter is
    (i // 128, draw, step, stream). draw: another number gives other signs, such as the index of
    the microbatch in wgrad.
    """
    low = torch.arange(-(-count // 128), device=device)
    words = philox4x32(
        (low, word(draw, device), word(key.step, device), word(stream, device)), key.words
    )
    bits = torch.stack(words, dim=-1)[..., None] >> torch.arange(32, device=device) & 1
    return 1.0 - 2.0 * bits.flatten()[:count].float()


class Signs(NamedTuple):
    """The random signs of one GEMM's Hadamard transform; see `random_signs`.

    draw: the word that tells draws of a step apart, in wgrad the microbatch. None: 0 in every call,
    so that kernels need not take it as an argument that changes.
    """

    key: Key
    stream: int
    draw: int | Tensor | None = None

    def vector(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """The first `count` signs: float32 [count], +1 or -1."""
        draw = 0 if self.draw is None else self.draw
        return random_signs(count, self.key, self.stream, draw, device)


@dataclass(slots=True)  # a named tuple costs twice the host time
class Noise:
    """What identifies the random bits of one operand; a maker draws them from it."""

    key: Key
    stream: int
    placement: Placement = WHOLE

    def bits16(self, like: Tensor) -> Tensor:
        """The bits for a rank's matrix `like` [rows, columns], laid out as the model holds it."""
        rows, columns = like.shape
        return random_bits16(rows, columns, self.key, self.stream, self.placement, like.device)
