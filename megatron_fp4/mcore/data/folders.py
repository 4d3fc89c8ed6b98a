"""Finds the files of a folder that may be text, and counts what is left out, by reason."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from megatron_fp4.mcore.data import manifest

# The reasons for not reading a file or a document, with what the user can do about it.
BINARY = "binary, with zero bytes (unpack archives first, except .gz and .zst)"
NOT_UTF8 = "not UTF-8 text (convert it first, for example with iconv)"
UNREADABLE = "not readable"
NOT_A_FILE = "neither a file nor a folder"
LINKED_FOLDER = "a link to a folder (name that folder on the command line to have it read)"
HIDDEN = "hidden"
BLANK = "blank"
PREPARED = "written by prepare_data"


class LeftOut:
    """Counts what was found and not read: for each reason the number, and the first few names."""

    NAMES = 3

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, list[str]]] = {}

    def add(self, reason: str, name: str) -> None:
        """Counts one file, folder or JSON line, called `name`, as left out for this reason."""
        count, names = self._found.get(reason, (0, []))
        self._found[reason] = (count + 1, [*names, name][: self.NAMES])

    def lines(self) -> list[str]:
        """One line of text for each reason, for the user."""
        lines = []
        for reason, (count, names) in self._found.items():
            more = f" and {count - len(names)} more" if count > len(names) else ""
            lines.append(f"left out {count}, {reason}: {', '.join(names)}{more}")
        return lines


class Unusable(Exception):
    """A file cannot be read as text.

    reason: one of the constants above, such as BINARY. detail: more about this file, or None.
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def files(root: Path, left_out: LeftOut) -> Iterator[Path]:
    """The files under `root` that may be text, at any depth; others are counted in `left_out`.

    Hidden files and folders, links to folders, the output of prepare_data, and folders that cannot
    be read are left out.
    """

    def unreadable(error: OSError) -> None:
        name = shown(os.path.relpath(error.filename, root))
        left_out.add(UNREADABLE, f"{name} ({error.strerror})")

    for folder, folders, files in os.walk(root, onerror=unreadable):
        here = Path(folder)
        outputs, inner = manifest.outputs_in(here), set(folders)
        enter = []
        for name in sorted(folders + files):
            path = here / name
            if name.startswith("."):
                left_out.add(HIDDEN, shown(path.relative_to(root)))
            elif name in outputs:
                left_out.add(PREPARED, shown(path.relative_to(root)))
            elif name not in inner:
                yield path
            elif path.is_symlink():  # to a folder, perhaps one that contains this folder
                left_out.add(LINKED_FOLDER, shown(path.relative_to(root)))
            else:
                enter.append(name)
        folders[:] = enter  # os.walk enters the folders that remain in this list


def shown(path: Path | str) -> str:
    """The path as a string to print and to hash; bytes that are not UTF-8 become escapes."""
    return os.fsencode(Path(path).as_posix()).decode(errors="backslashreplace")


def check_regular(path: Path) -> None:
    """Raises Unusable unless `path` is a regular file, or a link to one."""
    try:
        mode = path.stat().st_mode
    except OSError as error:  # missing, a broken link, a loop of links, no permission
        raise Unusable(UNREADABLE, error.strerror) from error
    if not stat.S_ISREG(mode):  # opening a pipe would wait until something writes to it
        raise Unusable(NOT_A_FILE)
