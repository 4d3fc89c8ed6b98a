"""The wheel: built, installed and used away from the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from megatron_fp4 import __version__
from megatron_fp4.report.page import SCRIPTS
from testing.worlds.launch import MOCK_DATA, TINY

ROOT = Path(__file__).parents[1]
INFO = f"megatron_fp4-{__version__}.dist-info"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "megatron_fp4", source / "megatron_fp4")
    output = source / "dist"
    command: list[str | Path] = [
        *PIP,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        output,
        source,
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    [path] = output.glob("*.whl")
    return path


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{INFO}/METADATA").decode()


def environment(path: Path) -> Path:
    """A virtual environment without packages; returns its site-packages."""
    venv.create(path, symlinks=True)
    return path / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)


def install(python: Path, wheel: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """pip install of the wheel, from what is there and from no index."""
    command: list[str | Path] = [*PIP, "--python", python, "install", "--no-index", *options, wheel]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_wheel_has_the_licence_and_the_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        licence = archive.read(f"{INFO}/licenses/LICENSE").decode()
    assert "License-Expression: Apache-2.0" in metadata(wheel) and "Apache License" in licence
    assert "megatron_fp4/py.typed" in names
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("megatron_fp4/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("megatron_fp4/cpp/sources/*")}
    assert sources and sources <= set(names)
    for part in (*SCRIPTS, "page.html", "page.css"):
        assert f"megatron_fp4/report/{part}" in names


def claims(packages: Path, name: str, version: str) -> None:
    """Lets pip find this distribution there."""
    folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("container\n")


@pytest.mark.parametrize("triton", ["pytorch-triton", "triton"])
def test_a_container_s_torch_and_triton_stay(wheel: Path, tmp_path: Path, triton: str) -> None:
    packages, report = environment(tmp_path / "venv"), tmp_path / "report.json"
    python = tmp_path / "venv/bin/python"
    for name in re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata(wheel), re.M):
        if name not in ("torch", "triton"):
            claims(packages, name, importlib.metadata.version(name))
    claims(packages, triton, "3.5.0+container")
    options = ("--dry-run", "--report", report)
    # Negative control: a requirement that is not there would be installed.
    missing = install(python, wheel, *options)
    assert missing.returncode and "No matching distribution found for torch" in missing.stderr

    claims(packages, "torch", "2.9.0+container")
    done = install(python, wheel, *options)
    assert done.returncode == 0, done.stderr
    chosen = [entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]]
    assert chosen == ["megatron-fp4"]


@pytest.mark.slow
def test_the_wheel_is_used_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    packages = environment(tmp_path / "venv")
    programs = tmp_path / "venv/bin"
    assert install(programs / "python", wheel, "--no-deps").returncode == 0
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(shared) + "\n")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    place = "import megatron_fp4; print(megatron_fp4.__file__)"
    assert run(programs / "python", "-c", place).startswith(str(packages))
    assert run(programs / "megatron-fp4", "info").startswith(f"megatron-fp4 {__version__}, ")
    (tmp_path / "text.txt").write_text("\n".join(f"line {n} of {n * n}" for n in range(2000)))
    run(programs / "megatron-fp4-prepare-data", "text.txt", "--vocab-size", "280")
    assert {path.suffix for path in (tmp_path / "data").iterdir()} == {
        ".bin",
        ".idx",
        ".json",
        ".model",
    }
    model = ("--tokenizer-model", "data/tokenizer.model")
    assert "corpus is ready" in run(
        programs / "megatron-fp4-preprocess", "text.txt", *model, "--output", "corpus"
    )
    launcher = (programs / "python", "-m", "torch.distributed.run", "--standalone")
    flags = (*TINY, *MOCK_DATA, "--bf16", "--train-iters", "2", "--fp4-recipe", "tetrajet")
    trained = run(*launcher, "-m", "megatron_fp4.mcore.pretrain", *flags)
    assert "megatron-fp4: recipe tetrajet" in trained
    assert len(re.findall(r"lm loss: (\S+)", trained)) == 2
