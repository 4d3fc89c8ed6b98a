"""What the demo makes of its options, before it trains."""

import sys
from pathlib import Path

import pytest

from tools import demo


def test_a_short_text_gets_a_vocabulary_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox.\nIt jumps over the lazy dog.\n")
    manifest = demo.prepare([text], tmp_path / "data")
    size = manifest["options"]["vocab_size"]
    assert 256 < size < 400
    assert f"The text is short: the vocabulary has {size} tokens" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", ["-5", "0"])
def test_no_tokens_to_train_on_is_one_line(
    tokens: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--tokens", tokens])
    assert demo.main() == 1
    assert capsys.readouterr().err == f"demo: --tokens {tokens} is not positive\n"
