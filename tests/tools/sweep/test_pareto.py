"""The frontier of score and time, and times that are those of the cost model."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp4 import get_recipe
from megatron_fp4.estimate.gpus import MEASURED
from megatron_fp4.estimate.overhead import DEVICES, as_it_runs, setting_of, with_kernels
from tests.tools.sweep.test_axes import TETRAJET
from tools.sweep import __main__, factorial, pareto
from tools.sweep.axes import AXES, Combination
from tools.sweep.building import recipe_of
from tools.sweep.pareto import INPUTS, OUTPUTS, TOKENS, Point, draw, frontier, points, to_confirm
from tools.sweep.points_tables import certain, points_table, trade_table, traded

ESTIMATORS = AXES["estimator"]


def scattered(number: int) -> list[Point]:
    source = random.Random(2)
    times = [dict.fromkeys(DEVICES, round(source.random(), 2)) for _ in range(number)]
    return [Point(Combination(), round(source.random(), 2), each, today=1.0) for each in times]


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
        return Point(Combination(scale=scale, **axes), score, {"hopper": hopper}, hopper)

    slow = [point(scale, 0.1, 2.0) for scale in ("e4m3", "ue5m3", "fp32")]
    fast = [point("e8m0", 0.2 + i / 100, 0.7, estimator=each) for i, each in enumerate(ESTIMATORS)]
    partly = point("e8m0", 0.0, 0.5, backward="bf16")
    assert to_confirm([partly, *slow, *fast]) == [p.combination for p in [*slow, *fast[:2]]]
    assert to_confirm(slow) == [p.combination for p in slow]


def test_times_are_the_cost_model_s() -> None:
    (point,) = points({TETRAJET: 0.25}, {TETRAJET: 0.01})
    assert (point.score, point.error) == (0.25, 0.01)
    for device, gpu in DEVICES.items():
        setting = setting_of(gpu, INPUTS, OUTPUTS, TOKENS)
        expected = with_kernels(get_recipe("tetrajet"), setting, gpu).times_bf16
        assert point.times[device] == pytest.approx(expected)
    slow = Combination(scale="fp32", rule="absmax", backward_rule="absmax")
    (point,) = points({slow: 0.25})
    setting = setting_of(MEASURED, INPUTS, OUTPUTS, TOKENS)
    expected = as_it_runs(recipe_of(slow), setting, MEASURED).times_bf16
    assert point.today == pytest.approx(expected) and point.today > 2 * point.times["hopper"]


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
    assert b"2 combinations at 0.20 to 0.30" in one and b"by the cost model" in one


def test_the_frontier_of_the_picture_is_that_of_the_tables() -> None:
    """The line is never better than the points; each point has its number and its error."""
    pyplot, cbook = (pytest.importorskip(f"matplotlib.{name}") for name in ("pyplot", "cbook"))
    best = [timed("e8m0", 0.1, 3.0), timed("e4m3", 0.2, 2.0), timed("fp32", 0.3, 1.0)]
    figure, axes = pyplot.subplots()
    pareto._draw_frontier(axes, [replace(each, error=0.05) for each in best], "hopper")
    line = axes.lines[0]
    x, y = (list(each) for each in cbook.pts_to_prestep(line.get_xdata(), line.get_ydata()))
    assert line.get_drawstyle() == "steps-pre"
    assert (x, y) == ([3.0, 3.0, 2.0, 2.0, 1.0], [0.1, 0.2, 0.2, 0.3, 0.3])
    assert [(each.get_text(), each.xy) for each in axes.texts] == [
        ("1", (3.0, 0.1)), ("2", (2.0, 0.2)), ("3", (1.0, 0.3)),
    ]  # fmt: skip
    [bars] = axes.containers[0][2]
    assert [each[:, 1].tolist() for each in bars.get_segments()] == [
        pytest.approx([each.score - 0.05, each.score + 0.05]) for each in best
    ]
    pyplot.close(figure)
    lines = points_table(best)
    assert [each.split(" | ")[0] for each in lines[2:]] == ["| 1", "| 2", "| 3"]


def timed(scale: str, score: float, time: float, **axes: str) -> Point:
    return Point(Combination(scale=scale, **axes), score, dict.fromkeys(DEVICES, time), time)


def test_a_trade_is_set_against_the_frontier() -> None:
    """Numbers of points that are better in one of score and time alone are not there."""
    trade = {**factorial.UE5M3, **factorial.TENSOR, **factorial.HADAMARD, **factorial.STOCHASTIC}
    others = [("e8m0", 0.05, 9.0), ("e8m0", 0.1, 3.0), ("e8m0", 0.2, 2.0), ("e8m0", 0.4, 1.0)]
    every = [timed(*each) for each in others]
    own = Point(Combination(**trade), 0.25, dict.fromkeys(DEVICES, 3.5), 4.5)
    outside = replace(own, combination=Combination(**trade, estimator="dge"))
    assert traded([*every, own, outside]) == [own]
    [line] = trade_table([*every, own, outside])[2:]
    assert line.startswith("| +0.2500 | 3.50 | 3.50 | 4.50 |") and " | 2, 3 | 2, 3 | " in line
    assert line.endswith("| not decided | not decided |")  # without standard errors
    best = replace(own, score=0.01)
    assert trade_table([*every, best])[-1].endswith(
        "| it is number 1 | it is number 1 | yes | yes |"
    )
    assert not trade_table(every)
    # Number 2 is better by 0.15. The quantile of two degrees of freedom is 4.303, of four 2.776.
    for seeds, error, verdict in (
        (2, 0.0246, "no"), (2, 0.0247, "not decided"),
        (3, 0.0382, "no"), (3, 0.0383, "not decided"),
    ):  # fmt: skip
        errors = [replace(each, error=error, seeds=seeds) for each in (*every, own)]
        assert trade_table(errors)[-1].endswith(f"| {verdict} | {verdict} |")


@pytest.mark.parametrize("seeds", [2, 3])
def test_few_scores_that_differ_by_chance_are_certain(seeds: int) -> None:
    """One pair of twenty. Two standard errors, the mistake, are exceeded by one of 5 to 8."""
    source, number = random.Random(3), 1000
    found, near = 0, 0
    for _ in range(number):
        pair = []
        for _ in range(2):
            losses = [source.gauss(0, 1) for _ in range(seeds)]
            own = Point(Combination(), statistics.mean(losses), {}, 1.0, seeds=seeds)
            pair.append(replace(own, error=statistics.stdev(losses) / seeds**0.5))
        found += certain(*pair)
        near += abs(pair[0].score - pair[1].score) > 2 * math.hypot(*(p.error or 0 for p in pair))
    assert found / number == pytest.approx(0.05, abs=0.02)
    assert near / number > 0.1


def test_the_command_says_what_a_recipe_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["cost", "mxfp4-rht-sr", "hadamard=32", "--device", "blackwell"]) == 0
    told = capsys.readouterr().out
    assert "Hadamard transform" in told and "never measured there" in told
    assert __main__.main(["cost", "rule=ceil"]) == 0
    assert "Hadamard transform" not in capsys.readouterr().out
    assert __main__.main(["cost", "tetrajet", "rule"]) == 2
    assert capsys.readouterr().err == "sweep: rule is not name=value\n"


def test_what_ranks_send_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Under sequence parallelism a rank sends fprop's codes and scales of its tokens of X."""
    assert __main__.main(["cost", "tetrajet"]) == 0
    assert " sent " not in capsys.readouterr().out.split("\n", 2)[2]
    assert __main__.main(["cost", "tetrajet", "--tp", "2", "--sequence-parallel"]) == 0
    [line] = [each for each in capsys.readouterr().out.splitlines() if "fprop         sent" in each]
    own = TOKENS // 2 * INPUTS * 4.25 / 8 / 1e6
    assert f" {own:.1f} " in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--inputs", "0"], "--inputs 0: give 1 or more"),
        (["--tokens", "-32"], "--tokens -32: give 1 or more"),
        (["--outputs", "128", "--tp", "3"], "--outputs 128: give a multiple of 3, above 0"),
        (["--row"], "--row and --sequence-parallel need --tp 2 or more"),
        (["--outputs", "100"], "--outputs: 100 on a rank is not a multiple of 32, which"),
    ],
)
def test_sizes_that_a_linear_cannot_have(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["cost", "tetrajet", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sweep: {says}")


def test_phases_and_layers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{base: tetrajet, phases: [{after: 9/10, recipe: fp8}]}")
    assert __main__.main(["cost", "tetrajet"]) == __main__.main(["cost", "fp8"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert __main__.main(["cost", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "after 0.9 of training" in told and set(plain[1:]) - set(told) == set()
    assert __main__.main(["cost", "auto"]) == 0
    title = "\nafter 0.8 of training; the first layer; the last layer\n"
    own, late = capsys.readouterr().out.split(title)
    assert late != own
    assert own.splitlines()[1:] == plain[1 : len(own.splitlines())]
    assert all(line in plain for line in late.splitlines())
