"""A small corpus, and the preprocessing command on it, in this process."""

import gzip
from pathlib import Path

import pytest

from megatron_fp4.mcore.data.preprocess import main
from testing.builders.corpus import texts, write_lines

TRAIN, VALID = "train_text_document", "valid_text_document"
TEXTS = texts(200)


def files(output: Path, part: str = TRAIN) -> tuple[bytes, bytes]:
    return (output / f"{part}.bin").read_bytes(), (output / f"{part}.idx").read_bytes()


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def failure(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The line for the user of a command that fails."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("preprocess: ")
    return said.strip()


def write_zst(path: Path, content: bytes) -> None:
    zstandard = pytest.importorskip("zstandard")
    half = content.find(b"\n", len(content) // 2) - 5  # within a line
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(content[:half]) + compress(content[half:]))


def write_corpus(folder: Path, kind: str) -> list[Path]:
    """TEXTS in two files."""
    folder.mkdir()
    paths = []
    for index, documents in enumerate((TEXTS[:120], TEXTS[120:])):
        path = write_lines(folder / f"{index}.jsonl", documents)
        content = path.read_bytes()
        if kind == "parquet":
            table = pytest.importorskip("pyarrow").table(
                {"id": range(len(documents)), "text": documents}
            )
            path = folder / f"{index}.parquet"
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
        elif kind == "gz":
            path = folder / f"{index}.jsonl.gz"
            path.write_bytes(gzip.compress(content[:999]) + gzip.compress(content[999:]))
        elif kind == "zst":
            path = folder / f"{index}.jsonl.zst"
            write_zst(path, content)
        elif kind == "crlf":
            path.write_bytes(b"\xef\xbb\xbf\n" + content.replace(b"\n", b"\r\n\n")[:-3])
        paths.append(path)
    return paths
