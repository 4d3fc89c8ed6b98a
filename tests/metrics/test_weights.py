"""Statistics of weights over time, against numpy in float64 and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_fp4 import Quantizer, quantize
from megatron_fp4.metrics.gradients import gradient_metrics, gradient_sums
from megatron_fp4.metrics.weights import (
    SAMPLE,
    Changes,
    change_metrics,
    confidence_metrics,
    confidence_sums,
    oscillation_metrics,
    sample_rows,
    window,
)
from testing.oracles import fnv1a, normal

GRID = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])


# --- the rows that are followed -------------------------------------------------------------------


def test_the_sample_depends_on_name_and_rows_alone() -> None:
    rows = sample_rows("decoder.layers.3.mlp.linear_fc1", 4096)
    by_hand = [
        512 * i + fnv1a(f"decoder.layers.3.mlp.linear_fc1:row{i}") % 512 for i in range(SAMPLE)
    ]
    assert rows == by_hand == sorted(set(rows))
    assert rows != sample_rows("decoder.layers.2.mlp.linear_fc1", 4096)
    assert sample_rows("fc1", 5) == [0, 1, 2, 3, 4]
    assert all(0 <= row < 100 for row in sample_rows("fc1", 100))


# --- QuantConf ------------------------------------------------------------------------------------


def confidence(v: float) -> float:
    """From the definition: the distance to the nearest threshold, by the largest that any value
    with the same code has."""
    v, thresholds = min(abs(v), 6.0), (GRID[1:] + GRID[:-1]) / 2
    signed = np.concatenate((-thresholds, thresholds))
    code = np.searchsorted(thresholds, v)
    inside = np.linspace(-6, 6, 24 * 1024 + 1)
    inside = inside[(np.searchsorted(thresholds, abs(inside)) == code)]
    largest = max(abs(signed[:, None] - inside).min(0))
    return float(abs(v - signed).min() / largest)


def test_confidence_is_that_of_its_definition() -> None:
    values = [0, 0.125, 0.25, -0.5, 0.7, 1, 1.6, -2, 2.1, 2.125, 3, 3.9, 4.25, 5, 5.5, 6]
    w = torch.tensor([[*values, *values]], dtype=torch.float64)  # the largest is 6: the scale is 1
    sums = confidence_sums(w, quantize(w, "mxfp4-ceil"))
    expected = [confidence(v) for v in values]
    assert expected[0] == expected[-1] == expected[9] == 1 and expected[2] == expected[13] == 0
    found = confidence_metrics(sums.tolist())
    assert found["confidence"] == pytest.approx(np.mean(expected), rel=1e-9)
    counts, _ = np.histogram(expected, 10, (0, 1))
    assert found["confidences"] == {"first": 0.0, "width": 0.1, "counts": (2 * counts).tolist()}


def test_confidence_on_a_uniform_grid() -> None:
    """The thresholds are the odd eighths, and each code has the largest distance of 1/8."""
    w = normal((64, 96), 2)
    quantized = quantize(w, Quantizer(element="e1m2"))
    scales = np.ldexp(1.0, quantized.scales.numpy().astype(int) - 127).repeat(32, 1)
    scaled = abs(w.double().numpy()) / scales
    assert scaled.max() > 1.75
    thresholds = np.arange(-1, 14, 2) / 8
    distance = abs(np.minimum(scaled, 1.75)[..., None] - thresholds).min(-1)
    found = confidence_metrics(confidence_sums(w, quantized).tolist())
    assert found["confidence"] == pytest.approx((distance * 8).mean(), rel=1e-12)
    by_e2m1 = np.mean([confidence(v) for v in scaled[0]])  # the control
    assert abs(by_e2m1 - (distance[0] * 8).mean()) > 0.05


def test_confidence_of_a_random_weight() -> None:
    w = normal((64, 96), 2)
    quantized = quantize(w, "mxfp4")  # floor: some magnitudes are clipped
    scales = np.ldexp(1.0, quantized.scales.numpy().astype(int) - 127).repeat(32, 1)
    scaled = w.double().numpy() / scales
    assert abs(scaled).max() > 6
    found = confidence_metrics(confidence_sums(w, quantized).tolist())
    thresholds = np.concatenate((-(GRID[1:] + GRID[:-1]) / 2, (GRID[1:] + GRID[:-1]) / 2))
    nearest = abs(np.minimum(abs(scaled), 6)[..., None] - thresholds).min(-1)
    largest = np.array([0.25, 0.25, 0.25, 0.25, 0.375, 0.5, 0.75, 1])
    codes = np.searchsorted(thresholds[7:], np.minimum(abs(scaled), 6))
    assert found["confidence"] == pytest.approx((nearest / largest[codes]).mean(), rel=1e-12)


def test_blocks_without_a_number_have_no_confidence() -> None:
    w = normal((2, 32), 0)
    w[0, 0] = float("nan")
    assert confidence_sums(w, quantize(w, "mxfp4"))[0] == 32
    assert confidence_metrics([0.0] * 12) == {}


# --- changes --------------------------------------------------------------------------------------


def test_changes_are_those_of_numpy() -> None:
    shapes, steps = [(8, 96), (3, 64), (0, 32)], 7
    walks = [[normal(shape, 10 * i + t).bfloat16() for t in range(steps)]
             for i, shape in enumerate(shapes)]  # fmt: skip
    quantized = [[quantize(w, "mxfp4").dequantize() if len(w) else w for w in walk]
                 for walk in walks]  # fmt: skip
    following = Changes()
    for t in range(steps):
        following.update([walk[t] for walk in walks], [walk[t] for walk in quantized])
    changes, oscillation = following.take()
    for i in (0, 1):
        w, q = (torch.stack([x.double() for x in walk[i]]).numpy() for walk in (walks, quantized))
        found = change_metrics(changes[i].tolist()) | oscillation_metrics(oscillation[i].tolist())
        dw, dq = np.diff(w, axis=0), np.diff(q, axis=0)
        r_w = abs(dq).sum(0) / (abs(dw).sum(0) + 1e-8)
        expected = {"r": _r(w, dw), "r_quantized": _r(q, dq), "oscillation": r_w.mean()}
        assert found == pytest.approx(expected | {"oscillating": (r_w > 16).mean()}, rel=1e-12)
        # Negative control: relative to the later norm.
        assert found["r"] != pytest.approx(_r(w[::-1], dw[::-1]), rel=1e-6)
    assert changes[2].sum() == 0 and oscillation[2].tolist() == [0, 0, 0]


def _r(x: np.ndarray, change: np.ndarray) -> float:
    return float(np.mean([np.linalg.norm(d) / np.linalg.norm(b) for d, b in zip(change, x[:-1])]))  # noqa: B905


def test_a_weight_at_a_threshold_oscillates_and_one_that_moves_does_not() -> None:
    steps = torch.arange(51)
    flips = torch.where(steps % 2 == 0, 0.249, 0.251)  # around a threshold, Q jumps by 0.5
    moves = torch.linspace(1, 6, 51)
    w = torch.zeros(51, 32)
    w[:, 0], w[:, 1], w[:, 2] = flips, moves, 6.0
    following = Changes()
    for row in w:
        following.update([row[None]], [quantize(row[None], "mxfp4-ceil").dequantize()])
    _, oscillation = following.take()
    found = oscillation_metrics(oscillation[0].tolist())
    assert found["oscillating"] == 1 / 32
    # The flipping one has R_w = 0.5 / 0.002, the moving one about 1, the others 0.
    assert found["oscillation"] == pytest.approx((250 + 1) / 32, rel=1e-4)
    # Negative control: start and end alone do not show it.
    ends = quantize(w[[0, -1]], "mxfp4-ceil").dequantize()
    net = abs(ends[1] - ends[0]) / (abs(w[-1] - w[0]) + 1e-8)
    assert (net > 16).sum() == 0


def test_a_weight_that_rests_does_not_oscillate() -> None:
    following, w = Changes(), normal((2, 32), 1)
    for _ in range(3):
        following.update([w], [quantize(w, "mxfp4").dequantize()])
    changes, oscillation = following.take()
    assert change_metrics(changes[0].tolist()) == {"r": 0, "r_quantized": 0}
    assert oscillation_metrics(oscillation[0].tolist()) == {"oscillation": 0, "oscillating": 0}


def test_a_weight_that_changes_in_place_is_followed() -> None:
    following, w = Changes(), torch.ones(3)
    for _ in range(3):
        following.update([w], [w])
        w.add_(1)
    changes, _ = following.take()
    assert change_metrics(changes[0].tolist())["r"] == pytest.approx((1 / 1 + 1 / 2) / 2)


def test_sums_begin_anew_and_steps_stay_consecutive() -> None:
    walk = [normal((4, 32), t) for t in range(4)]
    whole, parts = Changes(), Changes()
    taken = []
    for w in walk:
        whole.update([w], [w])
        parts.update([w], [w])
        taken.append(parts.take())
    changes, oscillation = whole.take()
    assert torch.equal(torch.cat([each for each, _ in taken], 1), changes)
    assert change_metrics(taken[0][0][0].tolist()) == {}  # one step has no change yet
    assert oscillation[0, 1] > 0 and taken[0][1][0, 1] == 0


def test_a_window_may_have_the_steps_of_two_reports() -> None:
    walk = [normal((4, 32), t) for t in range(7)]
    two = Changes(2)
    for t, w in enumerate(walk):
        two.update([w], [quantize(w, "mxfp4").dequantize()])
        if t in (2, 4):
            two.take()
    changes, oscillation = two.take()
    whole, last = Changes(), Changes()
    for t, w in enumerate(walk[2:], 2):
        for following in (whole, last)[: 1 + (t >= 4)]:
            following.update([w], [quantize(w, "mxfp4").dequantize()])
    expected, of_last = whole.take(), last.take()
    torch.testing.assert_close((changes, oscillation), expected, rtol=1e-12, atol=0)
    # The control: the steps since the last report alone are others.
    assert not torch.allclose(oscillation, of_last[1], rtol=1e-3)


@pytest.mark.parametrize(
    ("interval", "steps"), [(1, 2), (60, 120), (100, 200), (101, 101), (200, 200), (1000, 200)]
)
def test_the_default_interval_has_the_papers_window(interval: int, steps: int) -> None:
    assert window(interval) == steps


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_up_over_shards(dtype: torch.dtype) -> None:
    gradient = normal((64, 96), 3).to(dtype) * 1e-3
    gradient[::2, ::3] = 0
    sums = gradient_sums(gradient.flatten()[:1000]) + gradient_sums(gradient.flatten()[1000:])
    values = gradient.double().numpy()
    found = gradient_metrics(sums.tolist(), 0.25)
    expected = {"norm": np.linalg.norm(values), "zeros": (values == 0).mean(), "underflow": 0.25}
    assert found == pytest.approx(expected, rel=1e-12)


def test_an_infinite_gradient_has_no_norm() -> None:
    assert gradient_metrics(gradient_sums(torch.tensor([1.0, torch.inf])).tolist())["norm"] is None
    assert gradient_metrics([0.0, 0.0, 0.0]) == {"norm": 0.0, "zeros": None, "underflow": None}
