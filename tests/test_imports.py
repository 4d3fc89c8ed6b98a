"""Imports between the parts and between the modules of megatron_fp4/ point one way."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
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


def imports_that_run(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports in a module, in its functions too, but not those for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from imports_that_run(child)


def modules_imported_by(source: str, known: set[str]) -> set[str]:
    """Which of the modules `known` the text of a module imports."""
    found = set[str]()
    for node in imports_that_run(ast.parse(source)):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            within = [f"{node.module}.{name}" for name in names]
            names = [name if name in known else str(node.module) for name in within]
        found |= known.intersection(names)
    return found


def sources() -> dict[str, str]:
    """The text of each module of the package, by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        names = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(names).removesuffix(".__init__")] = path.read_text()
    return found


def check_one_way(modules: dict[str, str]) -> None:
    """Raises graphlib.CycleError, which names the modules, if they import each other."""
    known = set(modules)
    TopologicalSorter(
        {name: modules_imported_by(source, known) - {name} for name, source in modules.items()}
    ).prepare()


def test_no_modules_import_each_other() -> None:
    check_one_way(sources())


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("mcore.launch.refusals.values", "from megatron_fp4.mcore.launch import fp4_arguments"),
        ("recipes.files", "def late():\n    from megatron_fp4.recipes.lookup import get_recipe"),
        ("mcore.runtime.ranks", "from megatron_fp4.mcore.loop import plugin"),
    ],
)
def test_a_cycle_is_noticed(importer: str, line: str) -> None:
    """Negative control: imports that would close a cycle, one of them within a function."""
    modules = sources()
    modules[f"megatron_fp4.{importer}"] += f"\n{line}\n"
    with pytest.raises(CycleError) as error:
        check_one_way(modules)
    assert f"megatron_fp4.{importer}" in error.value.args[1]


def test_an_import_for_types_alone_closes_no_cycle() -> None:
    modules = {"a": "import b", "b": "if TYPE_CHECKING:\n    import a"}
    check_one_way(modules)
    with pytest.raises(CycleError):  # Negative control.
        check_one_way(modules | {"b": "import a"})
