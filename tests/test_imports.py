"""Imports between the parts of megatron_fp4/ point one way."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_fp4"
# Each imports from none of those after it, nor from others in its group. CONTRIBUTING.md says this.
PARTS = [
    {"arithmetic"},
    {"recipe"},
    {"setting"},
    {"makers", "multipliers"},
    {"plan"},
    {"execution"},
    {"linear"},
    {"cpp"},
    {"mcore"},
]


def imported_by(part: str) -> set[str]:
    """The parts from which a part imports, for types alone too."""
    paths = [*PACKAGE.glob(f"{part}.py"), *(PACKAGE / part).rglob("*.py")]
    assert paths, part
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    names = [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ] + [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("megatron_fp4.")} - {part}


@pytest.mark.parametrize("place", range(len(PARTS)))
def test_a_part_imports_from_those_before_it(place: int) -> None:
    later = set[str]().union(*PARTS[place:])
    for part in PARTS[place]:
        assert not imported_by(part) & later, part


def test_imports_are_found() -> None:
    assert {"arithmetic", "makers", "multipliers", "setting"} <= imported_by("plan")
