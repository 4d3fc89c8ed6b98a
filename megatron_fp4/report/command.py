"""The command `python -m tools.report`: one HTML page of a run, or of two."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_fp4.errors import ConfigError
from megatron_fp4.report.page import page
from megatron_fp4.report.reading import metrics_file, read

_ABOUT = """Makes one HTML page of the metrics that a run has logged, or of two runs, to compare
them. A browser opens it without a network. docs/report.md says what it shows."""


def run(arguments: Sequence[str] | None = None) -> Path:
    """Writes the page; returns its path. arguments: of the command line; None takes sys.argv.

    Raises ConfigError if a run has no metrics or the page cannot be written.
    """
    parser = argparse.ArgumentParser(prog="report", description=_ABOUT)
    parser.add_argument("run", type=Path, metavar="RUN", help="a folder with metrics.jsonl")
    parser.add_argument("other", type=Path, metavar="OTHER", nargs="?", help="another, to compare")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where the page goes (RUN/report.html)"
    )
    args = parser.parse_args(arguments)
    runs = [path for path in (args.run, args.other) if path is not None]
    output: Path = args.output or metrics_file(args.run).with_name("report.html")
    if output.resolve() in [metrics_file(path).resolve() for path in runs]:
        raise ConfigError(f"--output {output} has the metrics of a run: give another file")
    text = page(list(map(read, runs)))
    try:
        # Half of a surrogate pair, which JSON and file names may have, is not in UTF-8.
        output.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        raise ConfigError(
            f"{output}: not writable: {error.strerror}; give another --output"
        ) from error
    return output


def main() -> int:
    """Writes the page, or prints one line that says what is wrong. Returns the exit status."""
    try:
        output = run()
    except ConfigError as error:
        print(f"megatron-fp4: error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB)")
    return 0
