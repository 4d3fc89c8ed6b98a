"""The commands of docs/checkpoints.md run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp4.convert.command import SUBCOMMANDS, main
from megatron_fp4.convert.torch_dist import TRACKER
from testing.builders.checkpoints import small

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
COMMANDS = re.findall(r"^    megatron-fp4-checkpoint (\S+) (.+)$", PAGE, re.MULTILINE)
OWN = ("show", "compare", "strip", "average", "reshard")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page")
    for step in (1000, 1500, 2000):
        small(path / "checkpoints", step)
    assert (path / "checkpoints" / TRACKER).read_text() == "2000"
    return path


@pytest.mark.parametrize(("command", "words"), [c for c in COMMANDS if c[0] in OWN])
def test_a_command_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    monkeypatch.chdir(folder)
    assert main([command, *shlex.split(words)]) == (command == "compare")  # the steps differ


def test_each_command_is_on_the_page() -> None:
    assert {command for command, _ in COMMANDS} >= set(OWN)
    for command in SUBCOMMANDS:
        assert f"| [`{command}`](" in PAGE, command


@pytest.mark.parametrize("command", OWN)
def test_help_says_what_a_command_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and (SUBCOMMANDS[command].__doc__ or "?").split("\n")[0] in text
    flags = set(re.findall(r"`(--[\w-]+)", PAGE.split(f"## {command}\n")[1].split("\n## ")[0]))
    ours = {flag for flag in flags if f"{flag} " in text or f"{flag}\n" in text}
    launch = {"--finetune", "--no-load-optim", "--use-distributed-optimizer"}
    assert flags - ours <= launch | {"--dist-ckpt-optim-fully-reshardable"}


def test_a_reader_that_has_closed_the_output_ends_a_command_quietly(folder: Path) -> None:
    """As `show | head -1` does. The pipe has no reader from the start, so that nothing is raced."""
    reader, writer = os.pipe()
    os.close(reader)
    words = ["show", str(folder / "checkpoints"), "--no-verify"]
    command = [sys.executable, "-m", "tools.checkpoint", *words]
    done = subprocess.run(
        command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
