"""The HTML page: one file, which loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import Any

from megatron_fp4.report.embedding import embedded
from megatron_fp4.report.reading import Run

SCRIPTS = (
    "elements.js",
    "scales.js",
    "curves.js",
    "heatmaps.js",
    "histograms.js",
    "tables.js",
    "page.js",
)


def page(runs: Sequence[Run]) -> str:
    """The page of one run, or of two beside each other."""
    title = " and ".join(run.name for run in runs)
    return Template(_file("page.html")).substitute(
        title=html.escape(title),
        style=_file("page.css"),
        data=_json(embedded(runs)),
        script="".join(map(_file, SCRIPTS)),
    )


def _json(data: Any) -> str:
    """JSON for a script element: without <, no text in it can end the element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _file(name: str) -> str:
    return files("megatron_fp4.report").joinpath(name).read_text(encoding="utf-8")
