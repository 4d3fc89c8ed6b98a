"""The tables of a matrix's results, printed or between the markers of a page, and its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.study import results, tables
from benchmarks.study.configuration import configuration, point_of
from benchmarks.study.errors import StudyError
from benchmarks.study.matrix import Matrix, Point
from benchmarks.study.pictures import draw
from tools import pages
from tools.rows import Row


def rows_of(matrix: Matrix, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """(finished, failed) runs of the matrix, of a result file that may have other runs too.

    Runs with other flags than the matrix has now do not count, nor those of a recipe file that had
    other fields. Of several runs of a point, as of two numerics versions, the last counts.
    """
    points = set(matrix.points())

    def latest(runs: dict[str, Row]) -> dict[Point, Row]:
        found = {}
        for row in runs.values():
            point = point_of(row["configuration"])
            if point in points and _is_trained_as_now(matrix, point, row):
                found[point] = row
        return found

    finished, failed = latest(results.finished(rows)), latest(results.failed(rows))
    return [*finished.values()], [row for point, row in failed.items() if point not in finished]


def _is_trained_as_now(matrix: Matrix, point: Point, row: Row) -> bool:
    """Whether the matrix would train the run of its point so, but for the numerics version."""

    def training(of: dict[str, Any]) -> dict[str, Any]:
        return {key: of[key] for key in of if key not in ("numerics", "evaluate_in")}

    return training(configuration(matrix, point, row["text"])) == training(row["configuration"])


def section(matrix: Matrix, rows: list[Row]) -> str:
    """All tables, as Markdown. Raises StudyError if no run of the matrix has finished."""
    finished, failed = rows_of(matrix, rows)
    if not finished:
        raise StudyError(f"no run of {matrix.name} has finished: `run` trains what is left")
    window = tables.window(finished, matrix.metrics_interval)
    parts = [
        [
            f"- The question: {matrix.what}.",
            *tables.about(finished, len(matrix.points())),
            *tables.failures(failed),
        ],
        tables.amounts_table(finished),
        tables.loss_table(finished),
    ]
    for recipe in matrix.against:
        if gaps := tables.gap_table(finished, recipe):
            parts += [[f"The held-out loss minus that of `{recipe}`, paired by seed:"], gaps]
    if evaluations := tables.evaluation_table(finished):
        said = "Each model evaluated once more at the end, its loss minus that of `bf16` in `bf16`:"
        parts += [[said], evaluations]
    if oscillation := tables.oscillation_table(finished, window):
        parts += [[f"The linears' weights over the last {window} steps:"], oscillation]
    return "\n\n".join("\n".join(part) for part in parts)


def into(page: str, name: str, section: str) -> str:
    """The text `page`, with `section` in place of what is between the two marker lines of a matrix.

    name: of the matrix. Raises StudyError if the page has no such lines.
    """
    try:
        return pages.into(page, f"study: {name}", section)
    except ValueError as error:
        raise StudyError(str(error)) from error


def show(matrix: Matrix, path: Path, page: Path | None, pictures: Path | None) -> None:
    """Prints the tables, or writes them into `page`; draws the pictures in the folder `pictures`.

    path: of the results. Raises StudyError.
    """
    if not path.exists():
        raise StudyError(f"{path} does not exist: `run` writes it, or give another with --results")
    rows = results.read(path)
    found = section(matrix, rows)
    if page is None:
        print(found)
    else:
        try:
            page.write_text(into(page.read_text(), matrix.name, found))
        except OSError as error:
            raise StudyError(f"--page {page}: {error.strerror}") from error
    if pictures is not None:
        for made in draw(rows_of(matrix, rows)[0], pictures, f"study-{matrix.name}"):
            print(f"study: {made} is drawn")
