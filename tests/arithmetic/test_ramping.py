"""Q-Ramping: its periods, its step and its measuring, against loops in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fp4 import ConfigError, Quantizer
from megatron_fp4.arithmetic.quantize import quantize_matrix
from megatron_fp4.arithmetic.ramping import LONGEST, Adam, Movement, Ramped, Ramping, update
from megatron_fp4.arithmetic.ramping_adamw import RampingAdamW, Snapshot
from testing.oracles import normal

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.02
ROWS, COLUMNS, STEPS = 3, 32, 130
RAMPING = Ramping(k1=8, k2=2, interval=40, calibration=20, most=9)
CEIL = Quantizer(rule="ceil")


def learning_rate(number: int) -> float:
    """Of step `number`, from 1."""
    return 2e-2 * min(1.0, number / 10) * (0.6 + 0.4 * math.cos(math.pi * number / STEPS))


def quantized(weight: Tensor) -> Tensor:
    return quantize_matrix(weight, CEIL, axis=1).dequantize(torch.float64)


# --- the whole method, by its formulas ------------------------------------------------------------

NOISE = normal((STEPS + RAMPING.calibration, ROWS, COLUMNS), 1).double().numpy()
# Between two codes, where weights oscillate; the 6 keeps the scale.
TARGET = np.resize([6, 0.25, -0.75, 1.25, 2.5, -3.5, 1, 0.5], (ROWS, COLUMNS))


def gradient(batch: int, weight: np.ndarray) -> np.ndarray:
    """Of a noisy parabola, on one batch."""
    return weight - TARGET + NOISE[batch]


def by_formulas(start: np.ndarray, mistake: str = "") -> tuple[np.ndarray, np.ndarray]:
    """(weights, periods of each calibration): as the paper has them, element after element."""
    w = start.copy()
    m, v, acc = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    c, updates, N = (np.zeros(w.shape, int), np.zeros(w.shape, int), np.ones(w.shape, int))
    periods = []

    def adam(i: Any, g: float, lr: float, step: int) -> float:
        m[i] = BETAS[0] * m[i] + (1 - BETAS[0]) * g
        v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * g**2
        first, second = m[i] / (1 - BETAS[0] ** step), v[i] / (1 - BETAS[1] ** step)
        return float(lr * first / (math.sqrt(second) + EPS))

    for t in range(STEPS):
        if t and t % RAMPING.interval == 0:
            saved = [w.copy(), m.copy(), v.copy()]
            of_w, of_q = np.zeros_like(w), np.zeros_like(w)
            for k in range(t, t + RAMPING.calibration):
                before, q_before = w.copy(), quantized(torch.from_numpy(w)).numpy()
                g = gradient(k, w)
                for i in np.ndindex(w.shape):
                    w[i] -= learning_rate(k + 1) * DECAY * w[i]
                    w[i] -= adam(i, float(g[i]), learning_rate(k + 1), k + 1)
                of_w += abs(w - before)
                of_q += abs(quantized(torch.from_numpy(w)).numpy() - q_before)
            R = of_q / (of_w + 1e-8)
            for i in np.ndindex(w.shape):
                whole = math.floor(RAMPING.k2 * R[i] / RAMPING.k1)
                if mistake != "the floor of k2 * R / k1":
                    whole = RAMPING.k2 * math.floor(R[i] / RAMPING.k1)
                N[i] = min(whole + 1, RAMPING.most or 0)
            periods.append(N.copy())
            if mistake != "no restore":
                w, m, v = saved
        lr = learning_rate(t + 1)
        g = gradient(t, w)
        for i in np.ndindex(w.shape):
            acc[i] += g[i]
            c[i] += 1
            due = c[i] % N[i] == 0
            if mistake != "decay with updates alone" or due:
                w[i] -= lr * DECAY * w[i]
            if due:
                updates[i] += 1
                scale = 1 if mistake == "lr without c" else int(c[i])
                step = int(updates[i]) if mistake == "bias corrected by an own count" else t + 1
                w[i] -= adam(i, float(acc[i] / c[i]), lr * scale, step)
                acc[i] = acc[i] if mistake == "the sum is kept" else 0
                c[i] = 0
    return w, np.stack(periods)


def trained(start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by the package."""
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = RampingAdamW([weight], betas=BETAS, eps=EPS, weight_decay=DECAY)
    optimizer.ramp(weight)
    periods = []

    def step(t: int) -> None:
        optimizer.param_groups[0]["lr"] = learning_rate(t + 1)
        weight.grad = torch.from_numpy(gradient(t, weight.detach().numpy()))
        optimizer.step()

    for t in range(STEPS):
        if t and t % RAMPING.interval_in(STEPS) == 0:
            snapshot, optimizer.calibrates = Snapshot(optimizer), True
            movement = Movement.start(weight, quantized(weight.detach()))
            for k in range(t, t + RAMPING.calibration):
                step(k)
                movement.add(weight, quantized(weight.detach()))
            snapshot.restore()
            optimizer.calibrates = False
            optimizer.set_period(weight, RAMPING.periods(movement.ratio(), STEPS))
            periods.append(optimizer.state[weight]["fp4_ramping_period"].numpy().copy())
        step(t)
    return weight.detach().numpy(), np.stack(periods)


