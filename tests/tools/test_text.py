"""Which files are read as text, and what is said of the others."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from megatron_fp4.mcore.data import text
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.folders import LeftOut
from megatron_fp4.mcore.data.text import Document, library_documents


def documents_at(path: Path, json_key: str = "text") -> list[Document]:
    return list(text.documents_at(path, json_key, LeftOut()))


def left_out(path: Path) -> list[str]:
    found = LeftOut()
    list(text.documents_at(path, "text", found))
    return found.lines()


def folder(root: Path) -> Path:
    """One file of text, and one or more of everything that is none."""
    (root / "inner").mkdir(parents=True)
    (root / "text.txt").write_text("text")
    (root / "latin.txt").write_bytes("é".encode("latin-1"))
    (root / "utf16.txt").write_text("hello", encoding="utf-16")
    (root / "picture.bin").write_bytes(b"\x89PNG\r\n\0\0\xff")
    (root / "archive.tar").write_bytes(b"name\0\0\0\0text")
    (root / "blank.txt").write_text(" \n")
    (root / "empty.jsonl").touch()
    (root / "some.jsonl").write_text('{"text": "a"}\n\n{"text": " "}\n')
    (root / ".hidden").mkdir()
    (root / ".hidden" / "secret.txt").write_text("hidden")
    (root / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(100))[:50])
    (root / "other.gz").write_bytes(b"text")
    (root / "nowhere").symlink_to("missing")
    (root / "loop").symlink_to("loop")
    (root / "inner" / "up").symlink_to("..")
    os.mkfifo(root / "pipe")
    return root


def test_what_is_left_out_of_a_folder_is_told_by_reason(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "marked.txt").write_text("marked", encoding="utf-8-sig")
    (root / "only_mark.txt").write_text("", encoding="utf-8-sig")
    texts = sorted(document.text for document in documents_at(root))
    assert texts == ["a", "marked", "text"]  # without the byte order mark
    said = {line.split(", ", 1)[1].split(" (")[0].split(":")[0]: line for line in left_out(root)}
    assert "left out 1, hidden: .hidden" == said["hidden"]
    assert "left out 4, blank: blank.txt, empty.jsonl, only_mark.txt" in said["blank"]
    assert "left out 2, not UTF-8 text" in said["not UTF-8 text"]
    assert said["not UTF-8 text"].endswith("latin.txt, utf16.txt")
    assert "left out 2, binary" in said["binary, with zero bytes"]
    assert said["binary, with zero bytes"].endswith("archive.tar, picture.bin")
    assert said["not readable"].startswith("left out 4, not readable: cut.txt.gz (Compressed file")
    assert said["not readable"].endswith(" and 1 more")  # the names of three are enough
    assert said["neither a file nor a folder"].endswith(": pipe")
    assert said["a link to a folder"].endswith(": inner/up")
    assert len(said) == 7


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("latin.txt", "not UTF-8 text"),
        ("utf16.txt", "not UTF-8 text"),
        ("picture.bin", "binary"),
        ("archive.tar", "binary"),
        ("cut.txt.gz", "not readable: Compressed file ended"),
        ("other.gz", "not readable: Not a gzipped file"),
        ("nowhere", "not readable: No such file or directory"),
        ("missing", "not readable: No such file or directory"),
        ("loop", "not readable: Too many levels of symbolic links"),
        ("text.txt/more", "not readable: Not a directory"),
        ("x" * 300, "not readable: File name too long"),
        ("pipe", "neither a file nor a folder"),
    ],
)
def test_a_path_given_by_name_is_an_error_instead(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{name}: {reason}"):
        documents_at(folder(tmp_path / "folder") / name)


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    file = tmp_path / "text.txt"
    file.write_text("text")
    monkeypatch.setattr("builtins.open", refuse)  # root may read everything
    assert left_out(tmp_path) == ["left out 1, not readable: text.txt (Permission denied)"]
    with pytest.raises(DataError, match="text.txt: not readable: Permission denied"):
        documents_at(file)
    monkeypatch.setattr("os.scandir", refuse)
    assert left_out(tmp_path) == ["left out 1, not readable: . (Permission denied)"]


def test_packed_files_are_read_as_what_they_hold(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": word}) + "\r\n" for word in "ab")
    for name, content in (
        ("some.txt.gz", "whole\r\n"),
        ("more.GZ", "as well"),
        ("some.jsonl.gz", lines),
        ("some.json.gz", "\ufeff" + lines),
        ("settings.json.gz", "[]"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    texts = sorted(document.text for document in documents_at(tmp_path))
    assert texts == ["[]", "a", "a", "as well", "b", "b", "whole\r\n"]
    assert left_out(tmp_path) == []
    with pytest.raises(DataError, match="settings.json.gz is not JSON lines"):
        documents_at(tmp_path / "settings.json.gz")


@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_line_of_a_folders_json_lines_is_named(packed: bool, tmp_path: Path) -> None:
    content = b'{"text": "fine"}\n\n{"text": "caf\xe9"}\n{"text": "fine"}\n'
    file = tmp_path / ("some.jsonl.gz" if packed else "some.jsonl")
    file.write_bytes(gzip.compress(content) if packed else content)
    for path in (tmp_path, file):
        with pytest.raises(DataError, match=r"some.jsonl\S*:3: not UTF-8: byte 0xe9 after 13 char"):
            documents_at(path)


@pytest.mark.parametrize("name", ["text.jsonl", "text.json", "text.JSONL", "text.Json"])
def test_json_lines_go_by_their_extension(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b'\xef\xbb\xbf\n{"text": "a"}\r\n{"text": "b"}')  # a mark at the start
    for path in (file, tmp_path):
        assert sorted(document.text for document in documents_at(path)) == ["a", "b"]


def test_another_kind_of_json_is_text_in_a_directory_and_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    for content in ('{\n  "text": "a"\n}\n', '[{"text": "a"}]\n', ""):
        file.write_text(content)
        assert documents_at(tmp_path) == [Document("settings.json", content)][: bool(content)]
        with pytest.raises(DataError, match='settings.json is not JSON lines.*{"text": "..."}'):
            documents_at(file)


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "a\\ud800b"}\n')
    assert [document.text for document in documents_at(file)] == ["a?b"]


def test_the_default_text_is_the_standard_library_without_its_tests() -> None:
    keys = [document.key for document in library_documents()]
    assert "argparse.py" in keys and "json/decoder.py" in keys and len(keys) > 300
    assert not any("/test" in f"/{key}" or "site-packages" in key for key in keys)


def test_zst_and_parquet_are_read_as_what_they_hold(tmp_path: Path) -> None:
    zstandard, parquet = pytest.importorskip("zstandard"), pytest.importorskip("pyarrow.parquet")
    frames = [json.dumps({"text": word}).encode() + b"\n" for word in "ab"]
    packed = b"".join(map(zstandard.ZstdCompressor().compress, frames))  # two frames
    (tmp_path / "some.jsonl.zst").write_bytes(packed)
    (tmp_path / "some.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(b"whole"))
    table = pytest.importorskip("pyarrow").table({"text": ["c", " ", "d"], "id": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "some.parquet", row_group_size=2)
    assert sorted(it.text for it in documents_at(tmp_path)) == ["a", "b", "c", "d", "whole"]
    assert left_out(tmp_path) == ["left out 1, blank: some.parquet:2"]
    with pytest.raises(DataError, match='no column "body": name one of text, id by --json-key'):
        documents_at(tmp_path / "some.parquet", "body")

    in_latin_1 = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.parquet"))
    (tmp_path / "some.parquet").rename(in_latin_1)
    assert [it.text for it in documents_at(in_latin_1)] == ["c", "d"]
    in_latin_1.rename(tmp_path / "some.parquet")

    for name in ("some.jsonl.zst", "some.parquet"):
        cut = tmp_path / f"cut.{name}"
        cut.write_bytes((tmp_path / name).read_bytes()[:-7])
        with pytest.raises(DataError, match=f"{cut.name}: not readable: "):
            documents_at(cut)


@pytest.mark.parametrize(
    ("name", "package"), [("some.jsonl.zst", "zstandard"), ("some.parquet", "pyarrow")]
)
def test_a_missing_package_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"anything")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=f"package {package}.*: pip install {package}"):
            documents_at(path)
