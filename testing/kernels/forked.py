"""Runs comparisons, each in a fork of a process that has torch and Triton imported.

TRITON_INTERPRET=1 python -m testing.kernels.forked

For each line of JSON, [comparison, cases, the path searched first,
the name of a mistake that is injected], runs compare_<comparison>.py
and prints a line of JSON: [exit status, standard output, standard error]. megatron_fp4 is imported
in the fork.
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


def run(comparison: str, cases: str, path: str, mistake: str, out: IO[str], errors: IO[str]) -> int:
    """Its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.path[:0] = [path] if path else []
        module = f"testing.kernels.compare_{comparison}"
        sys.argv = [module, cases]
        if mistake:
            from testing.kernels.mistakes import MISTAKES

            MISTAKES[comparison][mistake].inject()
        runpy.run_module(module, run_name="__main__")
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    assert not any(name.startswith("megatron_fp4") for name in sys.modules)
    for line in sys.stdin:
        comparison, cases, path, mistake = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            status = run(comparison, cases, path, mistake, out, errors)
            for file in (out, errors):
                file.seek(0)
            print(json.dumps([status, out.read(), errors.read()]), flush=True)


if __name__ == "__main__":
    main()
