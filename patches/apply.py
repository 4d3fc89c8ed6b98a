"""Makes the plugin permanent in a checkout of Megatron-LM, or takes it out again.

    python patches/apply.py CHECKOUT            # shows the change and asks
    python patches/apply.py CHECKOUT --dry-run  # shows the change
    python patches/apply.py CHECKOUT --yes      # shows the change and makes it
    python patches/apply.py CHECKOUT --revert   # takes the lines out, with --dry-run or --yes too

Two files of the checkout get a few lines each that call megatron_fp4/mcore/permanent.py: at the
start of megatron/core/__init__.py and at the end of megatron/training/__init__.py. The places are
found in the syntax tree of the files. Every script of that checkout then takes --fp4-recipe. A
second call changes nothing; --revert restores both files byte by byte.
"""

import argparse
import ast
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # Python puts patches/ on its path, and the package is beside it
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron_fp4.errors import ConfigError
from megatron_fp4.mcore import release

BEGIN, END = "# megatron-fp4: begin (patches/apply.py --revert removes it)", "# megatron-fp4: end"


@dataclass(frozen=True)
class Insertion:
    """Lines that are put into a file of a checkout.

    file: the file, relative to the folder megatron/.
    calls: the function of megatron_fp4/mcore/permanent.py that the lines call.
    line: finds the number of lines of the file that come before the new ones, from its statements.
    """

    file: str
    calls: str
    line: Callable[[list[ast.stmt]], int]

    def lines(self, end: str) -> str:
        """The lines to put there. end: the file's line ending."""
        source = (
            f"{BEGIN}",
            f"from megatron_fp4.mcore.permanent import {self.calls} as _megatron_fp4",
            "",
            "_megatron_fp4()",
            f"{END}",
            "",
        )
        return end.join(source)


def before_the_first_import(statements: list[ast.stmt]) -> int:
    """Raises ConfigError if the file imports nothing."""
    for statement in statements:
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if isinstance(statement, ast.Import | ast.ImportFrom) and not is_future:
            return statement.lineno - 1
    raise ConfigError("it imports nothing")


def at_the_end(statements: list[ast.stmt]) -> int:
    """Raises ConfigError if the file does not import pretrain, which the plugin replaces."""
    for statement in statements:
        if isinstance(statement, ast.ImportFrom) and statement.module == "training":
            if any(name.name == "pretrain" for name in statement.names):
                return statements[-1].end_lineno or statements[-1].lineno
    raise ConfigError("it does not import pretrain from .training")


INSERTIONS = (
    Insertion("core/__init__.py", "before_megatron", before_the_first_import),
    Insertion("training/__init__.py", "in_megatron", at_the_end),
)


def without(source: str) -> str:
    """`source` without the lines of an earlier call."""
    pattern = rf"{re.escape(BEGIN)}\r?\n.*?{re.escape(END)}"
    if re.search(rf"{pattern}\r?\n", source, re.DOTALL):
        return re.sub(rf"{pattern}\r?\n", "", source, flags=re.DOTALL)
    # At the end of a file whose last line had no line ending.
    return re.sub(rf"\r?\n{pattern}\Z", "", source, flags=re.DOTALL)


def lines_of(source: str) -> list[str]:
    """The lines of `source` as Python counts them: a form feed, unlike in str.splitlines, ends
    none."""
    return io.StringIO(source, newline="").readlines()


def with_plugin(source: str, insertion: Insertion) -> str:
    """`source` with the lines of `insertion`. Raises ConfigError if there is no place for them."""
    lines = lines_of(source)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    before = insertion.line(ast.parse(source).body)
    new = insertion.lines(end)
    if before == len(lines) and not lines[-1].endswith("\n"):
        new = end + new.removesuffix(end)
    return "".join([*lines[:before], new, *lines[before:]])


def changes(checkout: Path, revert: bool) -> Iterator[tuple[Path, str, str]]:
    """(file, source as it is, source as it is to be) for each file that is to change.

    Raises ConfigError for a folder that is no checkout of a release that was tried.
    """
    folder = checkout / "megatron"
    name = release.name_of(folder)
    if name not in release.TRIED and not revert:
        raise ConfigError(f"{checkout} is Megatron-core {name}: {release.why_not(name)}")
    for insertion in INSERTIONS:
        file = folder / insertion.file
        try:
            source = file.read_bytes().decode()
            wanted = without(source)
            if not revert:
                wanted = with_plugin(wanted, insertion)
        except (OSError, SyntaxError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{file} is not as Megatron-core {name} has it: {error}") from error
        if wanted != source:
            yield file, source, wanted


def shown(file: Path, source: str, wanted: str) -> str:
    """The difference between two texts of a file, as a unified diff."""
    old, new = map(lines_of, (source, wanted))
    lines = difflib.unified_diff(old, new, str(file), str(file))
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def is_wanted(yes: bool) -> bool:
    """Whether the user wants the change: --yes, or the answer to a question."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("nothing was changed: add --yes to change these files")
    return input("change these files? [y/N] ").strip().lower() in ("y", "yes")


def write(sources: dict[Path, str]) -> None:
    """Replaces files by new ones with these sources.

    All new files are written beside the old ones before the first is replaced, so that no file is
    half written, and none is replaced where one of them cannot be written.
    """
    beside = {file: file.with_name(f".{file.name}.megatron-fp4") for file in sources}
    try:
        for file, source in sources.items():
            beside[file].write_bytes(source.encode())
            beside[file].chmod(file.stat().st_mode)
        for file, new in beside.items():
            os.replace(new, file)
    finally:
        for new in beside.values():
            with suppress(OSError):  # it was never made, its folder being read-only
                new.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a checkout, with megatron/ in it")
    parser.add_argument("--revert", action="store_true", help="take the plugin out")
    parser.add_argument("--dry-run", action="store_true", help="show the change alone")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    args = parser.parse_args()
    try:
        found = list(changes(args.checkout, args.revert))
        for change in found:
            print(shown(*change), end="")
        if not found:
            print(f"nothing to do: the plugin is {'not ' * args.revert}in {args.checkout}")
        elif not args.dry_run and is_wanted(args.yes):
            try:
                write({file: wanted for file, _, wanted in found})
            except OSError as error:
                raise ConfigError(
                    f"{args.checkout} cannot be written: {error}: make it writable, with free "
                    "space, and run the command again"
                ) from error
            state = "out of" if args.revert else "in"
            print(f"changed {len(found)} files: the plugin is {state} {args.checkout}")
            if not args.revert:
                print("the Python that runs the checkout needs megatron-fp4: pip install -e .")
    except ConfigError as error:
        sys.exit(f"patches/apply.py: error: {error}")


if __name__ == "__main__":
    main()
