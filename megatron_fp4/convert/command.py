"""The command `python -m tools.checkpoint`, installed as `megatron-fp4-checkpoint`.

Each subcommand is a module of this package with a docstring, `add_arguments(parser)` and
`run(args)`, which returns the exit status or None for 0; the first line of the docstring is its
help.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import ModuleType

from megatron_fp4.convert import average, compare, reshard, show, strip
from megatron_fp4.convert.huggingface import export_hf, import_hf
from megatron_fp4.errors import ConfigError

SUBCOMMANDS: dict[str, ModuleType] = {
    "import-hf": import_hf,
    "export-hf": export_hf,
    "show": show,
    "compare": compare,
    "reshard": reshard,
    "strip": strip,
    "average": average,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line `arguments` (None: sys.argv); returns the exit status.

    A ConfigError is printed as one line, and the status is 1. If the reader of the output has
    closed it, as `head` does, the command ends quietly, as one that SIGPIPE ends.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-fp4-checkpoint",
        description="Reads, converts and compares checkpoints. Needs neither Megatron nor a GPU.",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in SUBCOMMANDS.items():
        text = (module.__doc__ or "").strip()
        added = subparsers.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(added)
        added.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        status = int(args.run(args) or 0)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"megatron-fp4-checkpoint: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
