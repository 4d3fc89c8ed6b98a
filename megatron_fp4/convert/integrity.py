"""Verifies the files of a checkpoint against integrity.json, which has the SHA-256 of each."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from megatron_fp4.convert.output import Progress
from megatron_fp4.convert.torch_dist_writer import INTEGRITY
from megatron_fp4.errors import ConfigError

_STEP = 1 << 20  # bytes that are hashed at a time


def verify(path: Path, names: Iterable[str]) -> None:
    """Verifies the files `names` of the checkpoint in the folder `path`.

    A checkpoint without integrity.json is not verified, and a line says so. Raises ConfigError if a
    file is missing or has changed, and if integrity.json is damaged or lacks one of the files.
    """
    if not (path / INTEGRITY).exists():
        print(f"{path} has no {INTEGRITY}: its files are not verified", file=sys.stderr)
        return
    digests = _digests(path / INTEGRITY)
    if missing := [name for name in names if name not in digests]:
        raise ConfigError(f"{path / INTEGRITY} lacks {missing[0]}: --no-verify reads it as it is")
    files = [path / name for name in names]
    if absent := [file for file in files if not file.is_file()]:
        raise ConfigError(f"{path} is incomplete: {absent[0].name} is missing")
    progress = Progress(f"verifying {path}", sum(file.stat().st_size for file in files))
    for file in files:
        if _digest(file, progress) != digests[file.name]:
            raise ConfigError(
                f"{file} has changed since it was saved (by its SHA-256): take another copy, or "
                "--no-verify to read it as it is"
            )


def parsed(text: str) -> dict[str, str] | None:
    """The SHA-256 of each file by name, from the text of integrity.json; None if it is invalid."""
    try:
        manifest = json.loads(text)
        if manifest.get("algorithm", "sha256") != "sha256":
            return None
        return {str(name): str(digest) for name, digest in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _digests(file: Path) -> dict[str, str]:
    try:
        found = parsed(file.read_text(errors="replace"))
    except OSError:
        found = None
    if found is None:
        raise ConfigError(f"{file} is damaged: --no-verify reads the checkpoint without it")
    return found


def _digest(file: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while data := stream.read(_STEP):
                digest.update(data)
                progress.add(len(data))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
    return digest.hexdigest()
