"""What a launch prints before its first step, and what its log says of the steps."""

import argparse
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.loop import log
from testing.worlds.launch import train

LINE = (
    " [2026-01-01 00:00:00] iteration       10/   50010 | consumed samples:  40 | elapsed time per "
    "iteration (ms): 1500.0 | learning rate: 1.0E-04 | lm loss: 6.0E+00 |"
)


@functools.cache
def launches(folder: Path) -> list[str]:
    """What these print, on two ranks: a run, its last two steps once more, and a phase's begin."""
    save = f"--bf16 --save {folder} --save-interval 2"
    resumed = f"--bf16 --load {folder} --ckpt-step 2"
    late = "--bf16 --fp4-recipe tetrajet --ffn-hidden-size 128 --fp4-bf16-after 0.5"
    return [train(2, *flags.split()).output for flags in (save, resumed, late)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return launches(tmp_path_factory.getbasetemp() / "checkpoints")


def before_training(output: str) -> list[str]:
    # The last rank logs the first step, and rank 0 its memory after it: either may come first.
    lines = re.split(r" iteration +\d+/|Number of parameters in tr", output)[0].splitlines()
    return [line for line in lines if line]


def losses(output: str) -> dict[int, str]:
    found = re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", output)
    return {int(number): loss for number, loss in found}


def test_a_start_fits_a_screen(
    outputs: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain, resumed, fp4 = map(before_training, outputs)
    assert max(map(len, (resumed, fp4))) < 40
    assert any(line.startswith("megatron-fp4: recipe tetrajet") for line in fp4)
    assert any("successfully loaded checkpoint" in line for line in resumed)
    kept = tmp_path_factory.getbasetemp() / "checkpoints" / log.FILE
    assert any(str(kept) in line for line in plain)
    assert "seq_length ............" in kept.read_text()


def test_a_launch_without_a_recipe_says_what_it_runs_in(outputs: list[str]) -> None:
    told = "megatron-fp4: no recipe (--fp4-recipe): linears run in BF16"
    assert [output.count(told) for output in outputs] == [1, 1, 0]


def test_the_losses_of_a_resumed_run_are_those_of_the_whole(outputs: list[str]) -> None:
    whole, resumed = losses(outputs[0]), losses(outputs[1])
    assert list(whole) == [1, 2, 3, 4]
    assert resumed == {number: whole[number] for number in (3, 4)}


def test_a_phase_that_begins_is_told_once(outputs: list[str]) -> None:
    told = "recipe bf16 takes the place of tetrajet from step 3 on"
    assert outputs[2].count(told) == 1
    # Rank 0 writes the line and the last rank writes the log: the order of the line and of
    # iteration 2 is not defined, since no collective stands between them.
    first, third = outputs[2].index("iteration        1/"), outputs[2].index("iteration        3/")
    assert first < outputs[2].index(told) < third


def test_the_log_says_how_long_the_rest_takes() -> None:
    assert " | time left: 20:50:00 | learning rate:" in log.with_time_left(LINE)
    assert log.with_time_left("(min, max) time across ranks") == "(min, max) time across ranks"


@pytest.mark.parametrize(("iteration", "averages"), [(8, True), (10, False)])
def test_the_first_line_ends_an_interval_where_the_log_does(
    iteration: int, averages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "get_args", lambda: SimpleNamespace(log_interval=5))
    seen = []
    logs = log._from_the_start(lambda *_, is_first_iteration: seen.append(is_first_iteration))
    logs({}, {}, 1.0, iteration, is_first_iteration=True)
    assert seen == [averages]


# --- what is held back -------------------------------------------------------------------------


def say() -> None:
    print("using world size: 2, data-parallel size: 2")
    print("------ arguments ------")
    print("  checkpoint_errors ........ None")
    print("megatron-fp4: recipe r", "\n  of two lines")
    print("> building", end=" ")
    print("the datasets ...")
    print("WARNING: one\n  of two lines\n no more of it")
    print(" loading distributed checkpoint from somewhere at iteration 2")


SHOWN = """using world size: 2, data-parallel size: 2
megatron-fp4: recipe r\x20
  of two lines
WARNING: one
  of two lines
 loading distributed checkpoint from somewhere at iteration 2
"""


def args(**others: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"fp4_verbose": False, "rank": 1, "save": None} | others)


def test_warnings_and_our_own_lines_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with log.Start() as start:
        start.follow(args())
        say()
        assert capsys.readouterr().out == SHOWN
        start.before(lambda: print("a step"))()
        print("and what follows it")
    assert capsys.readouterr().out == "a step\nand what follows it\n"


def test_verbose_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    with log.Start() as start:
        print("> before the flags are known")
        start.follow(args(fp4_verbose=True))
        print("> after")
    assert capsys.readouterr().out == "> before the flags are known\n> after\n"


@pytest.mark.parametrize(
    ("error", "shows"),
    [
        (ConfigError("a mistake"), False),
        (torch.OutOfMemoryError("full"), False),
        (RuntimeError("a bug"), True),
        (SystemExit(0), True),  # Megatron's, for some flags
    ],
)
def test_what_was_held_back_is_shown_where_a_launch_fails_otherwise(
    error: BaseException, shows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), log.Start():
        print("megatron-fp4: a line")
        print("> a stage", end="")
        raise error
    assert capsys.readouterr().out == "megatron-fp4: a line\n" + ("> a stage" if shows else "")


def test_what_launches_say_is_added_to_what_earlier_ones_said(tmp_path: Path) -> None:
    """An evaluation with the flags of a training leaves the training's arguments there."""
    for said in ("a training", "an evaluation"):
        with log.Start() as start:
            start.follow(argparse.Namespace(fp4_verbose=False, rank=0, save=str(tmp_path)))
            print(said)
    assert (tmp_path / log.FILE).read_text() == "a training\nan evaluation\n"


def test_a_folder_that_cannot_be_written_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with log.Start() as start:
        start.follow(args(rank=0, save="/proc/nope"))
    assert "megatron-fp4: /proc/nope/start.log cannot be written" in capsys.readouterr().out
