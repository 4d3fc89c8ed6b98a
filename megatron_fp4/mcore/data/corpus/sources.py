"""The files of a corpus, in the order in which they are read."""

import os
from collections.abc import Callable
from pathlib import Path

from megatron_fp4.mcore.data.corpus.blocks import SourceFile
from megatron_fp4.mcore.data.errors import DataError
from megatron_fp4.mcore.data.folders import LeftOut, Unusable, check_regular, files, shown
from megatron_fp4.mcore.data.text import check_named, kind_of


def sources_of(paths: list[Path], json_key: str, say: Callable[[str], None]) -> list[SourceFile]:
    """The files in `paths`, in the order given; those of a folder sorted by name.

    The files of a folder come before those of the folders in it. say: called with a line for each
    reason for which files of a folder are left out. Raises DataError if a path that is given cannot
    be read, if a package is missing, or if there are no files.
    """
    left_out = LeftOut()
    found: list[SourceFile] = []
    for path in paths:
        try:
            if os.path.isdir(path):
                found.extend(_sources_in(path, left_out))
            else:
                check_named(path, json_key)
                found.append(_source(path))
        except Unusable as error:
            raise DataError(f"{path}: {error}") from error
    for line in left_out.lines():
        say(f"Data: {line}")
    if not found:
        raise DataError("there is no file to read: name files, or folders that have some")
    return found


def changed(sources: list[SourceFile]) -> str | None:
    """The path of the first file whose size or time of change is another now; None if none is."""
    for source in sources:
        try:
            status = os.stat(source.path)
        except OSError:
            return source.path
        if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
            return source.path
    return None


def _sources_in(root: Path, left_out: LeftOut) -> list[SourceFile]:
    found = []
    for path in files(root, left_out):
        try:
            check_regular(path)
            found.append(_source(path))
        except Unusable as error:
            left_out.add(error.reason, shown(path.relative_to(root)))
    return found


def _source(path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(str(path), kind_of(path), status.st_size, status.st_mtime_ns)
