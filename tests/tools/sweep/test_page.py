"""docs/design-space.md: its tables are those of the code and of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.sweep.test_statistics import STARS
from tools import pages
from tools.rows import Row
from tools.sweep import __main__, llama, page
from tools.sweep.axes import Combination, flips
from tools.sweep.promotion import random_lines
from tools.sweep.sampling import Sample

PAGE = Path(__file__).parents[3] / "docs/design-space.md"


def test_the_axes_are_the_code_s() -> None:
    text = PAGE.read_text()
    assert pages.into(text, "axes", "\n".join(page.axes_table())) == text


def test_the_results_are_the_committed_ones() -> None:
    text = PAGE.read_text()
    if __main__.RESULTS.exists():
        section = page.section(__main__.all_rows(__main__.RESULTS, llama.RESULTS))
        assert pages.into(text, "sweep", section) == text
    else:
        assert "No result is committed yet." in text


def can_be_made(combination: Combination) -> bool:
    return Sample().add(combination, "0")


def test_tables_of_results() -> None:
    """A rule that is better by 2 and a block that is worse by .5, in two levels of stages."""

    own = {each: "0" for _, each in flips(Combination())} | {Combination(): "0"}
    stars = STARS | {each: star for each, star in own.items() if can_be_made(each)}
    lines = random_lines(stars, 10)
    some = [e for place, e in enumerate(stars) if place < 60 or e in lines or e in own]

    def loss(each: Combination) -> float:
        return -2.0 * (each.rule == "ceil") + 0.5 * (each.block == "16")

    found: list[Row] = [
        {
            "stage": stage,
            "status": "failed" if (stage, each) == ("digits", some[3]) else "finished",
            "star": stars[each],
            "combination": each.chosen,
            "seconds": 1.25,
            "seeds": {"1": {name: loss(each)}, "2": {name: loss(each)}},
        }
        for each in some
        for stage, name in (("products", "score"), ("digits", "loss"))
    ]
    for row in found:
        for figures in row["seeds"].values():
            figures |= {"y error": figures.get("score", 0.0), "dw error": 0.0}
    text = page.section(found)
    (line,) = (each for each in text.splitlines() if each.startswith("| `digits` | a class"))
    assert line.endswith(f" | {len(some):,} | 1 | 3 | 1.2 |")
    (line,) = (each for each in text.splitlines() if each.startswith("| `products` | `digits` |"))
    assert " 1.00 | 1.00 to 1.00 | 1.00 | yes |" in line
    (line,) = (each for each in text.splitlines() if each.startswith("| `rule` | `ceil` |"))
    assert line.count("-2 (-2 to -2; ") == 2
    assert f"The best {page.BEST} of `digits`" in text
    best = min(loss(each) for each in some if each.forward == each.backward == "fp4")
    assert best == -2.0 and "\n| -2.0000 | 0.62 | " in text
    assert "is better in `digits` and needs less time on blackwell than these:" in text


def test_no_results_are_an_error() -> None:
    with pytest.raises(ValueError, match="python -m tools.sweep run products"):
        page.section([])
    with pytest.raises(ValueError, match="<!-- sweep -->"):
        pages.into("a page", "sweep", "tables")
