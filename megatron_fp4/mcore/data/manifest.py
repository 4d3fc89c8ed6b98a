"""manifest.json beside prepared data: what the data were made from, and which files belong to them.

prepare_data.py and preprocess.py write it. A launch reads it to see that its tokenizer is the one
of the data.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

NAME = "manifest.json"
# The name of each dataset, and its side: the manifest's key for it.
DATASETS = {"train_text_document": "train", "valid_text_document": "held_out"}
OUTPUTS = [
    NAME,
    "tokenizer.model",
    *(f"{each}.{ext}" for each in DATASETS for ext in ("bin", "idx")),
]
LEFT_OUT = "left_out.txt"  # the lines and files that preprocess.py could not use
PREPROCESS = "preprocess"  # the value of the manifest's key "command" in manifests of preprocess.py
_KEYS = {"fingerprint", "options", "tokenizer_sha256", "train", "held_out"}


class DamagedManifest(ValueError):
    """A manifest cannot be read. The message has its path and the reason."""


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest in `folder`; None if there is none, or if another program wrote it."""
    try:
        found = json.loads((folder / NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.keys() >= _KEYS else None


class Record(NamedTuple):
    """What a manifest tells of a dataset. tokenizer_sha256: of its tokenizer. tokens: how many."""

    tokenizer_sha256: str
    tokens: int


def recorded(prefix: str) -> Record | None:
    """What the manifest beside a dataset tells of it; None if none of this package is there.

    Raises DamagedManifest if there is one that cannot be read.
    """
    side, path = DATASETS.get(Path(prefix).name), Path(prefix).with_name(NAME)
    if side is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
        if "tokenizer_sha256" not in found:
            return None  # another program wrote it
        return Record(str(found["tokenizer_sha256"]), int(found[side]["tokens"]))
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise DamagedManifest(f"{path} cannot be read ({error})") from error


def tokenizer_flags(prefix: str) -> str | None:
    """The flags of a launch for the tokenizer of a dataset, as preprocess.py recorded them.

    None if its manifest records no path of the tokenizer.
    """
    found = (read(Path(prefix).parent) or {}).get("tokenizer")
    if not isinstance(found, dict) or not {"type", "model"} <= found.keys():
        return None
    return f"--tokenizer-type {found['type']} --tokenizer-model {found['model']}"


def describes(found: dict[str, Any], folder: Path) -> bool:
    """Whether the files in `folder` are still those that the manifest `found` describes.

    Compares the size of every file, and the SHA-256 of the tokenizer if it is one of them.
    """
    files = found.get("files") or {}
    try:
        if not files or sizes(folder, files) != files:
            return False
        tokenizer = folder / "tokenizer.model"
        return tokenizer.name not in files or sha256_of(tokenizer) == found["tokenizer_sha256"]
    except OSError:
        return False


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's content, as hexadecimal digits. Raises OSError."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """The size in bytes of each file in `folder`, by name. Raises OSError if one is missing."""
    return {name: (folder / name).stat().st_size for name in names}


def write(folder: Path, content: dict[str, Any]) -> None:
    """Writes `content` as the manifest of `folder`.

    The file is written under another name and then renamed, so that an interrupted process leaves
    either a complete manifest or none.
    """
    partial = folder / f".{NAME}"
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(folder / NAME)


def outputs_in(folder: Path) -> set[str]:
    """The names in `folder` that belong to prepared data; empty if it has no manifest.

    They include the folders in which Megatron caches its shuffled indices.
    """
    return {*OUTPUTS, LEFT_OUT, *DATASETS} if (folder / NAME).exists() and read(folder) else set()
