"""tools/sensitivity.py: where a recipe loses most."""

from __future__ import annotations

import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_fp4 import Phase, Recipe, get_recipe, list_recipes
from megatron_fp4.recipes.assignment import recipe_for
from testing.worlds.launch import MOCK_DATA, ROOT, TINY, train
from tools.runs import RunFailed
from tools.sensitivity import (
    Found,
    Launch,
    chosen,
    flags_of,
    heading,
    main,
    places,
    read_launch,
    recipes_at,
    sensitivity,
    table,
)

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


def test_evaluations_run_side_by_side_after_the_first() -> None:
    meet = threading.Barrier(2, timeout=60)

    def wait(flags: Sequence[str]) -> float:
        if flags:  # the first one is alone: at the barrier it would wait in vain
            meet.wait()
        return evaluate(flags)

    alone, beside = sensitivity(evaluate, "fp8", 2), sensitivity(wait, "fp8", 3, at_once=2)
    assert beside[:2] == alone[:2] and [f.place for f in beside[2]] == list(places(3))
    assert {*alone[2]} < {*beside[2]}


def test_after_an_evaluation_that_fails_no_other_begins() -> None:
    begun = []

    def fail(flags: Sequence[str]) -> float:
        begun.append(flags)
        if len(begun) == 3:
            raise RunFailed("no loss")
        return 1.0

    with pytest.raises(RunFailed, match="no loss"):
        sensitivity(fail, "fp8", layers=8)
    assert len(begun) == 3 < 2 + len(list(places(8)))


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


def launch_of(recipe: str, **options: str) -> Launch:
    return Launch([], 3, recipe, options)


def test_the_recipe_leaves_the_best_layers_to_the_other(tmp_path: Path) -> None:
    _, _, found = sensitivity(evaluate, "fp8", layers=3)
    text = chosen(found, 2, 2.4, launch_of("tetrajet"), "fp8")
    assert [entry["modules"] for entry in yaml.safe_load(text)["layers"]] == [
        "decoder.layers.1.*", "decoder.layers.0.*"
    ]  # fmt: skip
    path = tmp_path / "own.yaml"
    path.write_text(text)
    assert len(get_recipe(str(path)).layers) == 2
    none = [Found("decoder.layers.0.*", 2.5)]
    assert "layers:" not in chosen(none, 2, 2.4, launch_of("tetrajet"), "fp8")


