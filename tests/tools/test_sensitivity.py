"""tools/sensitivity.py: where a recipe loses most."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megatron_fp4 import get_recipe
from testing.worlds.launch import MOCK_DATA, ROOT, TINY, train
from tools.sensitivity import Found, Launch, chosen, main, places, read_launch, sensitivity, table

LOSSES = {"*": 2.0, "decoder.layers.0.*": 2.3, "decoder.layers.1.*": 2.1, "*.linear_fc2": 2.2}


def evaluate(flags: Sequence[str]) -> float:
    """2.4 with the recipe in all linears, less with the other one in some of them."""
    if not flags:
        return 2.4
    _, place = flags
    return LOSSES.get(place.removesuffix("=fp8"), 2.4)


def test_each_place_is_measured_by_itself() -> None:
    low, high, found = sensitivity(evaluate, "fp8", layers=2)
    assert (low, high) == (2.4, 2.0) and [each.place for each in found] == list(places(2))
    lines = table(low, high, found, "tetrajet", "fp8")
    assert lines[2] == "| none | 2.4000 | +0.0000 | 0% |"
    assert lines[3] == "| decoder.layers.1.* | 2.1000 | +0.3000 | 75% |"  # layers come first
    assert lines[5] == "| *.linear_fc2 | 2.2000 | +0.2000 | 50% |"
    assert lines[-1] == "| all | 2.0000 | +0.4000 | 100% |"


def test_bf16_in_all_linears_is_an_evaluation_in_bf16() -> None:
    """--fp4-module-recipe *=bf16 is refused, since it leaves no linear to the recipe."""
    asked: list[Sequence[str]] = []

    def record(flags: Sequence[str]) -> float:
        asked.append(flags)
        return 1.0

    sensitivity(record, "bf16", layers=1)
    assert asked[:3] == [
        [], ["--fp4-eval-forward", "bf16"], ["--fp4-module-recipe", "decoder.layers.0.*=bf16"]
    ]  # fmt: skip


def test_no_share_is_told_where_nothing_is_gained() -> None:
    low, high, found = 2.0, 2.4, [Found("decoder.layers.0.*", 2.1)]
    assert all(line.endswith("|  |") for line in table(low, high, found, "a", "b")[2:])


def test_the_recipe_leaves_the_best_layers_to_the_other(tmp_path: Path) -> None:
    _, _, found = sensitivity(evaluate, "fp8", layers=3)
    text = chosen(found, 2, 2.4, "tetrajet", {}, "fp8")
    assert [entry["modules"] for entry in yaml.safe_load(text)["layers"]] == [
        "decoder.layers.1.*", "decoder.layers.0.*"
    ]  # fmt: skip
    path = tmp_path / "own.yaml"
    path.write_text(text)
    assert len(get_recipe(str(path)).layers) == 2
    assert "layers:" not in chosen(
        [Found("decoder.layers.0.*", 2.5)], 2, 2.4, "tetrajet", {}, "fp8"
    )


def test_the_recipe_keeps_the_options_of_the_launch(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    options = {"ema_share": "0.005"}
    best = [Found("decoder.layers.0.*", 2.1)]
    for found, layers in ((best, 1), ([], 0)):
        path.write_text(chosen(found, 2, 2.4, "mxfp4", options, "fp8"))
        recipe = get_recipe(str(path))
        assert len(recipe.layers) == layers
        assert recipe.weight_average == get_recipe("mxfp4", **options).weight_average is not None


LAUNCH = ["--bf16", "--num-layers=2", "--load", "saved", "--fp4-recipe", "mxfp4"]


def test_the_recipe_is_that_of_the_launch() -> None:
    options = ["--fp4-recipe-option", "rule=floor", "--fp4-recipe-option", "ema_share=0.1"]
    found = read_launch([*LAUNCH, *options, "--num-layers", "4"])  # as argparse takes the last
    assert found == Launch(4, "mxfp4", {"rule": "floor", "ema_share": "0.1"})


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--load", "saved"], "needs --num-layers"),
        (["--load", "saved", "--num-layers", "many"], "needs --num-layers"),
        (["--num-layers", "4"], "needs --load"),
        (["--num-layers", "4", "--load", "saved"], "needs --fp4-recipe"),
        ([*LAUNCH, "--fp4-bf16-after", "0.9"], "leave out --fp4-bf16-after"),
    ],
)
def test_a_launch_that_cannot_be_measured_is_refused(flags: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_launch(flags)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--processes", "0"], "--processes is 0: give 1 or more"),
        (["--work", "/proc/none"], "--work /proc/none: No such file or directory: give another"),
        (["--in-place", "no"], "no"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sensitivity", *words, "--", *LAUNCH])
    with pytest.raises(SystemExit) as end:
        main()
    [line] = str(end.value).splitlines()
    assert line.startswith("sensitivity: ") and why in line


@pytest.mark.slow
def test_a_checkpoint_s_layers(tmp_path: Path) -> None:
    """The only layer is the whole model; the kinds of linears together gain about as much."""
    flags = ["--bf16", "--eval-iters", "4", "--train-iters", "8", "--num-layers", "1"]
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "8"]
    train(1, *flags, "--fp4-recipe", "tetrajet", *saving)
    command = [sys.executable, "-m", "tools.sensitivity", "--work", str(tmp_path / "logs"), "--"]
    launch = [*TINY, *MOCK_DATA, *flags, "--fp4-recipe", "tetrajet"]
    launch += ["--load", str(tmp_path / "saved")]
    done = subprocess.run([*command, *launch], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    gains = {place.removeprefix("| "): float(gain) for place, _, gain, _ in cells[1:]}
    kinds = sum(gain for place, gain in gains.items() if "linear" in place)
    assert gains["none"] == 0 < gains["all"] == gains["decoder.layers.0.*"]
    assert kinds == pytest.approx(gains["all"], rel=0.5, abs=5e-4)
    assert "modules: " in done.stdout
