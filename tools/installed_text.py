"""Text that lies on an ordinary machine: sources and documentation of Python and its packages.

Every file is read once, however often it is installed, and is either trained on or held out. What
is recorded names no file, only hashes and amounts.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fp4.mcore.data import prepare_data
from megatron_fp4.mcore.data.folders import Unusable
from megatron_fp4.mcore.data.text import Document, whole_text

SUFFIXES = {".py", ".md", ".rst", ".txt"}
LARGEST_FILE = 1_000_000  # bytes; larger files are mostly generated tables
NOT_READ = {"__pycache__", "site-packages", "dist-packages"}  # below a root
ORIGIN = "sources and documentation of Python and its installed packages, each file once"


@dataclass(frozen=True)
class Text:
    """How much text, and how it is prepared.

    megabytes: about how many millions of bytes are used, at most all that is installed. vocabulary:
    tokens of the tokenizer. held_out_share: the share of the files that are held out.
    """

    megabytes: float
    vocabulary: int
    held_out_share: float = 0.05

    @property
    def options(self) -> prepare_data.Options:
        """The options of prepare_data. Raises DataError for values out of range."""
        size = round(self.megabytes * 1e6)
        return prepare_data.Options(self.vocabulary, self.held_out_share, size)


def roots() -> list[Path]:
    """The folders of Python's standard library and of the installed packages."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def documents(folders: Iterable[Path]) -> Iterator[Document]:
    """The text files under `folders`, each content once; its key is the SHA-256 of the content.

    Files that are blank, larger than LARGEST_FILE or not UTF-8 are left out.
    """
    seen: set[str] = set()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix not in SUFFIXES or not NOT_READ.isdisjoint(
                path.relative_to(folder).parts
            ):
                continue
            text = _text(path)
            key = hashlib.sha256(text.encode()).hexdigest()
            if text.strip() and key not in seen:
                seen.add(key)
                yield Document(key, text)


def _text(path: Path) -> str:
    """The content of a file; empty if it is not used."""
    try:
        return whole_text(path) if path.stat().st_size <= LARGEST_FILE else ""
    except (OSError, Unusable):  # a broken link, another encoding
        return ""


def prepare(text: Text, output: Path) -> dict[str, Any]:
    """Writes the tokenizer and both datasets to `output`, if they are not there; the manifest."""
    return prepare_data.prepare_documents(documents(roots()), ORIGIN, output, text.options)


def described(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a result records of its text: hashes and amounts, with no path.

    sha256: of all documents and the options.
    """
    amounts = {part: manifest[part] for part in ("train", "held_out")}
    return {
        "source": manifest["source"],
        "sha256": manifest["fingerprint"],
        "tokenizer_sha256": manifest["tokenizer_sha256"],
        "vocabulary": manifest["options"]["vocab_size"],
        **amounts,
    }
