"""Runs modules of tests/kernels, each in a fork of a process that has torch and Triton imported.

TRITON_INTERPRET=1 python -m tests.kernels.forked

Takes a line of JSON for each, [module, cases, the path searched first], and answers with one:
[exit status, what it printed, its errors]. The package itself is imported in the fork.
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


def run(module: str, cases: str, path: str, out: IO[str], errors: IO[str]) -> int:
    """Its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.path[:0] = [path] if path else []
        sys.argv = [module, cases]
        runpy.run_module(f"tests.kernels.{module}", run_name="__main__")
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    assert not any(name.startswith("megatron_fp4") for name in sys.modules)
    for line in sys.stdin:
        module, cases, path = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            status = run(module, cases, path, out, errors)
            for file in (out, errors):
                file.seek(0)
            print(json.dumps([status, out.read(), errors.read()]), flush=True)


if __name__ == "__main__":
    main()
