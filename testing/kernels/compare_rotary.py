"""Compares the rotary embedding of kernels/rotary.py, and its gradient, with Megatron's in float64.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_rotary

Prints a line for each result that differs by more than the roundings of its computation explain,
and for each known mistake that such a comparison would not notice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from megatron_fp4.mcore.model.rotary import Rotation
from testing.kernels.against_float64 import SEQUENCE, Case, Made, U, double, gradients

DTYPES = torch.float32, torch.float16, torch.bfloat16
# Heads, groups, elements of a head, and how many of them are rotated.
SIZES = (4, 2, 16, 16), (3, 1, 24, 16), (4, 4, 8, 8), (10, 2, 20, 12)


def rotary(
    made: Made, batch: int, heads: int, groups: int, d: int, rotated: int, joined: bool
) -> Case:
    """joined: QKV is one tensor, which is split. Otherwise query and key are rotated alone."""
    counts = [heads, groups, groups] if joined else [heads, groups]
    x = [made(SEQUENCE, batch, count, d) for count in counts]
    # In attention's order of axes. An axis of one element has a stride that is no distance.
    dys = [made(batch, SEQUENCE, *each.shape[2:]).transpose(0, 1) for each in x]
    # Where QKV is one tensor, each sequence of a batch has angles of its own.
    half = made(SEQUENCE, batch if joined else 1, 1, rotated // 2, scale=3.0).float()
    freqs, scale = torch.cat((half, half), -1), 1.25

    def ours(*given: Tensor) -> tuple[Tensor, ...]:
        rotation, angles = Rotation(), freqs.to(given[0].device)
        if not joined:
            return tuple(rotation.heads(each, angles, scale) for each in given)
        parts = [each.reshape(SEQUENCE, batch, groups, -1) for each in given]
        return rotation.split(torch.cat(parts, -1), d, angles, scale)

    def upstreams(interleaved: bool) -> list[Tensor]:
        angles = half.repeat_interleave(2, -1) if interleaved else freqs

        def all_of_them(*given: Tensor) -> tuple[Tensor, ...]:
            turned = (angles.double(), interleaved)
            each = [_apply_rotary_pos_emb_bshd(t, *turned, mscale=scale) for t in given[:2]]
            return *each, *given[2:]

        return gradients(all_of_them, double(x), double(dys))

    # Cosine (one ulp, and the scale), the products and the sum are rounded.
    pairs = [t.double().abs() for t in (*x, *dys)]
    bounds = [5 * U * scale * (t + t.roll(rotated // 2, -1) + t.amax(-1, True)) for t in pairs]
    results = gradients(ours, made.on(x), made.on(dys))
    name = "rotary, split" if joined else "rotary"
    return Case(name, results, upstreams(False), bounds, [1] * len(pairs), upstreams(True))


def differences(device: str, of: Sequence[torch.dtype] = DTYPES) -> list[str]:
    found: list[str] = []
    for dtype, (heads, groups, d, rotated) in itertools.product(of, SIZES):
        made = Made(dtype, device)
        for batch, joined in itertools.product((1, 2), (False, True)):
            found += rotary(made, batch, heads, groups, d, rotated, joined).differences()
    return found


if __name__ == "__main__":
    from megatron_fp4.mcore.runtime import cpu

    cpu.install_in_torch()
    # The interpreter of Triton 3.6 cuts numbers off where it converts them to BF16.
    print("\n".join(differences("cpu", DTYPES[:2])))
