"""Reads what a torch_dist checkpoint says about itself: its tensors, chunks, objects and files.

torch.distributed.checkpoint pickles it in the file `.metadata`. All of it is checked here, so that
a damaged or foreign file is reported before anything else is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_fp4.convert import pickles
from megatron_fp4.errors import ConfigError

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
FILE, CONFIG_FILE = ".metadata", "metadata.json"

Region = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, shape) of a part of a tensor


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class FileRange:
    """Where the data of a chunk or object are: `length` bytes of a file, from `offset` on."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """What a checkpoint has.

    tensors: by key. chunks: for each key, the place of each chunk of which the tensor consists.
    objects: the places of what is not a tensor, by key.
    is_flattened: whether an older Megatron-core saved tensors as parts of flattened ones.
    """

    tensors: dict[str, TensorInfo]
    chunks: dict[str, dict[Region, FileRange]]
    objects: dict[str, FileRange]
    is_flattened: bool

    @property
    def files(self) -> list[str]:
        """The names of the files that have the data, in the order of their numbers."""
        chunks = (place for places in self.chunks.values() for place in places.values())
        names = {place.file for place in (*chunks, *self.objects.values())}
        return sorted(names, key=lambda name: (len(name), name))


def read(path: Path) -> Contents:
    """What the checkpoint in the folder `path` has.

    Raises ConfigError if it is of another format, incomplete or damaged: if metadata are missing or
    contradict themselves, and if a file is missing or shorter than they say.
    """
    _check_format(path)
    try:
        found = pickles.load((path / FILE).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path / FILE} cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle raises exceptions of many kinds
        raise ConfigError(f"{path / FILE} is damaged ({type(error).__name__})") from error
    if not isinstance(found, Metadata):
        raise ConfigError(f"{path / FILE} is not that of a checkpoint")
    try:
        contents = _contents(found)
    except _FileOutside:
        raise ConfigError(f"{path} names a file outside its folder: do not trust it") from None
    except Exception as error:  # any field may be of any type
        raise ConfigError(f"{path / FILE} is damaged ({error})") from error
    _check_files(path, contents)
    return contents


class _FileOutside(Exception):
    """A file's name is a path that leads elsewhere."""


def _contents(metadata: Metadata) -> Contents:
    tensors: dict[str, TensorInfo] = {}
    chunks: dict[str, dict[Region, FileRange]] = {}
    objects: dict[str, FileRange] = {}
    for key, stored in metadata.state_dict_metadata.items():
        _require(isinstance(key, str) and key.isprintable(), f"the key {str(key)[:40]!r}")
        if isinstance(stored, TensorStorageMetadata):
            info = TensorInfo(_sizes(stored.size), stored.properties.dtype)
            _require(isinstance(info.dtype, torch.dtype), f"the dtype of {key}")
            found = {_region(chunk, info): chunk for chunk in stored.chunks}
            covered = sum(math.prod(shape) for _, shape in found)
            _require(covered == math.prod(info.shape), f"the chunks of {key}")
            places = {
                region: _place(metadata.storage_data[MetadataIndex(key, chunk.offsets)])
                for region, chunk in found.items()
            }
            for (_, shape), place in places.items():
                size = TensorInfo(shape, info.dtype).bytes
                _require(size <= place.length, f"the size of {key}")
            tensors[key], chunks[key] = info, dict(sorted(places.items()))
        else:
            _require(isinstance(stored, BytesStorageMetadata), f"the entry {key}")
            objects[key] = _place(metadata.storage_data[MetadataIndex(key)])
    return Contents(tensors, chunks, objects, bool(getattr(metadata, "mcore_data", {})))


def _region(chunk: ChunkStorageMetadata, info: TensorInfo) -> Region:
    """(offset, shape) of a chunk. Raises ValueError if it is not within the tensor."""
    offset, shape = _sizes(chunk.offsets), _sizes(chunk.sizes)
    ends = [a + n for a, n in zip(offset, shape, strict=True)]
    within = zip(ends, info.shape, strict=True)
    _require(all(end <= size for end, size in within), f"a chunk at {offset}")
    return offset, shape


def _place(stored: Any) -> FileRange:
    name = stored.relative_path
    _require(isinstance(name, str), "the name of a file")
    if not name.isprintable() or Path(name).name != name:
        raise _FileOutside
    _require(getattr(stored, "transform_descriptors", None) is None, "a compressed file")
    offset, length = _sizes((stored.offset, stored.length))
    return FileRange(name, offset, length)


def _sizes(numbers: Any) -> tuple[int, ...]:
    sizes = tuple(numbers)
    _require(all(type(size) is int and 0 <= size < 1 << 62 for size in sizes), "a size")
    return sizes


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _check_files(path: Path, contents: Contents) -> None:
    ends: dict[str, int] = {}
    chunks = (place for places in contents.chunks.values() for place in places.values())
    for place in (*chunks, *contents.objects.values()):
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            raise ConfigError(f"{path} is incomplete: {name} is missing")
        if size < end:
            raise ConfigError(f"{path} is incomplete: {name} has {size} bytes of {end}")


def _check_format(path: Path) -> None:
    if any(path.glob("mp_rank_*")):
        raise ConfigError(
            f"{path} is of the format torch: convert it by a launch with --ckpt-convert-format "
            "torch_dist --ckpt-convert-save FOLDER, which writes to FOLDER/torch_dist"
        )
    try:
        found = json.loads((path / CONFIG_FILE).read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is incomplete: its save did not end (no metadata.json)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise ConfigError(f"{path / CONFIG_FILE} cannot be read ({what})") from error
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    if backend != CONFIG["sharded_backend"]:
        raise ConfigError(f"{path} is of the format {str(backend)[:40]!r}, not torch_dist")
