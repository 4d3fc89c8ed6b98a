"""The record beside prepared data: what it was made of, and which files belong to it."""

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "manifest.json"
# The datasets' prefixes, and what the manifest calls each.
PARTS = {"train_text_document": "train", "valid_text_document": "held_out"}
OUTPUTS = [NAME, "tokenizer.model", *(f"{part}.{ext}" for part in PARTS for ext in ("bin", "idx"))]
_KEYS = {"fingerprint", "options", "tokenizer_sha256", "train", "held_out"}


class DamagedManifest(ValueError):
    """A manifest that cannot be read; the message names it, and why."""


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest in this folder; None if there is none, or one that is not of this project."""
    try:
        found = json.loads((folder / NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.keys() >= _KEYS else None


def recorded(prefix: str) -> tuple[str, int] | None:
    """The SHA-256 of the tokenizer, and the number of tokens, that the manifest beside a dataset
    records of it; None where this project has recorded none. Raises DamagedManifest."""
    part, path = PARTS.get(Path(prefix).name), Path(prefix).with_name(NAME)
    if part is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
        if "tokenizer_sha256" not in found:
            return None  # another program's
        return str(found["tokenizer_sha256"]), int(found[part]["tokens"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise DamagedManifest(f"{path} cannot be read ({error})") from error


def describes(found: dict[str, Any], folder: Path) -> bool:
    """Whether the folder's files are still those that the manifest was written for: all there, of
    the same sizes, with the same tokenizer."""
    try:
        is_now = (sha256_of(folder / "tokenizer.model"), sizes(folder))
        return (found["tokenizer_sha256"], found.get("files")) == is_now
    except OSError:
        return False


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits. Raises OSError."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sizes(folder: Path) -> dict[str, int]:
    """The bytes of each file of prepared data, the manifest left out. Raises OSError."""
    return {name: (folder / name).stat().st_size for name in OUTPUTS if name != NAME}


def write(folder: Path, content: dict[str, Any]) -> None:
    """Writes the manifest under another name and renames it, so that a kill leaves a whole one or
    none."""
    partial = folder / f".{NAME}"
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(folder / NAME)


def outputs_in(folder: Path) -> set[str]:
    """The names of prepared data in this folder, with Megatron's folders of indices beside it;
    empty without a manifest."""
    return {*OUTPUTS, *PARTS} if (folder / NAME).exists() and read(folder) else set()
