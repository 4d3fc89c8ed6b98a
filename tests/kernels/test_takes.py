"""What the kernels leave to plain PyTorch."""

from dataclasses import replace

import pytest
import torch

from megatron_fp4 import Quantizer, get_quantizer
from megatron_fp4.kernels import blocks, outliers, quantize, rows
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
        (X, Quantizer(rounding="ema"), 64),
    ):
        assert not quantize.takes(x, quantizer, 1, group)


NVFP4 = get_quantizer("nvfp4")


def test_blocks_of_other_rules_sizes_and_shapes() -> None:
    assert blocks.takes(X, NVFP4, 0) and blocks.takes(X[:, :48], replace(NVFP4, block=(16, 16)), 1)
    for x, quantizer in (
        (X, get_quantizer("nvfp4-four-over-six")),  # its choice is made of float64 sums
        (X, Quantizer()),
        (X, get_quantizer("vector")),
        (X.float(), NVFP4),
        (X[:, :40], NVFP4),
        (X[:40], replace(NVFP4, block=(16, 16))),
        (X, replace(NVFP4, block=(1, 128))),
        (X[:0], NVFP4),
        (X[None], NVFP4),
    ):
        assert not blocks.takes(x, quantizer, 1)


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
