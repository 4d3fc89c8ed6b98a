"""The command `python -m tools.choose_layout`: layouts in the order of their estimated speed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from megatron_fp4.errors import ConfigError
from megatron_fp4.estimate.flags import add_arguments, fixed_of, job_of
from megatron_fp4.estimate.huggingface import read
from megatron_fp4.estimate.report import as_json, text
from megatron_fp4.estimate.search import search

_ABOUT = """Estimates memory, communication and speed of parallel layouts, without a GPU.
docs/choose-layout.md has the errors of the estimates against committed measurements."""


def run(arguments: Sequence[str] | None = None) -> str:
    """The text that the command prints. arguments: of the command line; None takes sys.argv.

    Raises ConfigError if the flags do not fit together or no layout runs.
    """
    parser = argparse.ArgumentParser(prog="choose_layout", description=_ABOUT)
    add_arguments(parser)
    parser.add_argument("--top", type=int, default=10, help="how many layouts are shown")
    parser.add_argument("--json", action="store_true", help="print JSON, with all breakdowns")
    args = parser.parse_args(arguments)
    job = job_of(args)
    found = search(job, fixed_of(args))
    if args.json:
        return json.dumps(as_json(job, found, args.top), indent=1) + "\n"
    shown = text(job, found, args.top)
    if args.hf_config is not None:
        _, flags = read(args.hf_config, args.seq_length)
        shown += f"  model: {' '.join(flags)}\n"
    return shown


def main() -> int:
    """Prints the layouts, or one line that says what is wrong. Returns the exit status."""
    try:
        print(run(), end="")
    except ConfigError as error:
        print(f"megatron-fp4: error: {error}", file=sys.stderr)
        return 1
    return 0
