"""The harness that runs scripts in torchrun worlds: a world that fails is told of at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from testing.worlds import world

LIMIT_S = 300


def test_a_world_that_cannot_be_imported_fails_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "world.py"
    program.write_text("import no_such_module\n")
    monkeypatch.setattr(world, "__file__", str(program))
    broken, start = world.World(2), time.monotonic()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
            broken.run(tmp_path / "script.py", [], LIMIT_S)
    assert time.monotonic() - start < LIMIT_S / 2


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """The control: a world that works is waited for, and goes on after that."""
    slow, quick = tmp_path / "slow.py", tmp_path / "quick.py"
    slow.write_text("import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    quick.write_text("print('done')\n")
    working = world.world(1)
    assert working.run(quick, [], LIMIT_S) == (0, "done\n")
    with pytest.raises(TimeoutError, match="still running after 3 s: began"):
        working.run(slow, [], 3)
    assert working.run(quick, [], LIMIT_S) == (0, "done\n")
