"""How many Python calls one linear takes, as a measure of its host overhead."""

import json
import os
import subprocess
import sys
from pathlib import Path

# Python and C functions, by cProfile. On a GPU a pass takes 14 more than are counted here: they ask
# for the stream, the device and whether a graph is captured.
MOST = 400 - 14


def test_a_linear_on_a_warm_plan_takes_few_calls() -> None:
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "testing.scripts.host_calls"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) == 4
    for name, (cold, warm) in found.items():
        # Negative control: a cold plan is made, and launches too.
        assert warm <= MOST < cold, f"{name}: {warm} calls, {cold} on a cold plan"
