"""Writes checkpoints of Megatron's format torch_dist, one chunk of a tensor at a time.

torch.distributed.checkpoint defines the files: each chunk and object is what torch.save writes, one
after the other, and `.metadata` has their places.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fp4.convert import metadata, pickles
from megatron_fp4.convert.metadata import CONFIG, TensorInfo

INTEGRITY = "integrity.json"  # the SHA-256 of each file, in the form of Megatron's own


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and how to get it.

    key: of the tensor. info: shape and dtype of the whole tensor.
    offset, shape: of the part; as many numbers as the tensor has axes.
    load: called once, when the part is written; returns its values, with `shape`, or without those
        of its first axes that are 1.
    file: the number of the file to write it to.
    """

    key: str
    info: TensorInfo
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    file: int = 0

    @property
    def bytes(self) -> int:
        return TensorInfo(self.shape, self.info.dtype).bytes


def whole(key: str, info: TensorInfo, load: Callable[[], Tensor]) -> Chunk:
    """The chunk that is all of a tensor."""
    return Chunk(key, info, (0,) * len(info.shape), info.shape, load)


def write(
    path: Path,
    chunks: Iterable[Chunk],
    objects: Mapping[str, bytes],
    written: Callable[[Chunk], None] = lambda chunk: None,
) -> None:
    """Writes a checkpoint to the folder `path`, which is made if it is not there.

    chunks: of all tensors; those of a tensor must not overlap, and must cover it. They are loaded
        in this order, and one is in memory at a time.
    objects: for each key of an object that is not a tensor, what `saved` made of it.
    written: called after each chunk.

    Writes integrity.json too, so that a launch verifies the files.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for chunk in chunks:
        size, offset = torch.Size(chunk.shape), torch.Size(chunk.offset)
        entry = tensors.setdefault(chunk.key, _entry(chunk.info))
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(offset, size))
        places[MetadataIndex(chunk.key, offset)] = _append(path, chunk.file, _loaded(chunk))
        written(chunk)
    for key, data in objects.items():
        tensors[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _append(path, 0, data)
    (path / metadata.FILE).write_bytes(pickle.dumps(Metadata(tensors, storage_data=places)))
    (path / metadata.CONFIG_FILE).write_text(json.dumps(CONFIG))
    (path / INTEGRITY).write_text(
        json.dumps({"algorithm": "sha256", "files": digests(path)}, indent=2)
    )


def saved(value: Any) -> bytes:
    """An object as Megatron saves one: in a list, by torch.save."""
    return pickles.save([value])


def digests(path: Path) -> dict[str, str]:
    """The SHA-256 of each file of a checkpoint, by its name."""
    found = {}
    for file in sorted(path.iterdir()):
        if file.name != INTEGRITY:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                found[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def _entry(info: TensorInfo) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(info.dtype), torch.Size(info.shape), [])


def _loaded(chunk: Chunk) -> Tensor:
    """The values of a chunk, in a storage of their own: torch.save writes whole storages."""
    found = chunk.load()
    size = torch.Size(chunk.shape)
    if found.dtype != chunk.info.dtype or found.numel() != size.numel():
        raise AssertionError(f"{chunk.key}: {found.dtype} {tuple(found.shape)} is not {chunk}")
    found = found.detach().reshape(size).contiguous()
    if found.untyped_storage().nbytes() != chunk.bytes:
        found = found.clone()
    return found


def _append(path: Path, file: int, data: Tensor | bytes) -> _StorageInfo:
    """Writes `data` at the end of a file; returns where it is."""
    name = f"__{file}_0.distcp"
    with (path / name).open("ab") as stream:
        start = stream.tell()
        if isinstance(data, bytes):
            stream.write(data)
        else:
            torch.save(data, stream)
        return _StorageInfo(name, start, stream.tell() - start)
