"""Imports between the rooms of megatron_fp4/mcore/ point one way."""

import ast
from pathlib import Path

import pytest

MCORE = Path(__file__).parents[2] / "megatron_fp4" / "mcore"
# Each imports from those before it. CONTRIBUTING.md says what they are about.
ROOMS = ["runtime", "data", "launch", "model", "exchange", "gather", "checkpoints", "loop"]


def rooms_imported_by(path: Path) -> set[str]:
    """The rooms of mcore/ that a module imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {
                name.split(".")[2] for name in names if name.startswith("megatron_fp4.mcore.")
            }
    return found


def test_every_folder_is_a_room() -> None:
    assert {path.parent.name for path in MCORE.glob("*/__init__.py")} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_before_it(room: str) -> None:
    known = set(ROOMS[: ROOMS.index(room) + 1])
    for path in (MCORE / room).rglob("*.py"):
        assert rooms_imported_by(path) <= known, path
