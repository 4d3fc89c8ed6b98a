"""Builds and loads the extension in C++ that runs Programs.

It needs a C++ compiler and ninja, but no CUDA toolkit. The first process of a host builds it, which
takes about a minute, into torch's folder of extensions (TORCH_EXTENSIONS_DIR); others wait, and
later launches load it.
"""

from __future__ import annotations

import fcntl
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch

from megatron_fp4.linear import execute_by

SOURCES = Path(__file__).parent / "sources"
FLAGS = ["-O2", "-fvisibility=hidden"]
_TOOLS = "install a C++ compiler, ninja and Python's headers, or name another compiler by CXX"
_ANOTHER_FOLDER = "name another folder by TORCH_EXTENSIONS_DIR"


class CannotBuild(Exception):
    """The extension cannot be built or loaded. str() says why and what to do, in one line."""


@cache
def load() -> Any:
    """The extension, which is built if this host has not built it for this torch and these sources.

    Raises CannotBuild.
    """
    try:
        from torch.utils import cpp_extension  # imports setuptools
    except ImportError as error:
        raise CannotBuild(f"{error}; pip install setuptools") from error
    name = f"megatron_fp4_cpp_{_version()}"
    try:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        with _alone(folder):
            if (folder / f"{name}.so").exists():
                # Ninja would build it again for a checkout in another folder.
                return cpp_extension._import_module_from_library(name, str(folder), True)
            sys.stderr.write("megatron-fp4: builds its executor in C++, once, in about a minute\n")
            (folder / "lock").unlink(missing_ok=True)  # of a process that was killed
            return cpp_extension.load(
                name,
                [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
                extra_cflags=FLAGS,
                build_directory=str(folder),
                with_cuda=False,
            )
    except (RuntimeError, SubprocessError) as error:  # the latter of a compiler that does not run
        raise CannotBuild(f"{_cause(str(error))}; {_TOOLS}") from error
    except (OSError, ImportError) as error:
        raise CannotBuild(f"{_cause(str(error))}; {_ANOTHER_FOLDER}") from error


def start() -> Any:
    """Makes all linears of this process run in C++ where they can; returns the extension.

    Raises CannotBuild.
    """
    from megatron_fp4.cpp.executor import CppExecutor  # imports Triton

    execute_by(CppExecutor(load()))
    return load()


def _cause(message: str) -> str:
    """The line of an error's message that says the cause.

    In ninja's output it follows the line that begins with FAILED, and the failed command.
    """
    lines = message.strip().splitlines()
    failed = (i for i, line in enumerate(lines) if line.startswith("FAILED:"))
    said = lines[next(failed, -2) + 2 :] or lines[-1:] or ["the compiler said nothing"]
    return next((line for line in said if "error:" in line), said[0]).strip()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The context in which no other process of this host builds in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "alone").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process that holds it
        yield


def _version() -> str:
    """Differs for other sources, flags and versions of torch."""
    digest = hashlib.sha256(f"{torch.__version__} {FLAGS}".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
