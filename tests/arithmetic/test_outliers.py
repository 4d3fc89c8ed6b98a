"""The outlier clamp against numpy.quantile, and the known mistakes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, quantize
from megatron_fp4.arithmetic.outliers import OutlierClamp
from testing.oracles import normal

Scope = Literal["token", "channel", "tensor"]
AXIS = {"token": 1, "channel": 0, "tensor": None}


def activations(rows: int = 48, columns: int = 130, dtype: torch.dtype = torch.float32) -> Tensor:
    """Skewed, so that the two quantiles differ in magnitude, with outlier channels."""
    x = normal((rows, columns), 1).exp() - 0.7
    x[:, 7] *= 30
    x[:, 50] *= -20
    return x.to(dtype)


def by_numpy(x: Tensor, alpha: float, scope: Scope) -> np.ndarray:
    """clip(x, q_(1 - alpha), q_alpha) in float64 with numpy's (linear) quantile."""
    values = x.double().numpy()
    low, high = np.quantile(values, [1 - alpha, alpha], axis=AXIS[scope], keepdims=True)
    return np.clip(values, low, high)


def gap(clamped: Tensor, expected: np.ndarray) -> float:
    return float(np.abs(clamped.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("alpha", [0.99, 0.999, 0.97, 0.9])
@pytest.mark.parametrize("scope", ["token", "channel", "tensor"])
def test_clamp_is_numpy_quantile(scope: Scope, alpha: float) -> None:
    x = activations()
    clamped, residual = OutlierClamp(alpha, scope).split(x)
    assert gap(clamped, by_numpy(x, alpha, scope)) < 1e-6
    assert torch.equal(residual.dense(), x - clamped)
    lines = {"token": x.shape[0], "channel": x.shape[1], "tensor": 1}[scope]
    most = 2 * ((1 - alpha) * x.numel() / lines + 2)
    assert residual.values.shape[0] == lines and residual.values.shape[1] <= most


def absolute(x: Tensor) -> Tensor:
    limit = torch.quantile(x.abs(), 0.99, dim=1, keepdim=True)
    return torch.minimum(torch.maximum(x, -limit), limit)


def one_sided(x: Tensor) -> Tensor:
    return torch.minimum(x, torch.quantile(x, 0.99, dim=1, keepdim=True))


def wrong_axis(x: Tensor) -> Tensor:
    return OutlierClamp(0.99, "channel").split(x)[0]


@pytest.mark.parametrize("wrong", [absolute, one_sided, wrong_axis])
def test_known_mistakes_are_told_apart(wrong) -> None:
    """Negative controls: an absolute or one-sided quantile, the other axis."""
    x = activations()
    assert gap(wrong(x), by_numpy(x, 0.99, "token")) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_residual_is_sparse_and_of_the_clamped(dtype: torch.dtype) -> None:
    """Zero wherever nothing was clamped: it completes the clamped tensor, not the quantized one."""
    x = activations(dtype=dtype)
    clamped, sparse = OutlierClamp().split(x)
    residual = sparse.dense()
    assert clamped.dtype == residual.dtype == dtype
    share = float((residual != 0).double().mean())
    assert 0 < share < 0.04  # about 2 (1 - alpha), two elements of 130 on either side
    assert torch.equal(clamped[residual == 0], x[residual == 0])
    quantized = quantize(clamped, "vector").dequantize(dtype)
    assert float(((x - quantized) != 0).double().mean()) > 0.5  # negative control: its residual


def test_scale_is_taken_after_clamping() -> None:
    x = activations()
    clamped, _ = OutlierClamp().split(x)
    before, after = quantize(x, "vector"), quantize(clamped, "vector")
    assert float((after.scales / before.scales).median()) > 2


def test_alpha_of_one_clamps_nothing() -> None:
    x = activations()
    clamped, residual = OutlierClamp(1.0).split(x)
    assert torch.equal(clamped, x) and not residual.dense().any()


def test_signal_to_noise_follows_the_paper() -> None:
    """Clamping and compensating leave less error than clamping alone, and than neither."""
    x = activations(256, 1024)

    def ratio(approximation: Tensor) -> float:
        return float(x.square().sum() / (x - approximation).square().sum())

    clamped, residual = OutlierClamp().split(x)
    compensated = ratio(quantize(clamped, "vector").dequantize() + residual.dense())
    assert compensated > 2 * ratio(quantize(x, "vector").dequantize())
    assert compensated > 2 * ratio(quantize(clamped, "vector").dequantize())


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (8, 1), (3, 2)])
@pytest.mark.parametrize("scope", ["token", "channel", "tensor"])
def test_small_shapes(scope: Scope, rows: int, columns: int) -> None:
    x = normal((rows, columns), 3)
    clamped, residual = OutlierClamp(0.9, scope).split(x)
    assert gap(clamped, by_numpy(x, 0.9, scope)) < 1e-6
    assert torch.equal(residual.dense(), x - clamped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bounds_are_interpolated_in_float64_without_fusing(dtype: torch.dtype) -> None:
    """Against numpy's scalars, one operation at a time; in float32 the bounds are others."""
    x = activations(dtype=dtype)
    clamped, _ = OutlierClamp(0.9).split(x)
    position = (1 - 0.9) * (x.shape[1] - 1)
    others = 0
    for line, found in zip(x.sort().values.numpy(), clamped.amin(1).numpy(), strict=True):
        a, b = line[int(position)], line[int(position) + 1]
        wide = np.float64(b) - np.float64(a)
        wide = np.float64(a) + wide * np.float64(position - int(position))
        assert found == wide.astype(line.dtype)
        others += found != a + (b - a) * np.float32(position - int(position))
    assert others  # negative control


@pytest.mark.parametrize(
    ("scope", "shape"), [("token", (2, 40_000)), ("channel", (40_000, 2)), ("tensor", (200, 200))]
)
def test_lines_longer_than_16_bits_count(scope: Scope, shape: tuple[int, int]) -> None:
    x = normal(shape, 9)
    clamped, residual = OutlierClamp(0.99, scope).split(x)
    assert gap(clamped, by_numpy(x, 0.99, scope)) < 1e-6
    assert torch.equal(residual.dense(), x - clamped) and residual.places.dtype == torch.int32
    assert int(residual.places.max()) > 32_767


def test_zeros_keep_their_signs() -> None:
    """Also where the bound is a zero of the other sign, or is rounded to one."""
    tiny = 2.0**-133  # BF16's smallest number
    for x in ([-0.0, 0.0, -0.0, -1.0, 1.0], [-0.0, tiny, tiny], [0.0, -tiny, -tiny]):
        line = torch.tensor([x]).bfloat16()
        clamped, residual = OutlierClamp(0.9).split(line)
        zeros = line == 0
        assert torch.equal(clamped.signbit()[zeros], line.signbit()[zeros])
        assert not residual.dense()[zeros].view(torch.int16).any()


@pytest.mark.parametrize("scope", ["token", "channel", "tensor"])
def test_a_bound_that_is_nan_spoils_its_line(scope: Scope) -> None:
    x = activations()
    x[1:9, :5] = torch.nan
    x[20, 3] = torch.inf  # above every quantile: clamped
    clamped, residual = OutlierClamp(0.97, scope).split(x)
    if scope == "tensor":  # 40 of 6240 elements are beyond the quantile
        assert torch.equal(clamped.isnan(), x.isnan())
        assert torch.equal(residual.dense().isnan(), x.isnan())
        return
    spoiled = x.isnan().any(AXIS[scope], keepdim=True).expand(x.shape)
    assert torch.equal(clamped.isnan(), spoiled) and clamped[~spoiled].isfinite().all()
    assert not residual.dense()[spoiled].any()


@pytest.mark.parametrize(
    "build",
    [
        lambda: OutlierClamp(0.5),
        lambda: OutlierClamp(1.01),
        lambda: OutlierClamp(0.99, "row"),  # type: ignore[arg-type]
    ],
    ids=["alpha-low", "alpha-high", "scope"],
)
def test_errors(build) -> None:
    with pytest.raises(ConfigError):
        build()
