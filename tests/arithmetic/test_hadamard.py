"""The Hadamard transform: the matrix, the product it leaves alone, and the known mistakes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError
from megatron_fp4.arithmetic.hadamard import (
    FIXED_SIGNS,
    Hadamard,
    hadamard_matrix,
    inverse,
    transform,
)
from megatron_fp4.arithmetic.philox import Key, random_signs, stream_id
from testing.oracles import fnv1a, normal, philox_scalar, relative_error

GROUPS = (2, 16, 32, 64, 128, 256)
CPU = torch.device("cpu")


def signs_for(group: int, step: int = 0) -> Tensor:
    return random_signs(group, Key(1, step), 2)


@pytest.mark.parametrize("group", GROUPS)
def test_matrix_in_natural_order(group: int) -> None:
    """H[i, j] = (-1)^popcount(i & j), Sylvester's construction in closed form."""
    expected = [[(-1.0) ** (i & j).bit_count() for j in range(group)] for i in range(group)]
    h = hadamard_matrix(group, torch.float64, CPU)
    assert h.tolist() == expected
    assert torch.equal(h @ h.t(), group * torch.eye(group, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_transform_by_its_definition(dtype: torch.dtype) -> None:
    group, x = 32, normal((3, 5, 96), 1, dtype)
    signs = signs_for(group).numpy()
    index = np.arange(group)
    h = (-1.0) ** np.array([[bin(i & j).count("1") for j in index] for i in index])
    s = np.diag(signs) @ h / math.sqrt(group)
    expected = (x.double().numpy().reshape(-1, group) @ s).reshape(3, 5, 96)
    ours = transform(x, group, torch.from_numpy(signs))
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    assert relative_error(ours, torch.from_numpy(expected)) < tolerance


@pytest.mark.parametrize("signed", [True, False], ids=["signs", "no-signs"])
@pytest.mark.parametrize("group", GROUPS)
def test_inverse(group: int, signed: bool) -> None:
    x, signs = normal((7, 512), 2), signs_for(group) if signed else None
    assert relative_error(inverse(transform(x, group, signs), group, signs), x.double()) < 1e-6


def product_error(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> float:
    """How far a b^T is from x y^T."""
    return relative_error(a.double() @ b.double().t(), x.double() @ y.double().t())


OPERANDS = normal((48, 256), 3), normal((40, 256), 4)


@pytest.mark.parametrize("signed", [True, False], ids=["signs", "no-signs"])
@pytest.mark.parametrize("group", GROUPS)
def test_the_product_is_unchanged(group: int, signed: bool) -> None:
    x, y = OPERANDS
    signs = signs_for(group) if signed else None
    assert product_error(transform(x, group, signs), transform(y, group, signs), x, y) < 1e-6


def mistake(name: str) -> tuple[Tensor, Tensor]:
    x, y = OPERANDS
    g, signs = 64, signs_for(64)
    right = transform(y, g, signs)
    if name == "other-signs":
        return transform(x, g, signs_for(64, step=1)), right
    if name == "signs-after-h":  # harmless on both operands, wrong where the other has them before
        return (transform(x, g).view(-1, g) * signs).view(x.shape), right
    if name == "wrong-axis":
        square = normal((256, 256), 5)
        return transform(square.t(), g, signs).t(), transform(y, g, signs)
    if name == "one-operand":
        return transform(x, g, signs), y
    if name == "not-normalised":
        return transform(x, g, signs) * math.sqrt(g), right
    return transform(x, 32, signs[:32]), right  # other-group


@pytest.mark.parametrize(
    "name",
    ["other-signs", "signs-after-h", "wrong-axis", "one-operand", "not-normalised", "other-group"],
)
def test_known_mistakes_change_the_product(name: str) -> None:
    """Negative controls of the check above."""
    a, b = mistake(name)
    x = normal((256, 256), 5) if name == "wrong-axis" else OPERANDS[0]
    assert product_error(a, b, x, OPERANDS[1]) > 0.1


def test_signs_come_before_h() -> None:
    """An impulse shows the order: signs before H scale a whole row of it, after H its columns."""
    x = torch.zeros(1, 16)
    x[0, 3] = 1.0
    signs = torch.tensor([1.0, 1.0, 1.0, -1.0] * 4)
    row = hadamard_matrix(16, torch.float32, CPU)[3] / 4
    assert torch.equal(transform(x, 16, signs)[0], -row)
    assert not torch.equal(-row, row * signs)


def test_groups_do_not_mix() -> None:
    """A change in one group stays in it, so that groups of a shard need no other rank."""
    x = normal((4, 128), 6)
    y = x.clone()
    y[:, 40] += 1
    same = (transform(x, 32, signs_for(32)) == transform(y, 32, signs_for(32))).view(4, 4, 32)
    assert same[:, [0, 2, 3]].all() and not same[:, 1].any()


def test_an_outlier_is_spread() -> None:
    """What the transform is for: the largest element's share of the block falls by sqrt(g)."""
    x = torch.zeros(1, 64)
    x[0, 5] = 64.0
    assert torch.equal(transform(x, 64, signs_for(64)).abs(), torch.full((1, 64), 8.0))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Hadamard(48),
        lambda: Hadamard(1),
        lambda: Hadamard(64, "fresh"),  # type: ignore[arg-type]
        lambda: transform(torch.zeros(8, 96), 64),
    ],
    ids=["not-a-power", "one", "signs", "does-not-divide"],
)
def test_errors(build) -> None:
    with pytest.raises(ConfigError):
        build()


def test_fixed_signs_are_philox_s_under_a_key_of_zeros() -> None:
    drawn = [philox_scalar((low, 0, 0, fnv1a("hadamard")), (0, 0), 7) for low in range(3)]
    bits = [drawn[i // 128][i % 128 // 32] >> i % 32 & 1 for i in range(300)]
    expected = [(-1.0) ** bit for bit in bits]
    for count in (2, 16, 128, 300):
        assert FIXED_SIGNS.vector(count).tolist() == expected[:count]
    words = [word & 0xFFFFFFFF for word in FIXED_SIGNS.words()]
    assert [-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(128)] == expected[:128]
    with torch.device("meta"):  # as under torch.set_default_device
        assert [word & 0xFFFFFFFF for word in FIXED_SIGNS.words()] == words
    # Negative control: another key, as of a seed, gives others.
    assert random_signs(16, Key(1), stream_id("hadamard")).tolist() != expected[:16]


def test_the_page_has_the_first_fixed_signs() -> None:
    page = (Path(__file__).parents[2] / "docs/numerics.md").read_text()
    shown = " ".join("+" if sign > 0 else "−" for sign in FIXED_SIGNS.vector(16))
    assert f"The first sixteen are {shown}." in page
