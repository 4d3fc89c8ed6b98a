"""Averages are the exact ones, rounded once."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_fp4.convert.average import average, rounded
from megatron_fp4.convert.command import main
from megatron_fp4.convert.torch_dist import Checkpoint, find
from testing.builders.checkpoints import small

# dtype: bits of the significand, exponent of the smallest normal number, largest finite number
FORMATS = {
    torch.bfloat16: (8, -126, (2 - 2**-7) * 2.0**127),
    torch.float16: (11, -14, 65504.0),
    torch.float32: (24, -126, (2 - 2**-23) * 2.0**127),
}


def nearest(x: Fraction, dtype: torch.dtype) -> float:
    """x rounded to the nearest number of a format, ties to even, in exact arithmetic."""
    bits, lowest, largest = FORMATS[dtype]
    if x == 0:
        return 0.0
    exponent = max(_floor_log2(abs(x)), lowest) - (bits - 1)
    ulp = Fraction(2) ** exponent
    value = round(x / ulp) * ulp  # Python rounds fractions half to even
    return float(value) if abs(value) <= Fraction(largest) else float("inf") * (1 if x > 0 else -1)


def _floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def values(dtype: torch.dtype) -> Tensor:
    """float64 numbers of all sizes, many of them close to ties of the format."""
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(1500, generator=draw, dtype=torch.float64)
    wide *= torch.exp2(torch.randint(-150, 128, (1500,), generator=draw).double())
    grid = torch.randn(1500, generator=draw).to(dtype).double()
    bits = FORMATS[dtype][0]
    ties = grid * (1 + 2.0**-bits)  # between two numbers of the format, often
    near = ties * (1 + torch.tensor([0.0, 2.0**-40, -(2.0**-40)], dtype=torch.float64)).view(3, 1)
    ends = torch.tensor([0.0, 1e39, -1e39, 3e-46], dtype=torch.float64)
    return torch.cat([wide, near.view(-1), ends])


@pytest.mark.parametrize("dtype", FORMATS)
def test_float64_is_rounded_once(dtype: torch.dtype) -> None:
    x = values(dtype)
    exact = torch.tensor([nearest(Fraction(v), dtype) for v in x.tolist()], dtype=torch.float64)
    assert torch.equal(rounded(x, dtype).double(), exact)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=torch.float64)
    assert str(rounded(special, dtype).tolist()) == "[nan, inf, -inf, -0.0]"
    if dtype.itemsize == 2:  # the control: torch rounds twice
        assert not torch.equal(x.to(dtype).double(), exact)


@pytest.mark.parametrize("dtype", FORMATS)
def test_an_average_is_exact_but_for_its_rounding(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    parts = [torch.randn(700, generator=draw).to(dtype) for _ in range(3)]
    shares = [1.0, 2.0, 4.0]
    found = average(zip(shares, parts, strict=True))
    sums = [
        sum(Fraction(share) * Fraction(value) for share, value in zip(shares, row, strict=True))
        for row in zip(*(part.double().tolist() for part in parts), strict=True)
    ]
    exact = [nearest(Fraction(total) / 7, dtype) for total in sums]
    assert found.dtype == dtype and found.double().tolist() == exact
    narrow = (parts[0] + 2 * parts[1] + 4 * parts[2]) / 7
    assert narrow.double().tolist() != exact  # the control: sums in the dtype itself


def test_checkpoints_are_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [small(tmp_path / name, step) for name, step in (("a", 3), ("b", 5), ("c", 7))]
    words = [str(run) for run in runs]
    assert main(["average", *words, "--output", str(tmp_path / "mean")]) == 0
    mean = Checkpoint(find(tmp_path / "mean"))
    assert mean.name == "iter_0000007" and mean.common()["args"].no_save_optim
    opened = [Checkpoint(find(run)) for run in runs]
    for key in mean.tensors:
        assert not key.startswith("optimizer")
        exact = torch.stack([run.tensor(key).double() for run in opened]).sum(0) / 3
        assert torch.equal(mean.tensor(key), rounded(exact, torch.bfloat16))
    unequal = ("--weights", "1", "3", "12")
    assert main(["average", *words, "--output", str(tmp_path / "unequal"), *unequal]) == 0
    found = Checkpoint(find(tmp_path / "unequal"))
    for key in found.tensors:
        first, second, third = (run.tensor(key).double() for run in opened)
        exact = (first + 3 * second + 12 * third) / 16
        assert torch.equal(found.tensor(key), rounded(exact, torch.bfloat16))
    large = ("--weights", *[str(2.0**1023)] * 3)  # their sum is no float64
    assert main(["average", *words, "--output", str(tmp_path / "large"), *large]) == 0
    again = Checkpoint(find(tmp_path / "large"))
    assert all(torch.equal(again.tensor(key), mean.tensor(key)) for key in mean.tensors)
    capsys.readouterr()
    for wrong, text in {
        ("--weights", "1", "2"): "--weights has 2 numbers for 3 checkpoints",
        ("--weights", "1", "2", "0"): "--weights are numbers above 0",
        ("--steps", "3", "5"): "--steps takes the folder of one run",
    }.items():
        assert main(["average", *words, "--output", str(tmp_path / "wrong"), *wrong]) == 1
        assert text in capsys.readouterr().err
    assert main(["average", words[0], words[0], "--output", str(tmp_path / "wrong")]) == 1
    assert "two or more different checkpoints" in capsys.readouterr().err
