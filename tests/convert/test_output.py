"""The target of a command that writes: replaced when it is complete, else left as it was."""

from pathlib import Path
from typing import Any

import pytest

from megatron_fp4.convert.output import check_target, complete_folder
from megatron_fp4.errors import ConfigError


def replaced(target: Path) -> None:
    check_target(target, force=True)
    with complete_folder(target) as folder:
        (folder / "new").write_text("")


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "old").write_text("")
    return tmp_path / "to"


def test_what_a_killed_process_left_is_not_in_the_way(target: Path) -> None:
    for word in ("replaced", "partial"):
        folder = target.with_name(f"to.{word}")
        folder.mkdir()
        (folder / "left").write_text("")
    replaced(target)
    assert names(target.parent) == ["to", "to/new"]


def test_what_is_replaced_comes_back_if_the_new_folder_cannot_take_its_place(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def failing(self: Path, to: Any) -> Path:
        if self.name == "to.partial":
            raise OSError("the disk is gone")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ConfigError, match="to cannot be written: the disk is gone"):
        replaced(target)
    assert names(target.parent) == ["to", "to/old"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "to").write_text("mine")
    with pytest.raises(ConfigError, match="to is not a folder: give another --output"):
        replaced(tmp_path / "to")
    assert names(tmp_path) == ["to"]


def test_a_folder_that_cannot_be_made_is_one_line(target: Path) -> None:
    target.with_name("to.partial").write_text("mine")
    with pytest.raises(ConfigError, match=r"to\.partial cannot be made \(File exists\)"):
        replaced(target)
    assert names(target.parent) == ["to", "to.partial", "to/old"]


def test_the_folder_that_the_process_is_in(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(target)
    replaced(Path("."))
    assert names(target.parent) == ["to", "to/new"]


def test_what_a_link_names_is_replaced_where_it_is(target: Path) -> None:
    link = target.with_name("link")
    link.symlink_to("to")
    replaced(link)
    assert names(target.parent) == ["link", "to", "to/new"] and link.is_symlink()
