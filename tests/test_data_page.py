"""The commands of docs/data.md run as they are written."""

import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.folders import LeftOut
from megatron_fp4.mcore.data.text import documents_at
from megatron_fp4.mcore.launch.refusals import dataset
from megatron_fp4.mcore.launch.refusals.table import refuse
from testing.builders.command_line import parse
from testing.builders.corpus import texts, write_lines

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/data.md").read_text()


def blocks() -> list[str]:
    """The indented blocks of the page, each a string."""
    lines = [line[4:] if line.startswith("    ") else "" for line in PAGE.splitlines()]
    return [block.strip() for block in "\n".join(lines).split("\n\n") if block.strip()]


@pytest.mark.slow
def test_the_commands_run_and_a_launch_takes_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("sample", "corpus"):
        (tmp_path / folder).mkdir()
        lines = write_lines(tmp_path / folder / "a.jsonl", texts(200)).read_bytes()
        (tmp_path / folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    commands, flags = blocks()
    for command in commands.splitlines():
        # The sample of this test is too short for the page's vocabulary.
        words = shlex.split(command.replace("--vocab-size 32000", "--vocab-size 320"))
        assert words[0] == "python" and words[1].startswith("tools/")
        program = [sys.executable, str(ROOT / words[1]), *words[2:]]
        subprocess.run(program, check=True, capture_output=True)
        assert ("--dry-run" in words) == ("preprocess" in command and not Path("data").exists())
    made = json.loads(Path("data/manifest.json").read_text())
    assert made["train"]["documents"] + made["held_out"]["documents"] == 400
    args = parse(*shlex.split(flags.replace("\\\n", " ")), "--eval-iters", "1")
    args.padded_vocab_size = 384
    refuse(dataset.tokens(args))


def test_prepare_data_leaves_out_files_of_a_folder_and_ends_at_a_line(tmp_path: Path) -> None:
    assert "always ends at the first such line; it leaves out such files of a folder" in PAGE
    lines = write_lines(tmp_path / "a.jsonl", ["one", "two"]).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    left_out = LeftOut()
    assert len(list(documents_at(tmp_path, "text", left_out))) == 2
    named = " ".join(left_out.lines())
    assert "b.jsonl.gz" in named and "c.txt" in named
    (tmp_path / "d.jsonl").write_text('{"other": "key"}\n')
    with pytest.raises(DataError, match="d.jsonl:1: no text"):
        list(documents_at(tmp_path, "text", LeftOut()))
