"""What the demo makes of its options, before it trains."""

import json
import sys
from pathlib import Path

import pytest

from tests.tools.test_runs import HELD_OUT, STEP
from tools import demo

LOG = STEP.format(9, " lm loss: 5.0E+00 |") + "\n" + HELD_OUT.format("9", "4.5E+00")


def test_a_short_text_gets_a_vocabulary_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox.\nIt jumps over the lazy dog.\n")
    manifest = demo.prepare([text], tmp_path / "data")
    size = manifest["options"]["vocab_size"]
    assert 256 < size < 400
    assert f"The text is short: the vocabulary has {size} tokens" in capsys.readouterr().out


def started(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of the demo, which may not come as far as preparing data."""
    monkeypatch.setattr(demo, "prepare", lambda *_: pytest.fail("data were prepared"))
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    return demo.main()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "-5"], "--tokens -5 is too few: give 40960 or more"),
        (["--tokens", "40959"], "--tokens 40959 is too few: give 40960 or more"),
        (["--tokens", "many"], "argument --tokens: invalid int value: 'many'"),
        (["--nope"], "unrecognized arguments: --nope"),
        (["--recipe", "nope"], "unknown recipe 'nope'; known: "),
        (["--recipe", "no.yaml"], "recipe file no.yaml: No such file or directory"),
        (["--recipe", "no.module:recipe"], "recipe 'no.module:recipe' cannot be imported"),
    ],
)
def test_a_mistake_is_one_line_before_the_data_are_made(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert started(monkeypatch, *options) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"demo: {message}") and said.count("\n") == 1


def test_what_is_not_installed_is_asked_for_before_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert started(monkeypatch) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo, "OUTPUT", tmp_path / "file" / "demo")
    monkeypatch.setattr(sys, "argv", ["demo"])
    assert demo.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("demo: ") and "file is not a folder" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("base: tetrajet", "my-recipe"),
        ("{base: tetrajet, name: ../../elsewhere}", "elsewhere"),
        ("{base: tetrajet, name: a b/c}", "a-b-c"),
        ("{base: tetrajet, name: bf16}", "fp4-bf16"),
    ],
)
def test_a_recipe_file_leaves_nothing_beside_itself(
    content: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipes" / "my-recipe.yaml"
    recipe.parent.mkdir()
    recipe.write_text(content)
    output = tmp_path / "runs" / "demo"
    command = [sys.executable, "-c", f"print({LOG!r})"]
    monkeypatch.setattr(demo, "OUTPUT", output)
    monkeypatch.setattr(demo, "prepare", lambda *_: {})
    monkeypatch.setattr(demo.runs, "launch", lambda *_: command)
    demo.demo([], demo.TOKENS, str(recipe))
    assert [path.name for path in recipe.parent.iterdir()] == ["my-recipe.yaml"]
    logs = {f"{name}.log", "bf16.log"}
    assert {path.name for path in output.iterdir()} == logs | {"curves.png", "result.json"}
    result = json.loads((output / "result.json").read_text())
    assert list(result["logs"]) == [name, "bf16"] and result["perplexity_ratio"] == 1
