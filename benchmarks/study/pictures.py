"""The pictures of a study, as SVG."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.study.entries import BF16
from benchmarks.study.errors import StudyError
from benchmarks.study.gaps import Cell, gap, runs_of
from benchmarks.study.tables import cells, recipes
from tools.rows import Row

Series = list[tuple[float, float]]
GREY = "#666666"
LABEL = 0.055  # the height of a name, as a share of a panel's
COLORS = "#4c72b0 #dd5533 #55a868 #8172b3 #937860 #da8bc3 #8c8c8c #ccb974 #64b5cd".split()


def draw(rows: list[Row], folder: Path, name: str) -> list[Path]:
    """Writes NAME-gaps.svg and NAME-curves.svg; returns their paths. rows: finished runs.

    Raises StudyError if matplotlib is missing.
    """
    _needs_matplotlib()
    made = []
    for kind, figure in (("gaps", gaps(rows)), ("curves", curves(rows))):
        made.append(folder / f"{name}-{kind}.svg")
        _save(figure, made[-1])
    return made


def draw_over_tokens(panels: dict[str, dict[str, Series]], path: Path) -> None:
    """Draws gaps to BF16 over the tokens in the file `path`: a panel for each title, one below the
    other, with a line for each recipe, whose name stands at its end.

    panels: by title and by the recipe's name, after which more words may follow, the pairs (tokens
    in millions, gap). A recipe has one color in all panels, and there are no more recipes than
    COLORS. Raises StudyError if matplotlib is missing.
    """
    _needs_matplotlib()
    figure, axes_of = _figure(len(panels), 1, (9.0, 4.4 * len(panels)), sharex=False)
    known = list(dict.fromkeys(key.split()[0] for series in panels.values() for key in series))
    for (title, series), [axes] in zip(panels.items(), axes_of, strict=True):
        for key, points in series.items():
            color = COLORS[known.index(key.split()[0])]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.8, marker="o")
        axes.axhline(0, color=GREY, linewidth=1.2)
        axes.set_title(title)
        axes.set(xlabel="tokens, millions", ylabel="held-out loss minus BF16's (nats a token)")
        ends = {key: points[-1][1] for key, points in series.items()} | {BF16: 0.0}
        colors = {key: COLORS[known.index(key.split()[0])] for key in series} | {BF16: GREY}
        _label_ends(axes, ends, colors)
    _save(figure, path)


def _label_ends(axes: Any, ends: dict[str, float], colors: dict[str, str]) -> None:
    """Writes a name to the right of the panel at the height where its line ends, or higher where
    another name would be in the way."""
    low, high = axes.get_ylim()
    place = low
    for name in sorted(ends, key=ends.__getitem__):
        place = max(place, (ends[name] - low) / (high - low))
        axes.text(1.02, place, name, color=colors[name], va="center", transform=axes.transAxes)
        place += LABEL


def gaps(rows: list[Row]) -> Any:
    """The held-out loss of each recipe minus BF16's: means and intervals, and each seed's as a
    small point. A panel for each cell."""
    names = [recipe for recipe in recipes(rows) if recipe != BF16]
    figure, panels = _panels(1, cells(rows), height=0.9 + 0.45 * len(names))
    for cell, axes in zip(cells(rows), panels[0], strict=True):
        for place, recipe in enumerate(names):
            found, color = gap(rows, cell, recipe, BF16), _color(rows, recipe)
            if found is None:
                continue
            own = list(found.by_seed.values())
            axes.plot(own, [place] * len(own), "o", color=color, markersize=3, alpha=0.5)
            axes.plot(found.mean, place, "D", color=color, markersize=6)
            if found.interval is not None:
                axes.plot(found.interval, [place, place], color=color, linewidth=1.6)
        axes.axvline(0, color="#888888", linewidth=0.8)
        axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    figure.supxlabel("held-out loss minus BF16's (nats a token)", fontsize=9)
    return figure


def curves(rows: list[Row]) -> Any:
    """Training loss minus BF16's, gradient norm and r(W_Q) over the steps: means over the seeds."""
    of: list[tuple[str, Callable[[list[Row], Cell, str], list[Series]]]] = [
        ("training loss minus BF16's", _training_gaps),
        ("gradient norm", _norms),
    ]
    if any(row["metrics"] for row in rows):
        of.append(("r(W_Q)", _rates))
    figure, panels = _panels(len(of), cells(rows), height=2.4 * len(of))
    for (label, series_of), line in zip(of, panels, strict=True):
        for cell, axes in zip(cells(rows), line, strict=True):
            for recipe in recipes(rows):
                if series := mean(series_of(rows, cell, recipe)):
                    color = _color(rows, recipe)
                    mark = "." if len(series) < 20 else ""
                    line_of = {"color": color, "linewidth": 1.2, "marker": mark}
                    axes.plot(*zip(*series, strict=True), label=recipe, **line_of)
        line[0].set(ylabel=label)
    figure.supxlabel("step", fontsize=9)
    handles, labels = panels[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def mean(series: list[Series]) -> Series:
    """At each step that all series have the mean of their numbers."""
    tables = [dict(each) for each in series]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    return [(step, statistics.mean(table[step] for table in tables)) for step in steps]


def held_out_gaps(rows: list[Row], cell: Cell, recipe: str) -> list[Series]:
    """For each seed that BF16 has too, the held-out loss minus BF16's at each evaluation: the mean
    over the rounding seeds."""
    return _means_by_seed(_minus_bf16(rows, cell, recipe, "held_out"))


def _training_gaps(rows: list[Row], cell: Cell, recipe: str) -> list[Series]:
    """The same of the training loss, whose batches are those of BF16's run with the same seed; []
    for BF16."""
    return [] if recipe == BF16 else _means_by_seed(_minus_bf16(rows, cell, recipe, "train"))


def _minus_bf16(
    rows: list[Row], cell: Cell, recipe: str, losses: str
) -> Iterator[tuple[int, Series]]:
    """Yields (seed, series) for each run of a recipe for whose seed there is a run of BF16.

    The series has, at each step that both runs have, the loss minus BF16's. losses: which losses,
    the key "train" or "held_out" of a row.
    """
    base = {r["configuration"]["seed"]: dict(r[losses]) for r in runs_of(rows, cell, BF16)}
    for row in runs_of(rows, cell, recipe):
        seed = row["configuration"]["seed"]
        if other := base.get(seed):
            yield seed, [(step, loss - other[step]) for step, loss in row[losses] if step in other]


def _norms(rows: list[Row], cell: Cell, recipe: str) -> list[Series]:
    own = runs_of(rows, cell, recipe)
    return _means_by_seed((r["configuration"]["seed"], r["grad_norms"]) for r in own)


def _rates(rows: list[Row], cell: Cell, recipe: str) -> list[Series]:
    found = [
        (row["configuration"]["seed"], row["metrics"].get("weight", {}).get("r_quantized"))
        for row in runs_of(rows, cell, recipe)
    ]
    return _means_by_seed((seed, rates) for seed, rates in found if rates)


def _means_by_seed(series: Iterable[tuple[int, Series]]) -> list[Series]:
    """For each seed the mean of its series, which are those of its rounding seeds."""
    by_seed: dict[int, list[Series]] = {}
    for seed, own in series:
        by_seed.setdefault(seed, []).append(own)
    return [mean(each) for each in by_seed.values()]


def _panels(lines: int, found: list[Cell], height: float) -> tuple[Any, Any]:
    """(figure, panels [lines][cells]), each column headed by its cell."""
    figure, panels = _figure(lines, len(found), (2 + 2.6 * len(found), 0.8 + height))
    for cell, axes in zip(found, panels[0], strict=True):
        axes.set_title(f"{cell.size}, {cell.steps} steps, lr {cell.learning_rate:g}", fontsize=9)
    return figure, panels


def _figure(
    lines: int, columns: int, size: tuple[float, float], *, sharex: bool = True
) -> tuple[Any, Any]:
    """(figure, panels [lines][columns]). size: width and height in inches. sharex: whether the
    panels of a column have one scale of x."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "study", "svg.fonttype": "none", "font.size": 9}
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        lines,
        columns,
        figsize=size,
        layout="constrained",
        squeeze=False,
        sharex="col" if sharex else False,
        sharey="row",
    )
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure, panels


def _needs_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise StudyError("the pictures need matplotlib: pip install matplotlib")


def _save(figure: Any, path: Path) -> None:
    """Writes an SVG file. Without a date the same rows make the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _color(rows: list[Row], recipe: str) -> str:
    return COLORS[recipes(rows).index(recipe) % len(COLORS)]
