"""Whether the files of a checkpoint are still what was saved: integrity.json has their SHA-256.

The file is Megatron's own (C/dist_checkpointing/validation.py, --verify-integrity), and each reads
the other's. Megatron's rank 0 hashes all files alone; here each rank hashes its share, and a
checkpoint of the format torch has the file too.

C stands for megatron/core.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.validation import _HASH_ALGORITHM, INTEGRITY_FNAME

from megatron_fp4.mcore.runtime.ranks import my_share, on_all, on_first

THREADS = 4  # of a rank, each hashing a file; hashlib lets them run at once


def write(path: Path) -> None:
    """Hashes the files of the checkpoint `path`, and writes integrity.json when all are hashed.

    All ranks must call it, after all files are written. Raises OSError on all ranks.
    """
    names = on_first(lambda: _files(path))
    shares = on_all(lambda: _each(lambda name: (name, _hash(path / name)), my_share(names)))
    digests = dict(pair for share in shares for pair in share)
    on_first(lambda: _put(path, {name: digests[name] for name in names}))


def is_covered(path: Path) -> bool:
    """Whether the checkpoint `path` has an integrity.json. All ranks must call it."""
    return on_first((path / INTEGRITY_FNAME).is_file)


def flaw_of(path: Path) -> str | None:
    """Which files of the checkpoint `path` are not what its integrity.json says; None if all are.

    All ranks must call it, and get the same.
    """
    try:
        digests = on_first(lambda: _digests(path))
    except OSError as error:
        return f"{INTEGRITY_FNAME} cannot be read ({error.strerror})"
    if digests is None:
        return f"{INTEGRITY_FNAME} is damaged"
    names = my_share(sorted(digests, key=_order))
    shares = on_all(lambda: _each(lambda name: _flaw(path, name, digests[name]), names))
    flaws = [flaw for share in shares for flaw in share if flaw is not None]
    more = f", and {len(flaws) - 1} more files" if len(flaws) > 1 else ""
    return f"{flaws[0]}{more}" if flaws else None


def _each[T](function: Callable[[str], T], names: Iterable[str]) -> list[T]:
    """function(name) of each name, in their order, on THREADS threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, names))


def _flaw(path: Path, name: str, digest: str) -> str | None:
    try:
        same = _hash(path / name) == digest
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if same else f"{name} has changed since it was saved (by its SHA-256)"


def _digests(path: Path) -> dict[str, str] | None:
    """The digest of each file by its name; None if the manifest cannot be made sense of."""
    text = (path / INTEGRITY_FNAME).read_text(errors="replace")
    try:
        manifest: Any = json.loads(text)
        files = manifest["files"]
        if manifest.get("algorithm", _HASH_ALGORITHM) != _HASH_ALGORITHM:
            return None
        return {str(name): str(digest) for name, digest in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _put(path: Path, digests: dict[str, str]) -> None:
    """Writes the manifest under another name first: a kill leaves a whole one or none."""
    partial = path / f".{INTEGRITY_FNAME}.partial"
    with partial.open("w") as file:
        json.dump({"algorithm": _HASH_ALGORITHM, "files": digests}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path / INTEGRITY_FNAME)


def _files(path: Path) -> list[str]:
    names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    return sorted((name for name in names if INTEGRITY_FNAME not in name), key=_order)


def _order(name: str) -> tuple[bool, list[int], str]:
    # Rank r writes __r_0.distcp and reads its own file, which is still in its host's memory; those
    # without a number are small and come last.
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    return not numbers, numbers, name


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, _HASH_ALGORITHM).hexdigest()
