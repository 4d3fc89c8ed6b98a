"""Imports between the rooms of megatron_fp4/mcore/ point one way."""

import ast
from pathlib import Path

import pytest

ROOT = "megatron_fp4/mcore/"
MCORE = Path(__file__).parents[2] / ROOT
# Each imports from those before it. CONTRIBUTING.md says what they are about.
ROOMS = [
    "runtime",
    "data",
    "arguments",
    "launch/refusals",
    "launch",
    "model",
    "exchange",
    "gather",
    "checkpoints",
    "loop",
]


def room_of(place: str) -> str:
    """The room of a module, of which `place` is the path in mcore/; its first folder if none."""
    rooms = [room for room in ROOMS if place.startswith(f"{room}/")]
    return max(rooms, key=len, default=place.split("/")[0])


def rooms_imported_by(path: Path) -> set[str]:
    """The rooms of mcore/ that a module imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            places = [name.replace(".", "/") for name in names]
            found |= {room_of(place.removeprefix(ROOT)) for place in places if ROOT in place}
    return found


def modules_of(room: str) -> list[Path]:
    """The modules of a room, and not those of a room within it."""
    every = (MCORE / room).rglob("*.py")
    return [path for path in every if room_of(path.relative_to(MCORE).as_posix()) == room]


def test_every_folder_is_a_room() -> None:
    folders = {path.parent.name for path in MCORE.glob("*/__init__.py")}
    assert folders == {room for room in ROOMS if "/" not in room}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_those_before_it(room: str) -> None:
    known, modules = set(ROOMS[: ROOMS.index(room) + 1]), modules_of(room)
    assert modules
    for path in modules:
        assert rooms_imported_by(path) <= known, path


def test_imports_are_found() -> None:
    imported = rooms_imported_by(MCORE / "launch" / "command_line.py")
    assert imported == {"arguments", "launch", "launch/refusals"}
