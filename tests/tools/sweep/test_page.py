"""docs/design-space.md: its tables are those of the code and of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.sweep.test_statistics import EACH, STARS
from tools import pages, rows
from tools.rows import Row
from tools.sweep import __main__, page, running

PAGE = Path(__file__).parents[3] / "docs/design-space.md"


def test_the_axes_are_the_code_s() -> None:
    text = PAGE.read_text()
    assert pages.into(text, "axes", "\n".join(page.axes_table())) == text


def test_the_results_are_the_committed_ones() -> None:
    text = PAGE.read_text()
    if __main__.RESULTS.exists():
        section = page.section(rows.read(__main__.RESULTS, running.KEYS))
        assert pages.into(text, "sweep", section) == text
    else:
        assert "No result is committed yet." in text


def test_tables_of_results() -> None:
    """A rule that is better by 2 and a block that is better by .5, in two levels of stages."""

    def loss(place: int) -> float:
        return -2.0 * (EACH[place].rule == "ceil") - 0.5 * (EACH[place].block == "16")

    found: list[Row] = [
        {
            "stage": stage,
            "status": "failed" if stage == "digits" and place == 3 else "finished",
            "star": STARS[each],
            "combination": each.chosen,
            "seconds": 1.25,
            "seeds": {"1": {name: loss(place)}, "2": {name: loss(place)}},
        }
        for place, each in enumerate(EACH)
        for stage, name in (("products", "score"), ("digits", "loss"))
    ]
    for row in found:
        for figures in row["seeds"].values():
            figures |= {"y error": figures.get("score", 0.0), "dw error": 0.0}
    text = page.section(found)
    (line,) = (each for each in text.splitlines() if each.startswith("| `digits` | a class"))
    assert line.endswith(f" | {len(EACH):,} | 1 | 3 | 1.2 |")
    (line,) = (each for each in text.splitlines() if each.startswith("| `products` | `digits` |"))
    assert " 1.00 | 1.00 to 1.00 | 1.00 | yes |" in line
    (line,) = (each for each in text.splitlines() if each.startswith("| `rule` | `ceil` |"))
    assert line.count("-2 (-2 to -2; ") == 2
    assert f"The best {page.BEST} of `digits`" in text and "| -2.5000 | `" in text


def test_no_results_are_an_error() -> None:
    with pytest.raises(ValueError, match="python -m tools.sweep run products"):
        page.section([])
    with pytest.raises(ValueError, match="<!-- sweep -->"):
        pages.into("a page", "sweep", "tables")