@pytest.fixture(scope="module")
def run() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    start = TARGET + 0.05 * normal((ROWS, COLUMNS), 3).double().numpy()
    return start, *trained(start)


def test_a_training_is_that_of_the_formulas(run: Any) -> None:
    start, weight, periods = run
    wanted, wanted_periods = by_formulas(start)
    assert (periods == wanted_periods).all()
    assert set(periods.flatten()) == {1, 3, 5, 7, 9}
    # Rounding of 100 operations a step, which the parabola and the moments damp and do not amplify.
    assert abs(weight - wanted).max() < 100 * STEPS * 2**-53 * abs(wanted).max()


@pytest.mark.parametrize(
    "mistake",
    [
        "the floor of k2 * R / k1",
        "no restore",
        "decay with updates alone",
        "lr without c",
        "bias corrected by an own count",
        "the sum is kept",
    ],
)
def test_mistakes_are_noticed(run: Any, mistake: str) -> None:
    start, weight, _ = run
    assert abs(weight - by_formulas(start, mistake)[0]).max() > 1e-3


# --- the step -------------------------------------------------------------------------------------


def fresh(size: int, seed: int = 1, longest: int = 7) -> Ramped:
    period = torch.randint(1, longest + 1, (size,), generator=torch.Generator().manual_seed(seed))
    first, second, summed = (torch.zeros(size) for _ in range(3))
    count = torch.zeros(size, dtype=torch.int16)
    return Ramped(normal((size,), seed), first, second, summed, count, period.to(torch.int16))


def steps(of: Ramped, number: int, part: slice = slice(None), size: int = 1031) -> None:
    for n in range(1, number + 1):
        scalars = Adam(n, learning_rate(n), BETAS, EPS, DECAY)
        update(of, normal((size,), 100 + n)[part], scalars)


def tensors(of: Ramped) -> list[Tensor]:
    return [of.weight, of.first, of.second, of.sum, of.count, of.period]


def test_parts_of_a_weight_have_the_bits_of_the_whole() -> None:
    """Wherever a rank's part begins and ends."""
    whole = fresh(1031)
    steps(whole, 23)
    for cut in (1, 3, 7, 8, 15, 17, 500, 1023, 1030):
        for part in (slice(0, cut), slice(cut, None)):
            of = Ramped(*(tensor[part].clone() for tensor in tensors(fresh(1031))))
            steps(of, 23, part)
            for found, wanted in zip(tensors(of), tensors(whole), strict=True):
                assert torch.equal(found, wanted[part])


@pytest.mark.parametrize("size", [1, 5, 1031, 70001])
def test_with_periods_of_1_it_is_adamw_bit_for_bit(size: int) -> None:
    """Of torch, and for every element whose period is 1 where others have longer ones."""
    number = 300 if size < 2000 else 20
    of, mixed = fresh(size, longest=1), fresh(size)
    plain = torch.nn.Parameter(of.weight.clone())
    adamw = torch.optim.AdamW(
        [plain], betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False, fused=False
    )
    for n in range(1, number + 1):
        adamw.param_groups[0]["lr"] = learning_rate(n)
        scalars = Adam(n, learning_rate(n), BETAS, EPS, DECAY)
        plain.grad = normal((size,), n) * (normal((size,), n + 7) > -1)  # some are zero
        adamw.step()
        for each in (of, mixed):
            update(each, plain.grad, scalars)
        state = adamw.state[plain]
        assert torch.equal(of.weight, plain.detach())
        assert torch.equal(of.first, state["exp_avg"])
        assert torch.equal(of.second, state["exp_avg_sq"])
    ones = mixed.period == 1
    assert torch.equal(mixed.weight[ones], plain.detach()[ones])
    assert (mixed.weight[~ones] != plain.detach()[~ones]).all()


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["default", "avx2"])
def test_both_hold_without_fused_multiply_adds_and_with_shorter_vectors(instructions: str) -> None:
    """torch fuses products and sums on CPUs with AVX2, and not on older ones."""
    tests = ("parts_of_a_weight_have_the_bits", "with_periods_of_1_it_is_adamw")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, "-k", " or ".join(tests)],
        env=os.environ | {"ATEN_CPU_CAPABILITY": instructions},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout


def test_a_nan_stays_in_its_element() -> None:
    of, other = fresh(64), fresh(64)
    for n in range(1, 9):
        scalars, clean = Adam(n, 1e-2, BETAS, EPS, DECAY), normal((64,), n)
        bad = clean.clone()
        bad[5] = math.nan
        update(of, bad, scalars)
        update(other, clean, scalars)
    assert of.weight.isnan().nonzero().tolist() == [[5]]
    rest = torch.arange(64) != 5
    assert torch.equal(of.weight[rest], other.weight[rest])


