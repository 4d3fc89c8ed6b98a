"""The running text of a page, in which a sentence is found wherever its lines break."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def prose(page: str) -> str:
    """The text of a page with one space between words. page: its path from the checkout."""
    return " ".join((ROOT / page).read_text().split())
