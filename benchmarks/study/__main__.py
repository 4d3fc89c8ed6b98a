"""Studies of pretraining: trains the runs of a matrix, and makes its tables and pictures.

    python -m benchmarks.study run tiny [--minutes 9]
    python -m benchmarks.study show tiny [--page docs/study.md] [--pictures runs/study]
    python -m benchmarks.study recipes

docs/study.md describes it.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpus import visible_gpus
from benchmarks.study import matrix, recipes_page, running, showing
from benchmarks.study.errors import StudyError
from megatron_fp4.mcore.data.errors import DataError
from tools import installed_text, rows
from tools.stamp import stamp

UNFINISHED = 75  # the exit status when runs are left: EX_TEMPFAIL of sysexits.h
LEAST_MINUTES = 2  # a run begins if 1.5 are left, and the text is looked at before


def run(args: argparse.Namespace) -> int:
    """Trains what is left of the matrix; the exit status."""
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    _check(args)
    found = matrix.read(args.matrix)
    path = args.results or default_results(found)
    try:
        with rows.alone(path):
            work, data, described = prepared(found, args.work)
            session = running.Session(path, work, data, stamp(args.commit), described, deadline)
            session.train(found, running.Machine(visible_gpus(), args.at_once))
            return _told(session, found)
    except rows.InUse as error:
        raise StudyError(str(error)) from error


def _check(args: argparse.Namespace) -> None:
    """Raises StudyError for numbers with which `run` would never train."""
    if args.at_once < 1:
        raise StudyError(f"--at-once is {args.at_once}: give 1 or more")
    if args.minutes is not None and not LEAST_MINUTES <= args.minutes < math.inf:
        say = f"give {LEAST_MINUTES} or more, or leave it out to train to the end"
        raise StudyError(f"--minutes is {args.minutes:g}: {say}")


def _told(session: running.Session, found: matrix.Matrix) -> int:
    """Prints what is left and what failed; the exit status."""
    left, failures = session.left(found), session.failures(found)
    total = len(found.points())
    if left:
        print(f"study: {len(left)} of {total} runs are left: give the same command again")
    if failures:
        print(f"study: {len(failures)} of {total} runs failed: {running.told(failures[0])}")
        return 1
    return UNFINISHED if left else 0


def prepare(args: argparse.Namespace) -> int:
    """Prepares the text of the matrix alone, where it is not there yet; `run` does it too."""
    prepared(matrix.read(args.matrix), args.work)
    return 0


def prepared(found: matrix.Matrix, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """(the absolute path of `folder`, that of the text in it, what results record of the text)."""
    work = Path(os.path.abspath(folder))  # launches run in the repository's root
    data = work / f"text-{found.text.megabytes:g}-{found.text.vocabulary}"
    return work, data, installed_text.described(installed_text.prepare(found.text, data))


def show(args: argparse.Namespace) -> int:
    """Makes the tables and pictures of the matrix's results."""
    found = matrix.read(args.matrix)
    showing.show(found, args.results or default_results(found), args.page, args.pictures)
    return 0


def recipes(args: argparse.Namespace) -> int:
    """Writes the tables of all recipes into the README and docs, from all committed results."""
    recipes_page.write(args.root)
    return 0


def default_results(found: matrix.Matrix) -> Path:
    """Where the results of a matrix are, unless --results is given."""
    return Path(f"benchmarks/results/study-{found.name}.jsonl")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line `arguments` (None: sys.argv); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(required=True)
    for function in (prepare, run, show):
        command = commands.add_parser(function.__name__, help=(function.__doc__ or "").strip())
        command.set_defaults(function=function)
        command.add_argument("matrix", help=f"{', '.join(matrix.names())}, or a YAML file")
    making, training, tables = (command.add_argument for command in commands.choices.values())
    pages = commands.add_parser("recipes", help=(recipes.__doc__ or "").strip())
    pages.set_defaults(function=recipes)
    root = "the checkout whose pages are written (the working directory)"
    pages.add_argument("--root", type=Path, default=Path(), help=root)
    for add in (training, tables):
        add("--results", type=Path, help="the result file (JSON lines)")
    minutes = f"end after so long, {LEAST_MINUTES} or more; runs go on in the next call"
    training("--minutes", type=float, help=minutes)
    at_once = "runs side by side on each GPU, or on the CPU (%(default)s)"
    training("--at-once", type=int, default=1, help=at_once)
    for add in (making, training):
        add("--work", type=Path, default=Path("runs/study"), help="text, logs, checkpoints")
    training("--commit", help="where the tree has no git of its own")
    tables("--page", type=Path, help="write the tables between the markers of this page")
    tables("--pictures", type=Path, help="draw the pictures in this folder")
    args = parser.parse_args(arguments)
    try:
        return int(args.function(args))
    except (StudyError, DataError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
