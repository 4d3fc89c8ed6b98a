"""The comparison of docs/recipes.md: the committed runs of several matrices, taken together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.study import matrix, results, showing, tables
from benchmarks.study.committed import RESULTS
from benchmarks.study.entries import BF16
from benchmarks.study.errors import StudyError
from benchmarks.study.gaps import Cell, Gap, cell_of, gap
from benchmarks.study.recipe_paths import candidate
from benchmarks.study.sizes import size_order
from megatron_fp4 import list_recipes
from tools.rows import Row

# Recipes under whose names the page has the runs of a file: the runs are from before the recipe was
# registered, and the file is equal to it.
OWN = {"tetrajet-fp8": candidate("fp8-ends-then-fp8")}
MATRICES = ["recipes", "candidates", "sizes", "largest"]  # of the same text


@dataclass(frozen=True)
class Comparison:
    """The finished runs of MATRICES, each once.

    rows: with the names of OWN in place of its files. planned: how many runs the matrices have.
    failed: the runs that failed for good. files: the recipe files that the matrices name, but for
    those of OWN.
    """

    rows: list[Row]
    planned: int
    failed: list[Row]
    files: list[str]

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells in which a recipe has a gap to BF16; the one with the most runs first."""
        found = [cell for cell in tables.cells(self.rows) if self._compared(cell)]
        counts = Counter(map(cell_of, self.rows))
        return sorted(found, key=lambda cell: (-counts[cell], size_order(cell.size), cell))

    def gap(self, name: str, cell: Cell | None = None) -> Gap | None:
        """The gap of a recipe to BF16 in a cell; None is the first cell."""
        return gap(self.rows, cell or self.cells[0], name, BF16)

    @cached_property
    def registered(self) -> list[str]:
        """The registered recipes, those that were run with options too, as `_in_order` has them."""
        return self._in_order(
            [*list_recipes(), *(n for n in tables.recipes(self.rows) if "," in n)]
        )

    @cached_property
    def candidates(self) -> list[str]:
        """The recipe files, as `_in_order` has them."""
        return self._in_order(self.files)

    def _in_order(self, names: list[str]) -> list[str]:
        """By their gap, the lowest first; then those that were not run, by name."""
        gaps = {name: found.mean for name in names if (found := self.gap(name)) is not None}
        return [*sorted(gaps, key=gaps.__getitem__), *sorted(set(names) - gaps.keys())]

    def _compared(self, cell: Cell) -> bool:
        names = [name for name in tables.recipes(self.rows) if name != BF16]
        return any(gap(self.rows, cell, name, BF16) is not None for name in names)


def read(folder: Path = RESULTS) -> Comparison:
    """Reads the runs of MATRICES from their result files in `folder`.

    Raises StudyError if no run of a recipe beside BF16 has finished.
    """
    studies = [matrix.read(name) for name in MATRICES]
    rows = [row for name in MATRICES for row in results.read(folder / f"study-{name}.jsonl")]
    finished: dict[str, Row] = {}
    failed: dict[str, Row] = {}
    for study in studies:
        for kind, own in zip((finished, failed), showing.rows_of(study, rows), strict=True):
            kind.update({row["hash"]: row for row in own})
    points = dict.fromkeys(point for study in studies for point in study.points())
    entries = dict.fromkeys(point.recipe for point in points)
    found = Comparison(
        [_named(row) for row in finished.values()],
        len(points),
        [*failed.values()],
        [each for each in entries if each.endswith(".yaml") and each not in OWN.values()],
    )
    if not found.cells:
        raise StudyError("no run of a recipe beside BF16 has finished: run the matrix recipes")
    return found


def _named(row: Row) -> Row:
    """A row under the name of OWN, where its recipe is a file of it."""
    names = {file: name for name, file in OWN.items()}
    entry = row["configuration"]["recipe"]
    return row | {"configuration": row["configuration"] | {"recipe": names.get(entry, entry)}}
