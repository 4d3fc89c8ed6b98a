"""What the kernels leave to plain PyTorch."""

import pytest
import torch

from megatron_fp4 import Quantizer
from megatron_fp4.kernels import outliers, quantize, rows
from megatron_fp4.outliers import OutlierClamp

X = torch.zeros(64, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("prescale", [1.0, 0.75, 0.5, 0.9, 2.0])
def test_a_prescale_that_could_clip_or_round(rounding: str, prescale: float) -> None:
    quantizer = Quantizer(rounding=rounding, prescale=prescale)  # type: ignore[arg-type]
    taken = prescale == 1.0 or (prescale == 0.75 and rounding == "stochastic")
    assert quantize.takes(X, quantizer, 1, 0) == taken


@pytest.mark.parametrize("prescale", [1.0, 0.75])
def test_a_prescale_of_fp8(prescale: float) -> None:
    quantizer = Quantizer(
        element="e4m3", scale="fp32", block=(1, 0), rule="absmax", prescale=prescale
    )
    assert rows.takes(X, quantizer, 1) == (prescale == 1.0)


def test_other_formats_dtypes_and_shapes() -> None:
    assert quantize.takes(X, Quantizer(), 0, 0) and quantize.takes(X, Quantizer(), 0, 64)
    for x, quantizer, group in (
        (X.float(), Quantizer(), 0),
        (X, Quantizer(block=(1, 16)), 0),
        (X, Quantizer(block=(32, 32)), 0),
        (X[:, :48], Quantizer(), 0),
        (X, Quantizer(), 16),
        (X[:0], Quantizer(), 0),
    ):
        assert not quantize.takes(x, quantizer, 1, group)


def test_outliers_of_other_scopes_dtypes_and_shapes() -> None:
    wide = torch.empty(1, 2**15, dtype=torch.bfloat16)
    assert outliers.takes(X, OutlierClamp()) and outliers.takes(wide[:, 1:], OutlierClamp())
    for x, clamp in (
        (X, OutlierClamp(scope="channel")),
        (X, OutlierClamp(scope="tensor")),
        (X.float(), OutlierClamp()),
        (X.double(), OutlierClamp()),
        (X.half(), OutlierClamp()),
        (X[None], OutlierClamp()),
        (X[:0], OutlierClamp()),
        (X[:, :0], OutlierClamp()),
        (wide, OutlierClamp()),
    ):
        assert not outliers.takes(x, clamp)
