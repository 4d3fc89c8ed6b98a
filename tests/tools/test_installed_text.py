"""The text of a study: every content once, and nothing of the machine in what is recorded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from megatron_fp4.mcore.data import prepare_data
from tools import installed_text as text

SOURCE = """def quantity_{0}(weights, block, scales):
    \"\"\"Returns the sums of quantized products, with their exponents, for part {0}.\"\"\"
    numbers = [max(abs(weight) for weight in weights[place : place + block]) for place in scales]
    raise KeyError("nothing jumps") if not numbers else None
"""


def tree(root: Path) -> tuple[Path, Path]:
    """Two installations, whose packages have files in common."""
    for folder in ("lib/site-packages", "lib/json", "lib/__pycache__", "packages/one/docs"):
        (root / folder).mkdir(parents=True)
    for i in range(12):
        (root / f"lib/json/part{i}.py").write_text(SOURCE.format(i))
        (root / f"packages/one/part{i}.py").write_text(SOURCE.format(i))  # a copy
    (root / "packages/one/docs/guide.rst").write_text("A guide\n=======\n\nto the package\n")
    (root / "packages/one/NEWS.md").write_text("News, new and old\n")
    (root / "packages/one/table.txt").write_text("1 2 3\n" * 200_000)
    (root / "packages/one/data.bin").write_bytes(b"\0")
    (root / "packages/one/latin.py").write_bytes(b"# \xe9\n")
    (root / "packages/one/empty.py").write_text("\n")
    (root / "packages/one/gone.py").symlink_to(root / "nowhere.py")
    (root / "lib/site-packages/other.py").write_text("not_read = True\n")
    (root / "lib/__pycache__/old.py").write_text("not_read = False\n")
    return root / "lib", root / "packages"


def test_every_content_is_there_once(tmp_path: Path) -> None:
    found = list(text.documents(tree(tmp_path)))
    assert len(found) == 12 + 2
    assert {hashlib.sha256(each.text.encode()).hexdigest() for each in found} == {
        each.key for each in found
    }
    assert not any("not_read" in each.text for each in found)


def test_where_it_is_installed_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files under other folders, in another order: the same data and the same hash."""
    made, options = [], text.Text(1, 320, 0.2)
    for name, order in (("a", 1), ("b", -1)):
        roots = list(tree(tmp_path / name))[::order]
        monkeypatch.setattr(text, "roots", lambda roots=roots: roots)
        made.append(text.described(text.prepare(options, tmp_path / f"data-{name}")))
    assert made[0] == made[1]
    assert str(tmp_path) not in json.dumps(made) and "part1" not in json.dumps(made)
    files = [(tmp_path / f"data-{name}/train_text_document.bin").read_bytes() for name in "ab"]
    assert files[0] == files[1]
    held_out = made[0]["held_out"]
    assert held_out["documents"] == 3 and made[0]["train"]["documents"] == 11


def test_other_text_has_another_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = tree(tmp_path / "a")
    monkeypatch.setattr(text, "roots", lambda: roots)
    before = text.described(text.prepare(text.Text(1, 320, 0.2), tmp_path / "data"))
    (roots[1] / "one/NEWS.md").write_text("Other news\n")
    after = text.described(text.prepare(text.Text(1, 320, 0.2), tmp_path / "data"))
    assert before["sha256"] != after["sha256"]


def test_text_that_cannot_be_written_is_not_read(tmp_path: Path) -> None:
    def documents() -> object:
        raise AssertionError("it was read")
        yield

    (tmp_path / "file").write_text("")
    with pytest.raises(prepare_data.DataError, match="not a folder"):
        prepare_data.prepare_documents(
            documents(),  # type: ignore[arg-type]
            "a test",
            tmp_path / "file",
            prepare_data.Options(),
        )
