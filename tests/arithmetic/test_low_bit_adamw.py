"""AdamW with moments in few bits: against torch's AdamW, float64 and the central limit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_fp4.arithmetic.low_bit import stream_of, update
from megatron_fp4.arithmetic.low_bit_adamw import LowBitAdamW
from megatron_fp4.arithmetic.moments import FIRST, SECOND, Moments
from megatron_fp4.arithmetic.philox import Key
from megatron_fp4.arithmetic.ramping import Adam
from megatron_fp4.arithmetic.segments import place_of
from testing.low_bit import (
    ALL,
    EXACT,
    LOW,
    OPTIONS,
    groups_of,
    low_bit,
    owned,
    spread,
    through,
    train,
    weights,
)
from testing.oracles import element_bits, fnv1a, normal


def nearest(moments: Moments) -> Moments:
    """The negative control: moments rounded to nearest."""
    return replace(moments, round="nearest")


def bits(optimizer: LowBitAdamW, weight: Tensor, key: str, step: int) -> list[int]:
    """The random bits that round a moment in a step."""
    found = optimizer._of(weight).bits(key, Key(optimizer._seed, step))
    assert found is not None
    return found.tolist()


# --- the step -------------------------------------------------------------------------------------


def test_a_weight_without_a_gradient_may_have_other_state() -> None:
    """Such as its average, which is there before its first step."""
    params = weights()
    before = params[1].detach().clone()
    optimizer = low_bit(params, Moments())
    optimizer.state[params[1]]["fp4_average"] = before
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1 and torch.equal(params[1], before)


def test_moments_in_float32_are_torch_s_adamw_bit_for_bit() -> None:
    mine, theirs, low = weights(), weights(), weights()
    optimizer = low_bit(mine, EXACT)
    plain = torch.optim.AdamW(groups_of(theirs), foreach=False, **OPTIONS)
    for each in (optimizer, plain, low_bit(low, Moments())):
        train(each, range(20))
    assert all(map(torch.equal, mine, theirs))
    for a, b in zip(mine, theirs, strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[a][key], plain.state[b][key]), key
    assert not torch.equal(low[0], theirs[0])  # the control: moments in few bits


def test_the_update_by_itself() -> None:
    """By its formulas, of one element."""
    w, g, m, v = (torch.tensor([x]) for x in (2.0, 0.5, 0.25, 0.125))
    update(w, g, m, v, Adam(3, 0.1, (0.9, 0.95), 1e-8, 0.01))
    first, second = 0.9 * 0.25 + 0.1 * 0.5, 0.95 * 0.125 + 0.05 * 0.25
    moved = 0.1 * (first / (1 - 0.9**3)) / (math.sqrt(second / (1 - 0.95**3)) + 1e-8)
    assert abs(float(w) - (2 * (1 - 0.1 * 0.01) - moved)) < 8 * 2**-23
    assert abs(float(m) - first) < 2**-23 and abs(float(v) - second) < 2**-23


@pytest.mark.parametrize("moments", LOW, ids=str)
def test_the_first_step_is_adamw_s(moments: Moments) -> None:
    """The weight is updated by moments that are not yet rounded."""
    mine, theirs = weights(), weights()
    train(low_bit(mine, moments), range(1))
    train(torch.optim.AdamW(groups_of(theirs), foreach=False, **OPTIONS), range(1))
    assert all(map(torch.equal, mine, theirs))


# For each moment, the largest distance of two neighbours, as a share of the lower one, and the
# largest distance of subnormals, as a share of their block's largest number.
STEP = {"fp32": (0.0, 0.0), "bf16": (2**-7, 0.0), "fp16": (2**-10, 2**-38), "fp8": (2**-3, 2**-16)}
ROOT_STEP = (2 * 2**-3 + 2**-6, 2**-16)  # of squares; a subnormal's is 2^-18 * (2 k + 1), k <= 7


def in_float64(moments: Moments, steps: int, mistake: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """(weights, their distance from the optimizer's, its bound) of AdamW in float64."""
    n, lr, eps, (b1, b2) = 256, 1e-2, 1e-8, OPTIONS["betas"]
    param = torch.nn.Parameter(normal((n,), 1))
    optimizer = LowBitAdamW([param], moments, 3, **OPTIONS | {"eps": eps})
    optimizer.place(param, owned("w"))
    w = param.detach().double()
    m, v, em, ev, ew = (torch.zeros(n, dtype=torch.float64) for _ in range(5))
    of_m, of_v = STEP[moments.m], ROOT_STEP if moments.v == "fp8" else STEP[moments.v]
    tiny = 8 * 2**-24  # of the few roundings of float32 in a step
    for t in range(1, steps + 1):
        g = normal((n,), 50 + t) + 1.0
        param.grad = g
        optimizer.step()
        m, v = b1 * m + (1 - b1) * g.double(), b2 * v + (1 - b2) * g.double() ** 2
        em, ev = b1 * em + tiny * (m.abs() + em + g.abs()), b2 * ev + tiny * (v + ev)
        rate = lr / (1 if mistake == "bias" else 1 - b1**t)
        divisor = (v / (1 - b2**t)).sqrt() + eps
        least = ((v - ev).clamp(min=0) / (1 - b2**t)).sqrt() + eps
        most = ((v + ev) / (1 - b2**t)).sqrt() + eps
        w = w * (1 - lr * 0.1) - rate * m / divisor
        moved = em / least + m.abs() * torch.maximum(
            1 / least - 1 / divisor, 1 / divisor - 1 / most
        )
        ew = ew + rate * moved + tiny * (w.abs() + ew + rate * m.abs() / least)
        for total, moment, (share, subnormal) in ((em, m, of_m), (ev, v, of_v)):
            reach = moment.abs() + total
            block = reach.view(-1, 128).amax(1).repeat_interleave(128)
            total += torch.maximum(share * reach, subnormal * block)
    return w, (param.detach().double() - w).abs(), ew


@pytest.mark.parametrize("moments", ALL, ids=str)
def test_weights_are_near_those_in_float64(moments: Moments) -> None:
    """The bound adds up the largest errors of all roundings of the moments, over ten steps."""
    _, distance, bound = in_float64(moments, 10)
    assert (distance <= bound).all()
    _, distance, bound = in_float64(moments, 2, "bias")
    assert (distance > bound).float().mean() > 0.9  # the control


def test_the_state_has_the_stated_dtypes_and_bytes() -> None:
    param = torch.nn.Parameter(normal((16, 128), 1))
    stated = {"fp32": (torch.float32, 4.0), "bf16": (torch.bfloat16, 2.0)}
    of_m = stated | {"fp8": (torch.uint8, 1 + 1 / 128)}
    of_v = of_m | {"fp16": (torch.float16, 2 + 1 / 128)}
    for moments in ALL:
        optimizer = LowBitAdamW([param], moments)
        optimizer.place(param, owned("w"))
        param.grad = normal((16, 128), 2)
        optimizer.step()
        state = dict(optimizer.state[param])
        (dtype_m, bytes_m), (dtype_v, bytes_v) = of_m[moments.m], of_v[moments.v]
        assert state["exp_avg"].dtype == dtype_m and state["exp_avg_sq"].dtype == dtype_v
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == param.shape
        assert float(state.pop("step")) == 1
        total = sum(each.nbytes for each in state.values())
        assert total == (bytes_m + bytes_v) * 2048 == moments.bytes * 2048
    assert Moments().bytes == 3.015625 and str(Moments()) == "m=fp8,v=fp16"


# --- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", LOW, ids=str)
def test_moments_of_the_optimizer_are_unbiased(moments: Moments) -> None:
    """One step from equal states, in 1,024 rows of one parameter."""
    rows, draws = torch.nn.Parameter(torch.zeros(1024, 128)), 1024

    def stepped(of: Moments) -> dict[str, Tensor]:
        optimizer = low_bit([rows], of)
        start = (spread(128, 1, 0.5).repeat(draws), spread(128, 3, 0.5).square().repeat(draws))
        # Of all formats the same start: what the coarsest of them represents.
        m = through(FIRST["fp8"], through(FIRST["bf16"], start[0], None), None).view(rows.shape)
        v = through(SECOND["fp8"], start[1], None).view(rows.shape)
        optimizer.set_state_in_float32(rows, {"step": 3, "exp_avg": m, "exp_avg_sq": v})
        rows.grad = normal((128,), 9).expand_as(rows)
        optimizer.step()
        return optimizer.state_in_float32(rows)

    wanted, found, wrong = stepped(EXACT), stepped(moments), stepped(nearest(moments))
    for key in ("exp_avg", "exp_avg_sq"):
        drawn, exact = found[key].double(), wanted[key][0].double()
        assert (wanted[key] == wanted[key][0]).all()
        low, high = drawn.amin(0), drawn.amax(0)
        share = (exact - low) / (high - low)
        tried = (share > 0.02) & (share < 0.98)
        assert int(tried.sum()) > 100
        bound = (high - low) * (5 * (share * (1 - share) / draws).sqrt() + 2**-17)
        assert ((drawn.mean(0) - exact).abs() <= bound)[tried].all()
        off = (wrong[key][0].double() - exact).abs() > bound
        assert off[tried].float().mean() > 0.6


@pytest.mark.parametrize(
    ("moments", "betas", "gradient", "steps"),
    [
        (Moments("fp8", "fp32"), (0.9, 0.95), 0.75, 60),
        (Moments("bf16", "fp32"), (0.9, 0.95), 0.99, 60),
        (Moments("fp32", "bf16"), (0.9, 0.999), 0.5, 300),
        (Moments("fp32", "fp8"), (0.9, 0.95), 0.5, 60),
        (Moments("fp32", "fp16"), (0.9, 0.9998), 0.8, 600),
    ],
    ids=str,
)
def test_a_moment_moves_by_less_than_its_precision(
    moments: Moments, betas: tuple[float, float], gradient: float, steps: int
) -> None:
    """From 1 toward what the gradient makes of it, as in float32. The control: rounded to nearest
    it stands still at 1, of which each step changes less than half the distance to a neighbour."""
    key, n = "exp_avg" if moments.v == "fp32" else "exp_avg_sq", 1024
    after = {}
    for of in (EXACT, moments, nearest(moments)):
        param = torch.nn.Parameter(torch.zeros(n))
        optimizer = low_bit([param], of, betas=betas)
        one = torch.ones(n)
        optimizer.set_state_in_float32(param, {"step": 0, "exp_avg": one, "exp_avg_sq": one})
        param.grad = torch.full((n,), gradient)
        for _ in range(steps):
            optimizer.step()
        after[of] = optimizer.state_in_float32(param)[key].double()
    exact, drawn = float(after[EXACT].mean()), after[moments]
    assert exact < 1 - 0.1 * (1 - (gradient if key == "exp_avg" else gradient**2))
    assert abs(float(drawn.mean()) - exact) <= 5 * float(drawn.std()) / math.sqrt(n)
    assert (after[nearest(moments)] == 1).all()
    assert abs(1 - exact) > 20 * float(drawn.std()) / math.sqrt(n)


def test_random_bits_are_those_of_the_definition() -> None:
    seed, start, n = 2**33 + 5, 11, 20
    param = torch.nn.Parameter(torch.zeros(n))
    optimizer = LowBitAdamW([param], Moments(), seed)
    optimizer.place(param, owned("decoder.layers.3.mlp.weight", start))
    for key in ("exp_avg", "exp_avg_sq"):
        stream = fnv1a(f"decoder.layers.3.mlp.weight:{key}")
        assert stream_of("decoder.layers.3.mlp.weight", key) == stream
        assert bits(optimizer, param, key, 9) == [
            element_bits(seed, 9, stream, i // 8, i % 8) for i in range(start, start + n)
        ]


def test_draws_differ_between_moments_steps_and_parameters() -> None:
    one, other = weights()[1], weights()[1]
    optimizer = LowBitAdamW([one, other], Moments(), 7)
    optimizer.place(one, owned("a"))
    optimizer.place(other, owned("b"))
    draws = [
        bits(optimizer, param, key, step)
        for param in (one, other)
        for key in ("exp_avg", "exp_avg_sq")
        for step in (1, 2)
    ]
    assert len(set(map(tuple, draws))) == len(draws) == 8


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("moments", LOW, ids=str)
def test_a_gradient_that_is_not_finite_is_seen(moments: Moments, value: float) -> None:
    param = torch.nn.Parameter(normal((300,), 1))
    optimizer = low_bit([param], moments)
    train(optimizer, range(2))
    param.grad = normal((300,), 5)
    param.grad[150] = value
    optimizer.step()
    state = optimizer.state_in_float32(param)
    part = slice(150, 151) if moments == Moments("bf16", "bf16") else slice(128, 256)
    for key in moments.forms:
        wrong = ~state[key].isfinite()
        assert wrong[part].all() and int(wrong.sum()) == part.stop - part.start
    assert param.isfinite().sum() == 299
    # The control: a cast that saturates hides it.
    clamped = torch.tensor(math.inf).clamp(max=448).to(torch.float8_e4m3fn)
    assert clamped.float() == 448


# --- ranges ---------------------------------------------------------------------------------------


def ranges(cuts: list[int], moments: Moments, starts: list[int] | None = None) -> dict[str, Tensor]:
    """Decoded moments of a parameter of 1,000 elements, kept in ranges, laid end to end."""
    ends, gradients = [*cuts[1:], 1000], [spread(1000, 10 + n, 3.0) for n in range(4)]
    found: list[dict[str, Tensor]] = []
    for i, (a, b) in enumerate(zip(cuts, ends, strict=True)):
        param = torch.nn.Parameter(normal((1000,), 1)[a:b].clone())
        optimizer = LowBitAdamW([param], moments, 7, **OPTIONS)
        optimizer.place(param, owned("w", starts[i] if starts else a))
        for gradient in gradients:
            param.grad = gradient[a:b].clone()
            optimizer.step()
        state = optimizer.state[param]
        scales = [state[key] for key in state if key.endswith("_scale")]
        blocks = -(-b // 128) - a // 128
        assert starts is not None or all(len(each) == blocks for each in scales)
        found.append({"weight": param.detach(), **optimizer.state_in_float32(param)})
    return {key: torch.cat([each[key].view(-1) for each in found]) for key in found[0]}


@pytest.mark.parametrize("moments", ALL, ids=str)
def test_a_range_cut_between_blocks_is_the_whole(moments: Moments) -> None:
    whole, cut = ranges([0], moments), ranges([0, 384, 640], moments)
    for key in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(whole[key], cut[key]), key
    if moments != EXACT:  # the control: ranges that draw from the beginning
        wrong = ranges([0, 384, 640], moments, [0, 0, 0])
        assert not torch.equal(whole["weight"], wrong["weight"])


@pytest.mark.parametrize("moments", LOW, ids=str)
def test_a_border_changes_nothing_outside_of_its_block(moments: Moments) -> None:
    whole, cut = ranges([0], moments), ranges([0, 300], moments)
    same = {key: whole[key] == cut[key] for key in whole if key != "step"}
    for key, equal in same.items():
        assert equal[:256].all() and equal[384:].all(), key
    if moments == Moments("bf16", "bf16"):
        assert all(equal.all() for equal in same.values())
    else:  # the control: blocks counted from the range's beginning
        wrong = ranges([0, 300], moments, [0, 0])
        assert not torch.equal(whole["exp_avg"][384:], wrong["exp_avg"][384:])


def test_the_place_of_a_shard_gives_its_draws() -> None:
    """Columns 8 to 15 of a [32, 16] parameter, as tensor parallelism may shard it, from 13 on."""
    whole, shard = torch.nn.Parameter(torch.zeros(32, 16)), torch.nn.Parameter(torch.zeros(243))
    optimizer = LowBitAdamW([whole, shard], Moments(), 7)
    optimizer.place(whole, owned("w"))
    optimizer.place(shard, owned("w", 13, place_of((32, 8), 0, axis=1, ranks=2, rank=1)))
    for key in ("exp_avg", "exp_avg_sq"):
        of_whole = torch.tensor(bits(optimizer, whole, key, 1))
        of_shard = torch.tensor(bits(optimizer, shard, key, 1))
        assert torch.equal(of_whole.view(32, 16)[:, 8:].reshape(-1)[13:], of_shard)
        assert not torch.equal(of_whole[13:256], of_shard)
