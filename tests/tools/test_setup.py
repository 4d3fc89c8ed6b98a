"""The scripts between a fresh machine and a usable .venv, run against fake interpreters."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_python(path: Path, works: bool = True) -> Path:
    """An interpreter that answers the version check as a fitting (or another) Python would."""
    return write_script(path, f'echo "{path}"' if works else "echo not this one; exit 1")


def find_python(home: Path, *directories: Path) -> subprocess.CompletedProcess[str]:
    """Runs the script where nothing but these directories and what lies under home can be found."""
    path = ":".join(map(str, directories))
    command = ["/bin/sh", str(TOOLS / "find_python.sh")]
    environment = {"PATH": path, "HOME": str(home)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_failing_shim_is_skipped(tmp_path: Path) -> None:
    write_script(
        tmp_path / "shims/python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127"
    )
    good = fake_python(tmp_path / "usr bin/python3.12")
    found = find_python(tmp_path, tmp_path / "shims", good.parent)
    assert (found.stdout.strip(), found.stderr) == (str(good), "")


def test_pyenvs_versions_are_tried_after_path(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin/python3", works=False)
    good = fake_python(tmp_path / ".pyenv/versions/3.13.0/bin/python")
    found = find_python(tmp_path, tmp_path / "bin")
    assert found.stdout.strip() == str(good)


def test_uvs_pythons_are_tried(tmp_path: Path) -> None:
    name = "cpython-3.12.8-linux-x86_64-gnu/bin/python3"
    good = fake_python(tmp_path / ".local/share/uv/python" / name)
    assert find_python(tmp_path, tmp_path / "bin").stdout.strip() == str(good)


@pytest.mark.parametrize("present", [False, True], ids=["none", "old"])
def test_one_line_says_what_to_install(tmp_path: Path, present: bool) -> None:
    if present:
        fake_python(tmp_path / "bin/python3", works=False)
    found = find_python(tmp_path, tmp_path / "bin")
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert "install one (apt install python3.12-venv" in found.stderr


def test_the_check_knows_real_versions(tmp_path: Path) -> None:
    """The interpreter of this test is a fitting one, and is printed by its own path."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    found = find_python(tmp_path, tmp_path / "bin")
    assert found.returncode == 0
    version = subprocess.run([found.stdout.strip(), "-V"], capture_output=True, text=True)
    assert version.stdout.startswith(("Python 3.12", "Python 3.13"))


def allowed() -> list[str]:
    """The versions of Python that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"])
    assert bounds
    return [f"3.{minor}" for minor in range(*map(int, bounds.groups()))]


def test_all_places_name_the_versions_that_pyproject_allows(tmp_path: Path) -> None:
    text = " or ".join(allowed())
    assert f"Python {text} and nothing else" in (ROOT / "README.md").read_text()
    assert f"No working Python of {' '.join(allowed())} with" in find_python(tmp_path).stderr
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [c.rpartition(" ")[2] for c in classifiers if c.startswith("Programming Language")]
    assert named == allowed()


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_a_version_outside_the_bounds_is_passed_over(tmp_path: Path, minor: int) -> None:
    """By the check itself, which an interpreter runs that says it is of another version."""
    pretend = f"import sys; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])"
    python = write_script(tmp_path / "bin/python3", f'exec {sys.executable} -c "{pretend}" "$2"')
    found = find_python(tmp_path, python.parent)
    assert (found.returncode == 0) == (f"3.{minor}" in allowed())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of nothing but the scripts."""
    root = tmp_path / "checkout"
    for name in ("setup_venv.sh", "find_python.sh"):
        (root / "tools").mkdir(parents=True, exist_ok=True)
        shutil.copy(TOOLS / name, root / "tools")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def set_up(checkout: Path, path: str = "", venv: str = ".venv") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{path}:{os.defpath}", "HOME": str(checkout)}
    command = [str(checkout / "tools/setup_venv.sh"), f"{venv}/.installed", "pins.txt"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_failed_installation_leaves_no_stamp(checkout: Path) -> None:
    stamp = checkout / ".venv/.installed"
    write_script(checkout / ".venv/bin/python", 'test "$1" = -c')  # the check passes, pip fails
    stamp.touch()
    assert set_up(checkout).returncode != 0
    assert not stamp.exists()

    write_script(checkout / ".venv/bin/python", "exit 0")
    assert set_up(checkout).returncode == 0
    assert stamp.exists()


def test_a_venv_of_another_python_is_made_anew(checkout: Path, tmp_path: Path) -> None:
    write_script(checkout / ".venv/bin/python", "exit 1")
    record = tmp_path / "record"
    made = f'echo "$@" >> {record}; printf "#!/bin/sh\\n" > .venv/bin/python'
    write_script(tmp_path / "bin/python3.12", f'test "$1" = -c && echo "$0" || {{ {made}; }}')
    done = set_up(checkout, str(tmp_path / "bin"))
    assert done.returncode == 0, done.stderr
    assert record.read_text() == "-m venv --clear .venv\n"
    assert (checkout / ".venv/.installed").exists()


def test_another_environment_takes_its_own_pins(checkout: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    body = f'test "$1" = -c || echo "$PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT $@" >> {record}'
    write_script(checkout / ".venv-newest/bin/python", body)
    assert set_up(checkout, venv=".venv-newest").returncode == 0
    assert record.read_text().startswith("pins.txt pins.txt -m pip install")
    assert (checkout / ".venv-newest/.installed").exists()
    assert not (checkout / ".venv").exists()
