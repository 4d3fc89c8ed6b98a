"""The folder that prepared data are written to: whether it can be written, and what is removed."""

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fp4.mcore.data import manifest
from megatron_fp4.mcore.data.errors import DataError


def check(output: Path) -> None:
    """Raises DataError if `output` cannot be written to, or has another program's manifest.json."""
    there = next(path for path in (output, *output.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        raise DataError(f"--output {output}: {there} is not a folder; give another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(f"--output {output}: no permission to write in {there}; give another")
    if (output / manifest.NAME).exists() and manifest.read(output) is None:
        raise DataError(
            f"{output / manifest.NAME} was not written by this tool: give another --output, or "
            "delete it"
        )


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """A context in which a failure to write, an OSError, is raised as a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {error.filename or output}: {error.strerror or error}; free space, or "
            "give another --output"
        ) from error


def without_transformer_engine() -> None:
    """Keeps Megatron from importing Transformer Engine, if it is installed.

    Writing datasets does not need it, and on a node without a GPU the import can fail.
    """
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]


@contextmanager
def without_warnings() -> Iterator[None]:
    """A context in which Megatron is imported without warnings of libraries for GPUs."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def clear(output: Path) -> None:
    """Creates the folder; removes the manifest and Megatron's cached indices of earlier data."""
    output.mkdir(parents=True, exist_ok=True)
    (output / manifest.NAME).unlink(missing_ok=True)
    for name in manifest.DATASETS:
        # Megatron caches its shuffled indices in a folder named like the dataset, under a hash that
        # does not depend on the content. With new text they could point past the end of the data.
        shutil.rmtree(output / name, ignore_errors=True)
