"""The commands of docs/huggingface.md run as they are written."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_fp4 import get_recipe
from megatron_fp4.convert import command
from testing.builders.fp4_checkpoint import checkpoint, recorded
from testing.builders.small_hf import save

pytest.importorskip("transformers")
PAGE = (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
COMMANDS = re.findall(r"^    python -m tools\.checkpoint (.+)$", PAGE, re.MULTILINE)


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save("llama", Path("MODEL"))
    to_megatron, back, in_fp4 = COMMANDS
    assert command.main(shlex.split(to_megatron)) == 0
    assert command.main(shlex.split(back)) == 0
    exported = Path("EXPORT/model.safetensors")
    assert exported.read_bytes() == Path("MODEL/model.safetensors").read_bytes()
    # The control: a release has no recipe, so it has no codes to export.
    assert command.main([*shlex.split(in_fp4), "--force"]) == 1
    trained = checkpoint(tmp_path, "llama", recorded(get_recipe("tetrajet")))
    words = [str(trained) if word == "CHECKPOINTS" else word for word in shlex.split(in_fp4)]
    assert command.main([*words, "--force"]) == 0
    assert exported.stat().st_size < Path("MODEL/model.safetensors").stat().st_size / 2


def test_the_flags_of_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("import-hf", "export-hf", "strip"):
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
    ours = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    of_a_launch = {
        "--load",
        "--save",
        "--no-bias-gelu-fusion",
        "--fp4-module-recipe",
        "--first-last-layers-bf16",
        "--dist-ckpt-optim-fully-reshardable",
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PAGE))
    assert named - of_a_launch <= ours and of_a_launch <= named
