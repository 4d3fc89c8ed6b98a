"""Writes a checkpoint that is made from others: the part that all commands have in common.

The target is a folder for --load: a folder for the iteration, and the tracker file that names it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megatron_fp4
from megatron_fp4.convert import integrity, metadata, pickles
from megatron_fp4.convert.huggingface import model_files
from megatron_fp4.convert.metadata import Region, TensorInfo
from megatron_fp4.convert.output import Progress, check_target, complete_folder
from megatron_fp4.convert.torch_dist import COMMON, COMMON_FILE, RELEASE, TRACKER, Checkpoint
from megatron_fp4.convert.torch_dist_writer import Chunk, saved, write
from megatron_fp4.errors import ConfigError

MADE_BY = "made_by.json"  # in a checkpoint's folder: the command that made it, and from what
_ITERATION = re.compile(r"iter_(\d+)")


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor, and the number of the file to write it to."""

    key: str
    region: Region
    file: int


@dataclass(frozen=True)
class Plan:
    """A checkpoint to write.

    command: the command that makes it. sources: what it is made from. The last one's iteration and
        shapes are those of the result.
    parts: of all its tensors. values: returns the values of any part of a tensor.
    objects: its objects, as bytes, by key. common_file: the bytes of common.pt, if it has one.
    """

    command: str
    sources: list[Checkpoint]
    parts: list[TensorPart]
    values: Callable[[str, Region], Tensor]
    objects: dict[str, bytes]
    common_file: bytes | None

    @property
    def source(self) -> Checkpoint:
        return self.sources[-1]

    @property
    def keys(self) -> list[str]:
        """The keys of the tensors."""
        return list(dict.fromkeys(part.key for part in self.parts))

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(self.source.tensors[key].bytes for key in self.keys)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `write_checkpoint` reads."""
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="for --load")
    parser.add_argument("--force", action="store_true", help="replace DIR if it exists")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written")
    add_verify(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Adds --no-verify."""
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare files with integrity.json"
    )


def verify(sources: Iterable[Checkpoint], args: argparse.Namespace) -> None:
    """Verifies all files of checkpoints, unless `args` has --no-verify; see `integrity.verify`.

    It reads them whole, so whatever can be checked without comes first.
    """
    for source in () if args.no_verify else sources:
        common = [COMMON_FILE] if source.common_file.is_file() else []
        own = [metadata.CONFIG_FILE, metadata.FILE]
        integrity.verify(source.path, [*own, *common, *source.files])


def as_saved(checkpoint: Checkpoint, keys: Iterable[str]) -> list[TensorPart]:
    """The parts of the tensors `keys` as the checkpoint has them: its chunks, in as many files."""
    number = {name: i for i, name in enumerate(checkpoint.files)}
    return [
        TensorPart(key, region, number[checkpoint.file_of(key, region)])
        for key in keys
        for region in checkpoint.chunks(key)
    ]


def carried(
    checkpoint: Checkpoint, keys: Iterable[str], common: dict[str, Any] | None = None
) -> tuple[dict[str, bytes], bytes | None]:
    """(objects, common file) of a plan: the objects `keys` as the checkpoint has them, and its
    common state, or `common` in its place."""
    objects = {key: checkpoint.raw(key) for key in keys if key != COMMON}
    file = checkpoint.common_file
    if file.is_file():
        return objects, file.read_bytes() if common is None else pickles.save(common)
    if COMMON in checkpoint.objects:
        objects[COMMON] = checkpoint.raw(COMMON) if common is None else saved(common)
    return objects, None


def write_checkpoint(plan: Plan, args: argparse.Namespace) -> None:
    """Writes a checkpoint and checks what was written. args: those of `add_arguments`.

    Raises ConfigError if a source is damaged or the target cannot be written.
    """
    target, name = args.output, _name(plan.source)
    check_target(target, args.force, tuple(source.path for source in plan.sources))
    files = len({part.file for part in plan.parts})
    what = f"{len(plan.keys)} tensors ({size_words(plan.bytes)}) and {len(plan.objects)} objects"
    if args.dry_run:
        print(f"would write {target / name}: {what} in {files} files")
        return
    verify(plan.sources, args)
    with complete_folder(target) as folder:
        _write(plan, folder / name)
        number = _ITERATION.fullmatch(name)
        (folder / TRACKER).write_text(str(int(number[1])) if number else RELEASE)
        kept = plan.source.path.resolve().parent / model_files.FOLDER
        if kept.is_dir():  # of the model that the run began with; export-hf takes them from there
            model_files.copy(kept, folder / model_files.FOLDER)
        _check(plan, folder / name)
    print(f"wrote {target / name}: {what} in {files} files; checked")


def _write(plan: Plan, folder: Path) -> None:
    folder.mkdir()
    note(folder, plan.command, [source.path for source in plan.sources])
    if plan.common_file is not None:
        (folder / COMMON_FILE).write_bytes(plan.common_file)
    progress = Progress("writing", plan.bytes)
    chunks = (_chunk(plan, part) for part in plan.parts)
    write(folder, chunks, plan.objects, lambda chunk: progress.add(chunk.bytes))


def note(folder: Path, command: str, sources: Iterable[Path]) -> None:
    """Writes down in a checkpoint's folder which command made it, and from what."""
    content = {
        "command": command,
        "version": megatron_fp4.__version__,
        "sources": list(map(str, sources)),
    }
    (folder / MADE_BY).write_text(json.dumps(content, indent=2) + "\n")


def _chunk(plan: Plan, part: TensorPart) -> Chunk:
    info = plan.source.tensors[part.key]
    return Chunk(
        part.key, info, *part.region, lambda: plan.values(part.key, part.region), part.file
    )


def _check(plan: Plan, folder: Path) -> None:
    """Reads the written checkpoint and compares it with what it is made from, by the latter's
    chunks. Raises ConfigError if anything differs."""
    for source in plan.sources:
        source.forget()
    made = Checkpoint(folder)
    progress = Progress("checking", plan.bytes)
    same = set(made.tensors) == set(plan.keys) and set(made.objects) == set(plan.objects)
    same = same and all(made.tensors[key] == plan.source.tensors[key] for key in plan.keys)
    same = same and all(made.raw(key) == data for key, data in plan.objects.items())
    for key in plan.keys if same else ():
        for region in plan.source.chunks(key):
            same = same and equal_bits(made.part(key, *region), plan.values(key, region))
            progress.add(TensorInfo(region[1], plan.source.tensors[key].dtype).bytes)
    if not same:
        raise ConfigError(f"what was written to {folder} is not what was to be: check the disk")


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and dtype and the same bits, also in NaN and zeros."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(a, b)


def _name(source: Checkpoint) -> str:
    """The folder of the source's iteration, as Megatron names it."""
    if source.name == RELEASE or _ITERATION.fullmatch(source.name):
        return source.name
    iteration = source.common().get("iteration")
    if not isinstance(iteration, int):
        raise ConfigError(f"{source.path} names no iteration: rename it to iter_0000001 or so")
    return f"iter_{iteration:07d}"


def size_words(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
