"""patches/apply.py on checkouts of all sorts: its places, its second call, its way back."""

import io
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import megatron.core
import pytest

from patches.apply import main
from testing.worlds.launch import ROOT

CORE = '"""A checkout\'s core."""\n\nfrom __future__ import annotations\n\nimport sys\n'
TRAINING = "from .global_vars import get_args\nfrom .training import get_model, pretrain\n"


def checkout(folder: Path, core: str = CORE, training: str = TRAINING, patch: str = "0") -> Path:
    for name, source in (("core", core), ("training", training)):
        (folder / "megatron" / name).mkdir(parents=True)
        (folder / "megatron" / name / "__init__.py").write_bytes(source.encode())
    (folder / "megatron" / "core" / "package_info.py").write_text(
        f"MAJOR = 0\nMINOR = 19\nPATCH = {patch}\nPRE_RELEASE = ''\n"
    )
    return folder


def apply(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs patches/apply.py in this process, without a terminal."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setattr(sys, "argv", ["apply.py", str(folder), *flags])
        patch.setattr(sys, "stdin", io.StringIO())
        try:
            main()
        except SystemExit as ended:
            status = 1
            print(ended.code, file=err)
    return subprocess.CompletedProcess([], status, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize(
    ("core", "training"),
    [
        (CORE, TRAINING),
        (CORE.rstrip("\n"), TRAINING.rstrip("\n")),
        (CORE.replace("\n", "\r\n"), TRAINING.replace("\n", "\r\n")),
        ("# A comment.\nimport os, sys\n", f"x = 1\n{TRAINING}y = (\n    2\n)  # the end\n\n\n"),
        (f"x = '\x0c'\n{CORE.splitlines()[-1]}\n", f"x = '\x0b\u2028'\n{TRAINING}y = 1\n"),
        ("import os; import sys", TRAINING.replace("get_model, pretrain", "(\n    pretrain,\n)")),
    ],
    ids=["plain", "no last line ending", "CRLF", "comments", "form feed", "on one line"],
)
def test_it_goes_in_once_and_out_without_a_trace(core: str, training: str, tmp_path: Path) -> None:
    folder = checkout(tmp_path, core, training)
    before = contents(folder)
    assert apply(folder, "--dry-run").stdout.count("+_megatron_fp4()") == 2
    refused = apply(folder)
    assert refused.returncode == 1 and "add --yes" in refused.stderr
    assert contents(folder) == before
    assert apply(folder, "--yes").returncode == 0
    inside = contents(folder)
    assert "nothing to do: the plugin is in" in apply(folder, "--yes").stdout
    assert contents(folder) == inside
    first, second = (inside[str(folder / "megatron" / name)].decode() for name in FILES)
    assert first.index("before_megatron") < first.index("sys") and compiles(first)
    assert second.index("in_megatron") > second.index("pretrain") and compiles(second)
    assert apply(folder, "--revert", "--yes").returncode == 0
    assert contents(folder) == before
    assert "nothing to do: the plugin is not in" in apply(folder, "--revert").stdout


FILES = ("core/__init__.py", "training/__init__.py")


def compiles(source: str) -> bool:
    return compile(source, "checkout", "exec") is not None


def test_lines_of_an_earlier_version_are_replaced(tmp_path: Path) -> None:
    folder = checkout(tmp_path)
    before = contents(folder)
    apply(folder, "--yes")
    file = folder / "megatron" / FILES[0]
    file.write_text(file.read_text().replace("before_megatron", "an_older_name"))
    assert (
        "-from megatron_fp4.mcore.permanent import an_older_name" in apply(folder, "--yes").stdout
    )
    assert file.read_text().count("before_megatron") == 1
    apply(folder, "--yes", "--revert")
    assert contents(folder) == before


def test_what_it_does_not_know_is_refused_by_its_name(tmp_path: Path) -> None:
    unknown = apply(checkout(tmp_path / "a", patch="7"), "--yes")
    assert unknown.returncode == 1 and "is Megatron-core 0.19.7: it is unknown" in unknown.stderr
    other = apply(checkout(tmp_path / "b", training="from .global_vars import get_args\n"), "--yes")
    assert "training/__init__.py is not as Megatron-core 0.19.0 has it: it does not import" in (
        other.stderr
    )
    latin = checkout(tmp_path / "d")
    (latin / "megatron" / FILES[0]).write_bytes("# caf\xe9\nimport os\n".encode("latin-1"))
    coded = apply(latin, "--yes")
    assert coded.returncode == 1 and "core/__init__.py is not as Megatron-core" in coded.stderr
    nothing = apply(tmp_path / "c", "--yes")
    assert nothing.returncode == 1 and "package_info.py cannot be read" in nothing.stderr
    assert all(ended.stderr.count("\n") == 1 for ended in (unknown, other, coded, nothing))


@pytest.mark.parametrize("flags", [("--yes",), ("--yes", "--revert")], ids=["in", "out"])
def test_a_checkout_that_cannot_be_written_stays_as_it_is(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two files fails, as in a read-only folder; root could write there."""
    folder = checkout(tmp_path)
    if "--revert" in flags:
        apply(folder, "--yes")
    before = contents(folder)
    write_bytes = Path.write_bytes

    def write(path: Path, data: bytes) -> int:
        if path.parent.name == "training":
            raise PermissionError(13, "Permission denied", str(path))
        return write_bytes(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write)
        refused = apply(folder, *flags)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "Permission denied" in refused.stderr and "make it writable" in refused.stderr
    assert contents(folder) == before
    assert apply(folder, *flags).returncode == 0
    assert contents(folder) != before


def test_the_installed_release_has_its_places(tmp_path: Path) -> None:
    installed = Path(megatron.core.__file__).parents[1]
    for name in (*FILES, "core/package_info.py"):
        (tmp_path / "megatron" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / name, tmp_path / "megatron" / name)
    before = contents(tmp_path)
    assert "changed 2 files" in apply(tmp_path, "--yes").stdout
    apply(tmp_path, "--yes", "--revert")
    assert contents(tmp_path) == before


def test_the_command_itself(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "patches" / "apply.py"), str(checkout(tmp_path)), "--yes"]
    ended = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "changed 2 files: the plugin is in" in ended.stdout
