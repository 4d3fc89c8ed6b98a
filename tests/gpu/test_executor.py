"""On a GPU the executor in C++ computes the bits of the one in Python."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_fp4.cpp import lowering
from megatron_fp4.recipes import uniform_recipes
from megatron_fp4.target import target_of
from testing.scripts.compare_executors import FORMS, REMADE
from testing.worlds.launch import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
RECIPES = [*uniform_recipes(), "tests/cpp/hot.yaml"]


@pytest.mark.parametrize(("ranks", "flag"), [(1, "--mlps"), (1, "--remade"), (2, "")])
def test_both_executors_compute_the_same_bits(ranks: int, flag: str) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs another GPU")
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    launch = [*launch, f"--nproc-per-node={ranks}"] if ranks > 1 else launch[:3]
    script = str(ROOT / "testing/scripts/compare_executors.py")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [*launch, script, *RECIPES, *flag.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    # alone, two MLPs; or column- and row-parallel
    cases = {"--mlps": 3 * len(FORMS), "--remade": len(REMADE), "": 2 * len(FORMS)}
    assert len(found) == cases[flag] * len(RECIPES)
    for name, case in found.items():
        assert case["equal"] and not case["problems"], (name, case)
        assert case["in C++"] >= case["passes"] // 2, (name, case)


def test_the_layout_of_arguments_is_known_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = target_of(torch.device("cuda", 0))
    assert lowering.layout_problem.__wrapped__(gpu) is None
    monkeypatch.setattr(lowering, "scratch_pointers", lambda types, ptx: None)
    problem = lowering.layout_problem.__wrapped__(gpu)
    assert problem is not None and "lays out the arguments of kernels" in problem
