"""Writes and verifies integrity.json, which contains the SHA-256 of every file of a checkpoint.

The file has the format of Megatron's --verify-integrity (C/dist_checkpointing/validation.py), so
Megatron can verify it, and Megatron's file is verified here. In Megatron rank 0 hashes all files.
Here each rank hashes a share of them, and checkpoints of --ckpt-format torch have the file too.

C stands for megatron/core.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.core.dist_checkpointing.validation import _HASH_ALGORITHM, INTEGRITY_FNAME

from megatron_fp4.convert.integrity import parsed
from megatron_fp4.mcore.runtime.ranks import my_share, on_all, on_first

THREADS = 4  # files that a rank hashes at the same time; hashlib releases the GIL


def write(path: Path) -> None:
    """Hashes all files of the checkpoint in folder `path`, and writes integrity.json there.

    All ranks must call it, after all files are written. Raises OSError, on all ranks, if a file
    cannot be read or integrity.json cannot be written.
    """
    names = on_first(lambda: _files(path))
    shares = on_all(lambda: _each(lambda name: (name, hash_of_file(path / name)), my_share(names)))
    digests = dict(pair for share in shares for pair in share)
    on_first(lambda: _put(path, {name: digests[name] for name in names}))


def is_covered(path: Path) -> bool:
    """Whether the checkpoint in folder `path` has an integrity.json. All ranks must call it."""
    return on_first((path / INTEGRITY_FNAME).is_file)


def flaw_of(path: Path) -> str | None:
    """Which files of a checkpoint are missing or changed, as text; None if all are as saved.

    path: the folder of the checkpoint, which has an integrity.json. All ranks must call it, and all
    get the same result.
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
    """The results of `function` for each of `names`, in their order; runs on THREADS threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, names))


def _flaw(path: Path, name: str, digest: str) -> str | None:
    try:
        same = hash_of_file(path / name) == digest
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if same else f"{name} has changed since it was saved (by its SHA-256)"


def _digests(path: Path) -> dict[str, str] | None:
    """The SHA-256 of each file by name, from integrity.json; None if its content is invalid."""
    return parsed((path / INTEGRITY_FNAME).read_text(errors="replace"))


def _put(path: Path, digests: dict[str, str]) -> None:
    """Writes integrity.json.

    The file is written under another name and then renamed, so that an interrupted process leaves
    either a complete file or none.
    """
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
    # Sorted by number, rank r gets the file that it has written, __r_0.distcp, which is still in
    # the page cache of its host. Files without a number are small and come last.
    numbers = [int(number) for number in re.findall(r"\d+", name)]
    return not numbers, numbers, name


def hash_of_file(file: Path) -> str:
    """The digest of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, _HASH_ALGORITHM).hexdigest()
