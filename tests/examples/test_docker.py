"""The image of examples/docker, which no test builds: it installs what its comments say."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
IMAGE = (ROOT / "examples/docker/Dockerfile").read_text()


def test_the_image_has_the_liger_kernel_that_pyproject_asks_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [wanted] = extras["optional-dependencies"]["liger"]
    assert re.findall("--no-deps '(liger-kernel.*)'", IMAGE) == [wanted]


def test_no_deps_leaves_out_torch_and_triton_alone() -> None:
    pytest.importorskip("liger_kernel")
    found = [Requirement(text) for text in requires("liger-kernel") or []]
    left_out = {each.name for each in found if not (each.marker and "extra" in str(each.marker))}
    assert left_out == {"torch", "triton"}
