"""The flag reference is the parser's."""

from pathlib import Path

from megatron_fp4.mcore.launch import flags

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == flags.reference(), "python -m megatron_fp4 flags > docs/flags.md"
