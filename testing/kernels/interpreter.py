"""Runs the comparisons of this folder in Triton's interpreter, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def _forking() -> subprocess.Popen[str]:
    """The process that runs comparisons in forks (forked.py), started by the first call.

    It imports torch and Triton once, which takes longer than most comparisons.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "testing.kernels.forked"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def differences(comparison: str, cases: str = "", mistake: str = "") -> list[str]:
    """The lines that compare_<comparison>.py prints, [""] where nothing differs.

    cases: words that choose cases, "" for all. mistake: the name of a mistake to inject first,
    as `mistakes.inject` takes it; "": none. Raises AssertionError, with the last errors, if the
    comparison fails to run.
    """
    asked, answers = _forking().stdin, _forking().stdout
    assert asked is not None and answers is not None
    print(json.dumps([comparison, cases, mistake]), file=asked, flush=True)
    status, out, errors = json.loads(answers.readline())
    assert status == 0, errors[-3000:]
    return out.split("\n")[:-1]
