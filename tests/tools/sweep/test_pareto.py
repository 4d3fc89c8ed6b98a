"""The frontier of score and time, and times that are those of the cost model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_fp4 import get_recipe
from megatron_fp4.estimate.overhead import DEVICES, setting_of, with_kernels
from tests.tools.sweep.test_axes import TETRAJET
from tools.sweep import __main__
from tools.sweep.axes import AXES, Combination
from tools.sweep.pareto import INPUTS, OUTPUTS, TOKENS, Point, draw, frontier, points, to_confirm

ESTIMATORS = AXES["estimator"]


def scattered(number: int) -> list[Point]:
    source = random.Random(2)
    times = [dict.fromkeys(DEVICES, round(source.random(), 2)) for _ in range(number)]
    return [Point(Combination(), round(source.random(), 2), each) for each in times]


def test_the_frontier_has_what_no_other_point_beats() -> None:
    every = scattered(300)

    def beaten(point: Point) -> bool:
        return any(
            other.score <= point.score
            and other.times["hopper"] <= point.times["hopper"]
            and (other.score, other.times) != (point.score, point.times)
            for other in every
        )

    expected = {(p.score, p.times["hopper"]) for p in every if not beaten(p)}
    found = frontier(every, "hopper")
    assert [(p.score, p.times["hopper"]) for p in found] == sorted(expected)
    assert 3 < len(found) < 30


def test_the_best_and_the_best_fast_ones_are_trained_again() -> None:
    """The fast ones quantize all GEMMs too, and none is there twice."""

    def point(scale: str, score: float, hopper: float, **axes: str) -> Point:
        return Point(Combination(scale=scale, **axes), score, {"hopper": hopper})

    slow = [point(scale, 0.1, 2.0) for scale in ("e4m3", "ue5m3", "fp32")]
    fast = [point("e8m0", 0.2 + i / 100, 0.7, estimator=each) for i, each in enumerate(ESTIMATORS)]
    partly = point("e8m0", 0.0, 0.5, backward="bf16")
    assert to_confirm([partly, *slow, *fast]) == [p.combination for p in [*slow, *fast[:2]]]
    assert to_confirm(slow) == [p.combination for p in slow]


def test_times_are_the_cost_model_s() -> None:
    (point,) = points({TETRAJET: 0.25})
    assert point.score == 0.25
    for device, gpu in DEVICES.items():
        setting = setting_of(gpu, INPUTS, OUTPUTS, TOKENS)
        expected = with_kernels(get_recipe("tetrajet"), setting, gpu).times_bf16
        assert point.times[device] == pytest.approx(expected)


def test_the_training_around_a_recipe_takes_no_time_of_a_linear() -> None:
    one, other = points({TETRAJET: 0.1, Combination(**TETRAJET.chosen, loss_scale="65536"): 0.2})
    assert one.times == other.times


def test_the_same_points_make_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    every = points({TETRAJET: 0.2, Combination(): 0.3, Combination(forward="bf16"): 0.05})
    for name in ("one", "two"):
        draw(every, "score", tmp_path / name / "picture.svg")
    one, two = ((tmp_path / name / "picture.svg").read_bytes() for name in ("one", "two"))
    assert one == two and b"blackwell, not measured" in one


def test_the_command_says_what_a_recipe_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["cost", "mxfp4-rht-sr", "hadamard=32", "--device", "blackwell"]) == 0
    told = capsys.readouterr().out
    assert "Hadamard transform" in told and "never measured there" in told
    assert __main__.main(["cost", "rule=ceil"]) == 0
    assert "Hadamard transform" not in capsys.readouterr().out
    assert __main__.main(["cost", "tetrajet", "rule"]) == 2
    assert capsys.readouterr().err == "sweep: rule is not name=value\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--inputs", "0"], "--inputs is 0: give 1 or more"),
        (["--tokens", "-32"], "--tokens is -32: give 1 or more"),
        (["--outputs", "100"], "--outputs: 100 on a rank is not a multiple of 32, which"),
    ],
)
def test_sizes_that_a_linear_cannot_have(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["cost", "tetrajet", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sweep: {says}")


def test_phases_are_told_and_layers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{base: tetrajet, phases: [{after: 9/10, recipe: fp8}]}")
    assert __main__.main(["cost", "tetrajet"]) == __main__.main(["cost", "fp8"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert __main__.main(["cost", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "after 0.9 of training" in told and set(plain[1:]) - set(told) == set()
    path.write_text("{base: tetrajet, layers: [{last: 2, recipe: bf16}]}")
    assert __main__.main(["cost", str(path)]) == 2
    assert "has layers with recipes of their own" in capsys.readouterr().err
