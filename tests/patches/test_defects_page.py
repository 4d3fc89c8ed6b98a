"""patches/README.md names symbols and files that are there, and what 0.20 changes is not yet."""

import importlib
import inspect
import re
from typing import Any

import pytest
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.training.models.gpt import GPTModelConfig

from megatron_fp4.mcore.release import TRIED
from testing.worlds.launch import ROOT

PAGE = (ROOT / "patches" / "README.md").read_text()
ROWS = re.findall(r"^\| `(megatron\.[\w.]+:[\w.]+)` \| .* \| (.*) \| .*\|$", PAGE, re.MULTILINE)


def symbol(path: str) -> Any:
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def test_the_page_has_a_table_of_defects() -> None:
    assert len(ROWS) == PAGE.count("| `megatron.") >= 25
    assert len({path for path, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("path", "where"), ROWS)
def test_a_symbol_with_a_defect_is_still_there(path: str, where: str) -> None:
    """If upstream has removed or renamed it, its workaround does nothing, or can go."""
    assert symbol(path) is not inspect.Parameter.empty
    files = re.findall(r"`(mcore/[\w/]+\.py)`", where)
    assert files and all((ROOT / "megatron_fp4" / file).is_file() for file in files)


@pytest.mark.parametrize(
    "path", ["megatron.core.no_module:name", "megatron.core.transformer.mlp:MLP.no_name"]
)
def test_a_symbol_that_is_not_there_would_be_noticed(path: str) -> None:
    with pytest.raises((ImportError, AttributeError)):
        symbol(path)


def test_the_releases_of_the_page_are_those_of_the_code() -> None:
    assert f"| {', '.join(TRIED)} | supported" in PAGE


def test_what_0_20_changes_is_not_here_yet() -> None:
    column, row = map(
        inspect.signature, (ColumnParallelLinear.__init__, RowParallelLinear.__init__)
    )
    for name in ("pg_collection", "output_dtype"):
        assert name not in column.parameters and name not in row.parameters
    assert "logit_dtype" not in GPTModelConfig.__dataclass_fields__
