"""Compares the divisions of the kernels for block scales with IEEE 754, on a GPU or in Triton's
interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_quotients [cases]

Prints a line for each case that differs. The cases are "some" pairs of significands, "all" of them
(minutes in the interpreter), and "exponents". Without a word all three run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from megatron_fp4.kernels.launch import INTERPRETED, Launch, kernel
from megatron_fp4.kernels.quotients import quotients

ROWS, COLUMNS = 2048, 128
ONE = 0x3F800000
# Divisors with a quotient so near to the middle of two float32 numbers that it is rounded wrongly
# if the last product is rounded before it is added.
HARD = (
    0x3FB193EF, 0x3FC28613, 0x3FCD4B03, 0x3FD0AB43, 0x3FD33793, 0x3FD43D43, 0x3FD835C3, 0x3FDC8503,
    0x3FE1368B, 0x3FE25473, 0x3FEC7EC7, 0x3FF02A3B, 0x3FF0FF0F, 0x3FF92863, 0x3FFC3237, 0x3FFE01FF,
    0x3FFFFFFF,
)  # fmt: skip


@kernel(fp_fusion=False)
def divide_kernel(
    v_ptr,
    divisor_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Divides v [ROWS, COLUMNS], float32, by a divisor of each row."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = rows * COLUMNS + columns
    found = quotients(tl.load(v_ptr + at), tl.load(divisor_ptr + rows), 1, COLUMNS, INTERPRETED)
    tl.store(out_ptr + at, found)


def divided(v: Tensor, divisor: Tensor) -> Tensor:
    """|v| / divisor by the kernel. v: float32 [ROWS, COLUMNS]. divisor: float32 [ROWS]."""
    constants = dict(ROWS=ROWS, COLUMNS=COLUMNS, INTERPRETED=INTERPRETED)
    out = torch.empty_like(v)
    start = Launch(divide_kernel, (1,), (torch.float32,) * 3, constants, num_warps=8)
    start(v.device, v, divisor, out)
    return out


def differences(device: str, of: str = "") -> Iterator[str]:
    significands = (torch.arange(128, 128 + COLUMNS) / 128).expand(ROWS, COLUMNS).contiguous()
    generator = torch.Generator().manual_seed(5)
    random = torch.randint(2**23, (16 * ROWS,), generator=generator)
    random[: len(HARD)] = torch.tensor(HARD) - ONE
    cases = {"some": random, "all": torch.arange(2**23)}
    for name, found in cases.items():
        if of in ("", name):
            other = sum(
                _other(significands, (some + ONE).int().view(torch.float32), device)
                for some in found.split(ROWS)
            )
            if other:
                yield f"{name}: {other} quotients"
    if of in ("", "exponents"):
        for turn in range(8):
            v = torch.randint(2**16, (ROWS, COLUMNS), generator=generator) << 16
            bits = torch.randint(1, 0x7F800000, (ROWS,), generator=generator)
            bits[: ROWS // 2] = bits[: ROWS // 2] >> turn * 4  # the first exponents too
            divisor = bits.int().view(torch.float32)
            if other := _other(v.int().view(torch.float32), divisor, device):
                yield f"exponents {turn}: {other} quotients"


def _other(v: Tensor, divisor: Tensor, device: str) -> int:
    """How many quotients differ, of those from 2^-100 to 2^100."""
    right = (v.double() / divisor[:, None].double()).abs()
    counts = (right > 2.0**-100) & (right < 2.0**100)
    wanted = v.abs() / divisor[:, None]
    found = divided(v.to(device), divisor.to(device)).cpu()
    return int((found[counts] != wanted[counts]).sum())


if __name__ == "__main__":
    print("\n".join(differences("cpu", "".join(sys.argv[1:]))))
