"""The committed results of studies."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from benchmarks.study import matrix, results, showing
from megatron_fp4.arithmetic.formats import NUMERICS_VERSION
from tools.rows import Row

RESULTS = Path(__file__).parents[1] / "results"


@cache  # several claims are of one study
def runs_of_study(name: str) -> tuple[list[Row], matrix.Matrix]:
    """Reads the matrix `name` and its committed results; returns (its finished runs as rows of the
    result file, the matrix)."""
    study = matrix.read(name)
    rows, _ = showing.rows_of(study, results.read(RESULTS / f"study-{name}.jsonl"))
    return rows, study


def earlier_numerics(rows: list[Row]) -> str:
    """A remark on runs of earlier numerics versions (docs/numerics.md): their random bits differ.

    It follows the name of their study in a table, as in ", numerics version 2". "" if all runs are
    of the present version.
    """
    found = {row["configuration"]["numerics"] for row in rows} - {NUMERICS_VERSION}
    return f", numerics version {', '.join(map(str, sorted(found)))}" if found else ""
