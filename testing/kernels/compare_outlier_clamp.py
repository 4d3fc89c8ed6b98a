"""Compares the outlier kernel with `OutlierClamp.split`, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python -m testing.kernels.compare_outlier_clamp ["34 features"]

Prints a line for each matrix that differs, of those whose width and alpha hold the words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_fp4.arithmetic.outliers import OutlierClamp
from megatron_fp4.kernels.outliers import dense, split

ALPHAS = (0.99, 0.999, 0.9, 1.0, 0.51)
ALL_ALPHAS = (2, 34)  # widths that the slow interpreter clamps under all of them
NARROW = (2, 8, 34, 130, 2100)
# Of a number and -1: alpha, that number, and what both become. float32 holds neither the first two
# weights, which are 1/2 and a little, nor the last difference.
FINE = (
    (0.5 + 2.0**-40, 1.0, (2.0**-39, -(2.0**-39))),
    (0.5 + 2.0**-53, 1.0, (2.0**-52, -(2.0**-52))),
    (1.0 - 2.0**-31, 2.0**-30, (2.0**-31, -1.0)),
)


def rows(features: int) -> dict[str, Tensor]:
    """Rows of X that are difficult to clamp, by a name: BF16 [features] each."""
    generator = torch.Generator().manual_seed(features)

    def normal() -> Tensor:
        return torch.randn(features, generator=generator)

    def choice(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (features,), generator=generator)]

    bits = torch.randint(-(2**15), 2**15, (features,), generator=generator).to(torch.int16)
    zeros, inf = choice(0.0, -0.0), torch.inf
    tiny = 2.0**-133  # the smallest subnormal number
    made = {
        "normal": normal(),
        "skewed": (3 * normal()).exp() - 0.7,
        "ties": choice(-1.5, 0.25, 3.0),
        "alike": torch.full((features,), -2.5),
        "zeros": zeros,
        "zeros and tiny": torch.where(normal().abs() < 1, zeros, choice(-tiny, tiny, 3 * tiny)),
        "a zero below": torch.full((features,), tiny),
        "a zero above": torch.full((features,), -tiny),
        "subnormal": normal() * 1e-39,
        "largest": choice(-3.38e38, 3.38e38, 1.0),
        "any": bits.view(torch.bfloat16).nan_to_num(),
        "any with NaN": bits.view(torch.bfloat16),
        "few Inf": normal(),
        "many Inf": torch.where(normal() < 1, normal(), choice(inf, -inf)),
        "Inf above": torch.where(normal() < 1, normal(), inf),
        "a NaN": normal(),
        "a negative NaN": normal(),
        "many NaN": torch.where(normal() < 1, normal(), torch.nan),
        "all NaN": torch.full((features,), torch.nan),
        "Inf at the quantile": normal().abs(),
    }
    made["few Inf"][:2] = torch.tensor([inf, -inf])[:features]
    made["a NaN"][features // 2] = torch.nan
    # Clamped to what BF16 rounds to a zero of the other sign.
    made["a zero below"][features // 2] = -0.0
    made["a zero above"][features // 2] = 0.0
    # The order statistic above the 0.99-quantile and all after it.
    ordered = made["Inf at the quantile"].sort().values
    ordered[int(0.99 * (features - 1)) + 1 :] = inf
    made["Inf at the quantile"] = ordered.roll(features // 2)
    narrow = {name: row.bfloat16() for name, row in made.items()}
    narrow["a negative NaN"].view(torch.int16)[-1] = -0x3F
    return narrow


def _bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).cpu().view(torch.int16)


def _difference(x: Tensor, names: Sequence[str], clamp: OutlierClamp, device: str) -> str | None:
    wanted, wanted_residual = clamp.split(x)
    found, residual = split(x.to(device), clamp)
    assert residual.places.dtype == wanted_residual.places.dtype
    assert residual.places.shape == residual.values.shape == wanted_residual.values.shape
    clamped = (_bits(found) != _bits(wanted)).any(1)
    if ((residual.places < 0) | (residual.places >= x.shape[1])).any():
        return f"{x.shape[1]} features, {clamp.alpha}: places beyond the row"
    off = (_bits(residual.dense()) != _bits(wanted_residual.dense())).any(1)
    off |= (_bits(dense(residual)) != _bits(wanted_residual.dense())).any(1)
    if not (clamped | off).any():
        return None
    told = [
        f"{name}{' clamped' * bool(c)}{' residual' * bool(r)}"
        for name, c, r in zip(names, clamped, off, strict=True)
        if c or r
    ]
    return f"{x.shape[1]} features, {clamp.alpha}: {', '.join(told)}"


def differences(device: str, widths: Sequence[int] = NARROW, words: str = "") -> Iterator[str]:
    """A line for each matrix whose clamped elements or residual are not the reference's."""
    for features in widths:
        made = rows(features)
        x = torch.stack(list(made.values()))
        for alpha in ALPHAS if features in ALL_ALPHAS or device != "cpu" else ALPHAS[:1]:
            if words in f"{features} features, {alpha}":
                found = _difference(x, list(made), OutlierClamp(alpha), device)
                if found is not None:
                    yield found
    for alpha, larger, bounds in FINE if words in "fine" else ():
        x = torch.tensor([[larger, -1.0]]).bfloat16()
        assert OutlierClamp(alpha).split(x)[0].tolist() == [[*bounds]]
        found = _difference(x, [f"{larger}"], OutlierClamp(alpha), device)
        if found is not None:
            yield found


if __name__ == "__main__":
    print("\n".join(differences("cpu", words=" ".join(sys.argv[1:]))))