def test_a_count_goes_on_under_another_period() -> None:
    """An element with seven gradients is next due at eight, whatever its period was before."""
    of = fresh(1)
    of.period.fill_(LONGEST)
    steps(of, 7, size=1)
    assert of.count.item() == 7 and of.first.item() == 0
    of.period.fill_(4)
    summed = of.sum + normal((1,), 108)
    update(of, normal((1,), 108), Adam(8, 1e-2, BETAS, EPS, DECAY))
    assert of.count.item() == 0 and of.sum.item() == 0
    assert torch.equal(of.first, torch.zeros(1).lerp(summed / 8, 1 - BETAS[0]))


def test_counts_fit_their_integers() -> None:
    """The largest count: one before an update under the longest period, then the next longest."""
    of, due = fresh(1), 2 * (LONGEST - 2)  # the first multiple above the count LONGEST - 1
    of.period.fill_(LONGEST - 2)
    of.count.fill_(due - 3)
    counts = []
    for n in range(3):
        update(of, normal((1,), n), Adam(n + 1, 1e-2, BETAS, EPS, DECAY))
        counts.append(of.count.item())
    assert counts == [due - 2, due - 1, 0] and due <= torch.iinfo(torch.int16).max


# --- periods and their measuring ------------------------------------------------------------------


def test_periods_follow_the_ratio() -> None:
    ratio = torch.tensor([0, 15.99, 16, 31.99, 32, 1e4, 1e30, math.inf, math.nan])
    wanted = [1, 1, 6, 6, 11, 1251, 1251, 1251, 1]
    periods = Ramping().periods(ratio, 10_000)
    assert periods.tolist() == wanted and periods.dtype == torch.int16
    assert Ramping(most=7).periods(ratio, 10_000).tolist() == [1, 1, 6, 6, 7, 7, 7, 7, 1]
    assert Ramping(interval_share=0.01).periods(ratio, 10_000)[5] == 100
    assert Ramping(interval=10**6).periods(ratio, 10_000)[7] == LONGEST


def measured(weights: list[Tensor], part: slice = slice(None)) -> Tensor:
    movement = Movement.start(weights[0][part], quantized(weights[0])[part].float())
    for weight in weights[1:]:
        movement.add(weight[part], quantized(weight)[part].float())
    return movement.ratio()


def walk(number: int) -> list[Tensor]:
    return [normal((6, 64), 1) + 0.02 * normal((6, 64), n) for n in range(number)]


def test_the_ratio_is_that_of_the_sums_of_distances() -> None:
    weights = walk(31)
    w = np.stack([weight.double().numpy() for weight in weights])
    q = np.stack([quantized(weight).numpy() for weight in weights])
    of_w, of_q = abs(np.diff(w, axis=0)).sum(0), abs(np.diff(q, axis=0)).sum(0)
    found = measured(weights).double().numpy()
    # Each sum of 30 distances, and the quotient, are rounded 31 times at most.
    np.testing.assert_allclose(found, of_q / (of_w + 1e-8), rtol=64 * 2**-24)
    once = abs(q[-1] - q[0]) / (abs(w[-1] - w[0]) + 1e-8)  # the control: the distance at the end
    assert (abs(found - once) > 1).mean() > 0.1


def test_parts_of_a_weight_are_measured_as_the_whole() -> None:
    whole = measured(walk(9))
    for cut in (1, 3, 5):
        for part in (slice(0, cut), slice(cut, None)):
            assert torch.equal(measured(walk(9), part), whole[part])


def test_a_weight_that_rests_has_the_ratio_0() -> None:
    assert not measured([walk(1)[0]] * 4).any()
    assert torch.isfinite(measured([torch.zeros(2, 32), torch.full((2, 32), 1e-30)])).all()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"k1": 0.0}, "k1 is a ratio above 0"),
        ({"k1": math.nan}, "k1 is a ratio above 0"),
        ({"k2": 0}, "k2 is a number of steps, at least 1"),
        ({"k2": 1.5}, "k2 is a number of steps, at least 1"),
        ({"calibration": 0}, "calibration is at least 1 step"),
        ({"interval": 30}, "interval is 30 steps, no more than the 30 of a calibration; choose"),
        ({"interval_share": 0.0}, "interval_share is a share of training in"),
        ({"interval_share": 1.5}, "interval_share is a share of training in"),
        ({"interval_share": math.nan}, "interval_share is a share of training in"),
        ({"most": 0}, "most is a number of steps in"),
        ({"most": LONGEST + 1}, "most is a number of steps in"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        Ramping(**fields)
    assert "\n" not in str(raised.value)


def test_an_interval_is_a_number_of_steps_or_a_share() -> None:
    make: Callable[..., Ramping] = Ramping
    assert make().interval_in(77) == 1251
    assert make(interval_share=0.25).interval_in(1000) == 250
    with pytest.raises(ConfigError, match="0.25 of 120 steps is 30, no more than the 30 of"):
        make(interval_share=0.25).interval_in(120)
