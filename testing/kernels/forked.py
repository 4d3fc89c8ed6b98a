"""Runs comparisons, each in a fork of a process that has torch and Triton imported.

    TRITON_INTERPRET=1 python -m testing.kernels.forked

For each line of JSON on standard input, [comparison, cases, mistake], injects the mistake if it has
a name, runs compare_<comparison>.py, and prints a line of JSON: [exit status, standard output,
standard error]. A mistake ends with the fork.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from typing import IO

import ml_dtypes  # noqa: F401
import torch  # noqa: F401
import triton.language  # noqa: F401

from testing.kernels import masks


def run(comparison: str, cases: str, mistake: str, out: IO[str], errors: IO[str]) -> int:
    """Forks, injects `mistake` if it is not "", and runs compare_<comparison>.py with `cases`.

    out, errors: files for the fork's standard output and standard error. Returns the exit status.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        if mistake:
            from testing.kernels import (
                mistakes,
            )  # imports the kernels, which needs TRITON_INTERPRET

            mistakes.inject(comparison, mistake)
        module = f"testing.kernels.compare_{comparison}"
        sys.argv = [module, cases]
        runpy.run_module(module, run_name="__main__")
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    masks.mend()
    for line in sys.stdin:
        comparison, cases, mistake = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            status = run(comparison, cases, mistake, out, errors)
            for file in (out, errors):
                file.seek(0)
            print(json.dumps([status, out.read(), errors.read()]), flush=True)


if __name__ == "__main__":
    main()
