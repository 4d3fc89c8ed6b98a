"""What Megatron's own checks become, what its parser says, and what it prints on request."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import divide

import megatron_fp4
from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore.launch import command_line
from megatron_fp4.mcore.launch.refusals.megatron_demands import megatrons_demands
from megatron_fp4.mcore.loop import log
from testing.builders.command_line import dataset
from testing.worlds.launch import MOCK_DATA, TINY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")


def test_only_what_megatron_raises_becomes_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^7 is not divisible by 2 \(utils.py:\d+\)$"):
        with megatrons_demands(while_building=True):
            divide(7, 2)
    for kind in (ValueError, ImportError):  # a mistake of ours keeps its traceback
        with pytest.raises(kind, match="^mine$") as raised:
            with megatrons_demands(while_building=True):
                raise kind("mine")
        assert type(raised.value) is kind
    with pytest.raises(ImportError), megatrons_demands():
        raise ImportError("mine")
    with pytest.raises(ConfigError, match="^mine$"), megatrons_demands():
        raise ValueError("mine")


def test_a_check_without_a_text_is_told_by_its_condition_and_values(tmp_path: Path) -> None:
    check = tmp_path / "check.py"  # as pytest would give those of this file a text
    check.write_text(
        "def check(args, limit):\n"
        "    assert 0 < args.some_workers <= limit and (\n"
        "        len(args.name) > limit  # on several lines\n"
        "    )\n"
    )
    args = argparse.Namespace(some_workers=0, name="x")
    with pytest.raises(ConfigError) as error, megatrons_demands():
        runpy.run_path(str(check))["check"](args, 3)
    assert str(error.value) == (
        "Megatron demands 0 < --some-workers <= limit and len(--name) > limit, and "
        "--some-workers is 0, limit is 3, --name is x"
    )


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("--min-lr 1", "^--min-lr 1.0 is above --lr 0.001: lower it$"),
        ("--global-batch-size 3", r"x 1 \(the data-parallel size\): give one that is$"),
        ("--seq-length 128", "longer than --max-position-embeddings 64: raise the latter$"),
        ("--num-attention-heads 6", "--hidden-size 64 is not a multiple of"),
        ("--tensor-model-parallel-size 2", "^1 processes cannot be shared out to --tensor-model"),
        ("--data-path {data}", "the data are named twice: leave out"),
        ("--train-samples 8", "exclude each other: leave out one"),
        ("--expert-model-parallel-size 1 --overlap-param-gather", "--use-distributed-optimizer"),
    ],
)
def test_what_megatron_demands_is_told_by_flags(
    flags: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own words for these name no flag, or there are none."""
    words = flags.format(data=dataset(tmp_path, [1, 2, 3])).split()
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY, *MOCK_DATA, *words])
    with pytest.raises(ConfigError, match=remedy):
        command_line.parse()


def test_a_warm_up_that_fills_the_schedule_is_told_by_flags() -> None:
    with pytest.raises(ConfigError, match="takes 10 samples .* 10: lower --lr-warmup-iters"):
        with megatrons_demands(while_building=True):
            OptimizerParamScheduler(None, 0.0, 1.0, 0.0, 10, 10, "cosine", 0.0, 0.0, 10, "linear")


def test_help_shows_our_flags_first_and_needs_no_launcher(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--help"])
        with pytest.raises(SystemExit) as end:
            command_line.parse()
        text = capfd.readouterr().out
        assert not end.value.code and bool(text) == told
        assert not told or text.index("--fp4-recipe RECIPE") < text.index("--num-layers")
        assert not told or text.count("--fp4-recipe RECIPE") == 1 and "10%" in text


def test_help_and_version_are_printed_once_and_in_order(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the start holds back what is printed, but for lines that begin as these do."""
    for flag, start in (("--version", "megatron-fp4 "), ("--help", "usage: torchrun")):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", flag])
        with pytest.raises(SystemExit), log.Start():
            command_line.parse()
        text = capfd.readouterr().out
        assert text.startswith(start) and text.count(start) == 1


def test_the_version_needs_no_launcher(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--version"])
    with pytest.raises(SystemExit) as end:
        command_line.parse()
    assert not end.value.code
    assert capfd.readouterr().out == f"megatron-fp4 {megatron_fp4.__version__}\n"
