"""Links between the project's pages lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ["docs", "docs/notes", "examples", "examples/vit", "patches"]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """The Markdown files that are part of the project."""
    folders = [ROOT, *(ROOT / name for name in FOLDERS)]
    return sorted(page for folder in folders for page in folder.glob("*.md"))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", head).strip().lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere; those to other sites are not looked at."""
    found = []
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            found.append(link)
        elif anchor and target.suffix == ".md":
            found += [] if anchor in anchors(text if not name else target.read_text()) else [link]
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = "# One `two` (three)\n[a](#one-two-three) [b](#one) [c](no.md) [d](https://x.y) [e](.)"
    assert broken(ROOT / "README.md", text) == ["#one", "no.md"]
