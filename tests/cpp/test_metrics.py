"""With metrics on, passes run in C++: the rows that are followed are read from held operands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from testing.worlds.checkpoints import SMALL
from testing.worlds.launch import ROOT, SCRIPTS, Result, result_of, spawn, tiny_on_mock_data
from testing.worlds.metrics import kinds, read

pytestmark = pytest.mark.slow  # the first test of a machine builds the extension
STEPS, LINEARS = 8, 8
FLAGS = f"{SMALL} --bf16 --fp4-metrics-interval 4 --global-batch-size 2 --train-iters {STEPS}"
# Recipes of which PyTorch draws no random bits. W of the last is not quantized in fprop.
RECIPES = {
    "mxfp4": "mxfp4",
    "backward": "{base: mxfp4, name: backward, fprop: {a: null, b: null}}",
}


def run(name: str, folder: Path, script: Path, mistake: str = "", others: str = "") -> Result:
    folder.mkdir()
    recipe = RECIPES[name]
    if recipe.startswith("{"):
        (folder / "recipe.yaml").write_text(recipe)
        recipe = str(folder / "recipe.yaml")
    flags = f"{FLAGS} --fp4-recipe {recipe} --tensorboard-dir {folder} {others}"
    words = [*mistake.split(), *tiny_on_mock_data(*flags.split())]
    result = result_of(spawn(1, script, *words))
    assert result.status == 0, result.output[-4000:]
    return result


def in_cpp(name: str, folder: Path, mistake: str = "", others: str = "") -> int:
    """How many forward passes of a training ran in Python; see pretrain_in_cpp.py."""
    result = run(name, folder, SCRIPTS / "pretrain_in_cpp.py", mistake, others)
    found = re.search(r"forward passes in Python: (\d+)", result.output)
    assert found is not None, result.output[-4000:]
    return int(found[1])


def of_weights(folder: Path) -> list[dict[str, Any]]:
    return kinds(read(folder), "weight")


@pytest.mark.parametrize("name", RECIPES)
def test_metrics_are_those_of_passes_in_python(name: str, tmp_path: Path) -> None:
    run(name, tmp_path / "python", ROOT / "pretrain_gpt.py")
    calls = in_cpp(name, tmp_path / "cpp")
    # The first two calls of a linear, one of which is recorded, and those of the steps 4 and 8.
    assert calls == LINEARS * 4
    found, expected = (
        [record for record in read(tmp_path / each) if "metrics" in record]
        for each in ("cpp", "python")
    )
    assert found == expected
    changes = [record["metrics"]["r"] for record in of_weights(tmp_path / "cpp")]
    assert len(changes) == 2 * LINEARS and all(changes)


def test_rows_of_another_step_are_noticed(tmp_path: Path) -> None:
    in_cpp("mxfp4", tmp_path / "right")
    in_cpp("mxfp4", tmp_path / "wrong", "mistake=old-rows")
    pairs = zip(of_weights(tmp_path / "right"), of_weights(tmp_path / "wrong"), strict=True)
    assert all(a["metrics"]["r_quantized"] != b["metrics"]["r_quantized"] for a, b in pairs)


def test_where_nothing_is_held_passes_run_in_python(tmp_path: Path) -> None:
    """W is seen there as it is quantized."""
    assert in_cpp("mxfp4", tmp_path / "off", others="--fp4-weight-cache off") == LINEARS * STEPS