def test_the_recipe_keeps_the_options_of_the_launch(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    options = {"ema_share": "0.005"}
    best = [Found("decoder.layers.0.*", 2.1)]
    for found, layers in ((best, 1), ([], 0)):
        path.write_text(chosen(found, 2, 2.4, launch_of("mxfp4", **options), "fp8"))
        recipe = get_recipe(str(path))
        assert len(recipe.layers) == layers
        assert recipe.weight_average == get_recipe("mxfp4", **options).weight_average is not None


OWN = """
base: tetrajet
phases:
  - {after: 0.5, recipe: bf16}
layers:
  - {last: 1, recipe: bf16}
  - {modules: "*.linear_fc2", recipe: {base: nvfp4-nvidia, options: {square_weights: false}}}
"""


@pytest.mark.parametrize("name", ["auto", "own"])
def test_the_recipe_keeps_its_phases_and_layers(name: str, tmp_path: Path) -> None:
    """The layers of the file take the place of those of its base, so that it has these too."""
    path = tmp_path / "more.yaml"
    if name == "own":
        name = str(tmp_path / "own.yaml")
        Path(name).write_text(OWN)
    path.write_text(chosen([Found("decoder.layers.1.*", 2.1)], 2, 2.4, launch_of(name), "fp8"))
    before, after = get_recipe(name), get_recipe(str(path))
    assert after.phases == before.phases != ()
    assert after.layers[:-1] == before.layers != ()
    assert after.layers[-1].modules == "decoder.layers.1.*"


def followed(recipe: Recipe, share: float, layer: int) -> Recipe | None:
    """What a linear of this layer, of four, follows at a share of training."""
    modules = recipes_at(recipe, share, layers=4)
    name = f"decoder.layers.{layer}.mlp.linear_fc1"
    return recipe_for(name, layer + 1, None, modules, Namespace())


def test_a_recipe_is_measured_in_one_phase_and_with_its_layers() -> None:
    auto, fp8 = get_recipe("auto"), get_recipe("fp8")
    assert [followed(auto, 0.0, layer) == fp8 for layer in range(4)] == [True, False, False, True]
    assert followed(auto, 0.0, 1) == replace(auto, phases=(), layers=())
    assert all(followed(auto, 0.9, layer) == fp8 for layer in range(4))


def test_layers_are_measured_in_their_own_phase(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    late = "{base: tetrajet, phases: [{after: 0.5, recipe: bf16}]}"
    path.write_text(f"layers:\n  - {{first: 1, recipe: {late}}}\n")
    own = get_recipe(str(path))
    early = followed(own, 0.4, 0)
    assert early is not None and early.fprop == get_recipe("tetrajet").fprop and not early.phases
    assert followed(own, 0.4, 1) is None  # the recipe itself quantizes nothing
    with pytest.raises(ValueError, match="recipe own quantizes nothing at 0.5 of training: give"):
        recipes_at(own, 0.5, layers=4)
    # A launch needs a recipe that quantizes: that of the layers, and BF16 for the others.
    flags = flags_of(recipes_at(own, 0.4, layers=4), tmp_path)
    assert get_recipe(flags[1]) == early
    assert flags[2:] == [
        "--fp4-module-recipe", "*=bf16", "--fp4-module-recipe", f"decoder.layers.0.*={flags[1]}"
    ]  # fmt: skip


def test_the_heading_says_what_is_measured() -> None:
    average = "W is rounded to nearest here, not towards its average"
    assert heading(get_recipe("tetrajet"), 0.5) == []
    assert heading(get_recipe("auto"), 0.5) == ["At 0.5 of training:"]
    [line] = heading(get_recipe("tetrajet-ema"), 0.0)
    assert line.startswith(average)
    both = replace(get_recipe("tetrajet-ema"), phases=(Phase(0.5, get_recipe("fp8")),))
    assert [line.startswith(average) for line in heading(both, 0.0)] == [False, True]


@pytest.mark.parametrize("name", list_recipes())
def test_the_files_of_a_launch_are_the_recipes(name: str, tmp_path: Path) -> None:
    modules = recipes_at(get_recipe(name), 0.0, layers=4)
    values = flags_of(modules, tmp_path / "new")[3::2]
    read = [get_recipe(value.partition("=")[2]) for value in values]
    assert read == [own for _, own in modules]


LAUNCH = ["--bf16", "--num-layers=2", "--load", "saved", "--fp4-recipe", "mxfp4"]


def test_the_recipe_is_that_of_the_launch() -> None:
    options = ["--fp4-recipe-option", "rule=floor", "--fp4-recipe-option", "ema_share=0.1"]
    found = read_launch([*LAUNCH, *options, "--num-layers", "4"])  # as argparse takes the last
    assert found == Launch(
        [*LAUNCH[:-2], "--num-layers", "4"], 4, "mxfp4", {"rule": "floor", "ema_share": "0.1"}
    )


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--load", "saved"], "needs --num-layers"),
        (["--load", "saved", "--num-layers", "many"], "needs --num-layers"),
        (["--num-layers", "4"], "needs --load"),
        (["--num-layers", "4", "--load", "saved"], "needs --fp4-recipe"),
        ([*LAUNCH, "--fp4-recipe", "bf16"], "needs --fp4-recipe"),
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
        (["--choose", "-1"], "--choose is -1: give 1 or more"),
        (["--work", "/proc/none"], "--work /proc/none: No such file or directory: give another"),
        (["--in-place", "no"], "no"),
        (["--in-place", "auto"], "--in-place auto has phases or layers: give a recipe without"),
        (["--at", "1.5"], "--at is a share of training, from 0 to 1, not 1.5"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sensitivity", *words, "--", *LAUNCH])
    with pytest.raises(SystemExit) as end:
        main()
    [line] = str(end.value).splitlines()
    assert line.startswith("sensitivity: ") and why in line


def gains_of(recipe: str, layers: int, folder: Path) -> dict[str, float]:
    """Trains the model TINY for 8 steps by the recipe, and returns by place what the tool says that
    `fp8` gains there. "loss" is that of the recipe in its place."""
    flags = ["--bf16", "--eval-iters", "4", "--train-iters", "8", "--num-layers", str(layers)]
    flags += ["--fp4-recipe", recipe]
    train(1, *flags, "--save", str(folder / "saved"), "--save-interval", "8")
    command = [sys.executable, "-m", "tools.sensitivity", "--work", str(folder / "logs"), "--"]
    launch = [*TINY, *MOCK_DATA, *flags, "--load", str(folder / "saved")]
    done = subprocess.run([*command, *launch], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("At 0 of training:" in done.stdout) is bool(get_recipe(recipe).phases)
    assert "modules: " in done.stdout
    cells = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "| " in line]
    gains = {place: float(gain) for place, _, gain, *_ in cells[1:]}
    return gains | {"loss": float(cells[1][1])}


@pytest.mark.slow
def test_a_checkpoint_s_layers(tmp_path: Path) -> None:
    """The only layer is the whole model; the kinds of linears together gain about as much."""
    gains = gains_of("tetrajet", 1, tmp_path)
    kinds = sum(gain for place, gain in gains.items() if "linear" in place)
    assert gains["none"] == 0 < gains["all"] == gains["decoder.layers.0.*"]
    assert kinds == pytest.approx(gains["all"], rel=0.5, abs=5e-4)


@pytest.mark.outside
def test_a_recipe_with_phases_and_layers(tmp_path: Path) -> None:
    """`auto` has ended in FP8, and is measured in FP4: only the layer in the middle can gain. Its
    loss is that of the checkpoint in a training which has just begun."""
    gains = gains_of("auto", 3, tmp_path)
    assert gains["decoder.layers.0.*"] == gains["decoder.layers.2.*"] == 0
    assert gains["decoder.layers.1.*"] == gains["all"] != 0
    begun = ["--num-layers", "3", "--train-iters", "1000", "--eval-iters", "4", "--skip-train"]
    begun += ["--load", str(tmp_path / "saved"), "--no-load-optim", "--no-load-rng"]
    same = train(1, "--bf16", *begun, "--fp4-recipe", "auto", "--fp4-load-anyway")
    assert same.evaluations[0] == pytest.approx(gains["loss"], abs=5e-5)
