"""Reads checkpoints of Megatron's format torch_dist, one part of a tensor at a time.

The format is torch.distributed.checkpoint's: `.metadata` lists for each tensor the chunks of which
it consists, and for each chunk the file, offset and length of a tensor that torch.save wrote.
Megatron's keys for the layers of a decoder are stacked: `decoder.layers.mlp.linear_fc1.weight` is
[layers, out, in], and experts add an axis, [layers, experts, out, in].
"""

from __future__ import annotations

import argparse
import io
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.convert import metadata, pickles
from megatron_fp4.convert.metadata import FileRange, Region, TensorInfo
from megatron_fp4.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # what the tracker names, and a checkpoint's folder, if it is of no iteration
COMMON = "common_state/shard_0_1"  # the key under which Megatron-core 0.19 saves its arguments
COMMON_FILE = "common.pt"  # the file in which Megatron-core up to 0.18 does


def find(folder: Path, step: int | None = None) -> Path:
    """The folder of one checkpoint.

    folder: that folder itself, or the folder of several, in which the tracker file names the newest
    and `step` can name another. Raises ConfigError, with what to do, if there is none.
    """
    if (folder / ".metadata").is_file() or (folder / "metadata.json").is_file():
        if step is not None:
            raise ConfigError(f"{folder} is one checkpoint: leave out --step, or give its parent")
        return folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give the folder of a checkpoint")
    if step is not None:
        name = f"iter_{step:07d}"
    elif (folder / TRACKER).is_file():
        text = (folder / TRACKER).read_text(errors="replace").strip()
        if text != RELEASE and not (text.isascii() and text.isdecimal()):
            raise ConfigError(f"{folder / TRACKER} names no iteration but {text[:20]!r}: write one")
        name = text if text == RELEASE else f"iter_{text[:20]:0>7}"
    else:
        raise ConfigError(f"{folder} has no {TRACKER}: give the folder of a Megatron checkpoint")
    if not (folder / name).is_dir():
        raise ConfigError(f"{folder} has no {name}: give another --step")
    return folder / name


class Checkpoint:
    """A checkpoint of the format torch_dist, opened for reading.

    path: the folder of one checkpoint (see `find`). Only `.metadata` is read when it is opened, and
    the sizes of the files are compared with it. Raises ConfigError if it is of another format,
    incomplete or damaged.
    tensors: shape and dtype of each tensor, by key. objects: the keys of what is not a tensor.
    files: the names of the files with the data.

    Objects that are not tensors are read by `pickles`, so no code of a foreign file runs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        contents = metadata.read(path)
        self.tensors, self._places = contents.tensors, contents.objects
        self._chunks = {key: _Chunks(places) for key, places in contents.chunks.items()}
        self.objects, self.files = list(contents.objects), contents.files
        self.is_flattened = contents.is_flattened
        self._last: tuple[FileRange, Tensor] | None = None  # a chunk of which a part was read

    @property
    def name(self) -> str:
        """The iteration's folder, such as iter_0000100 or release."""
        return self.path.resolve().name

    def tensor(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """The tensor under `key`, or its part at `index` of the first axes.

        index: (layer,) of a tensor that is stacked over layers, or (layer, expert). Chunks that the
        part does not need are not read. Raises ConfigError if the checkpoint has no such tensor,
        and if a file is damaged.
        """
        rest = self._info(key).shape[len(index) :]
        part = self.part(key, (*index, *(0 for _ in rest)), (*(1 for _ in index), *rest))
        return part.reshape(rest)

    def part(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The part of the tensor under `key` with this offset and shape. Do not write to it.

        Raises ConfigError as `tensor` does.
        """
        info, chunks = self._info(key), self._chunks[key]
        if (place := chunks.places.get((offset, shape))) is not None:
            return self._tensor_at(key, place, TensorInfo(shape, info.dtype))
        part = torch.empty(shape, dtype=info.dtype)
        filled = 0
        for (start, sizes), place in chunks.near(offset, shape):
            overlap = _overlap(offset, shape, start, sizes)
            if overlap is not None:
                here, there = overlap
                # Parts that are read one after the other are often of the same chunk.
                if self._last is None or self._last[0] != place:
                    self._last = None  # before the next is loaded, so that one is in memory
                    self._last = place, self._tensor_at(key, place, TensorInfo(sizes, info.dtype))
                part[here] = self._last[1][there]
                filled += part[here].numel()
        if filled != part.numel():
            raise ConfigError(f"{self.path} has no data of a part of {key}: it is damaged")
        return part

    def forget(self) -> None:
        """Frees the chunk that is kept for the next part of it."""
        self._last = None

    def chunks(self, key: str) -> list[Region]:
        """(offset, shape) of each chunk of which the tensor under `key` consists."""
        self._info(key)
        return list(self._chunks[key].places)

    def file_of(self, key: str, region: Region) -> str:
        """The name of the file that has this chunk, one of `chunks`."""
        return self._chunks[key].places[region].file

    def object(self, key: str) -> Any:
        """The object under `key`, one of `objects`; see `pickles.load_saved`."""
        return self._load(key, self._places[key])

    def raw(self, key: str) -> bytes:
        """The bytes of the object under `key`, one of `objects`, as they were saved."""
        with self._opened(self._places[key]) as window:
            return window.readall()

    def file_of_object(self, key: str) -> str:
        """The name of the file that has the object under `key`."""
        return self._places[key].file

    def common(self) -> dict[str, Any]:
        """What Megatron saves beside tensors: args, iteration and others; {} if there is nothing.

        Objects of classes that `pickles` does not know are `pickles.Unknown`. Raises ConfigError if
        it is damaged.
        """
        path = self.common_file
        if path.is_file():  # Megatron reads this one if there are both
            try:
                found = pickles.load_saved(path)
            except Exception as error:
                raise ConfigError(f"{path} is damaged ({type(error).__name__})") from error
        elif COMMON in self._places:
            path = self.path
            found = self.object(COMMON)
            found = found[0] if isinstance(found, list) and found else found
        else:
            return {}
        if not isinstance(found, dict):
            raise ConfigError(f"{path} has no common state: it is damaged")
        return found

    @property
    def common_file(self) -> Path:
        """The file that has what `common` returns, if Megatron-core up to 0.18 saved."""
        return self.path / COMMON_FILE

    def args(self) -> argparse.Namespace:
        """Megatron's arguments of the run that saved. Raises ConfigError if there are none."""
        args = self.common().get("args")
        if not isinstance(args, argparse.Namespace):
            raise ConfigError(f"{self.path} has no arguments of a Megatron run")
        return args

    def _info(self, key: str) -> TensorInfo:
        if key not in self.tensors:
            raise ConfigError(f"{self.path} has no tensor {key}")
        return self.tensors[key]

    def _tensor_at(self, key: str, place: FileRange, info: TensorInfo) -> Tensor:
        found = self._load(key, place)
        is_tensor = isinstance(found, Tensor) and found.layout == torch.strided
        if not is_tensor or tuple(found.shape) != info.shape or found.dtype != info.dtype:
            raise ConfigError(f"{self.path / place.file} is damaged at {key}")
        return found.detach()

    def _load(self, key: str, place: FileRange) -> Any:
        with self._opened(place) as window:
            try:
                return pickles.load_saved(window)
            except Exception as error:
                what = f"{self.path / place.file} is damaged at {key}"
                raise ConfigError(f"{what} ({type(error).__name__})") from error

    @contextmanager
    def _opened(self, place: FileRange) -> Iterator[_Window]:
        file = self.path / place.file
        try:
            stream = file.open("rb", buffering=0)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
        with stream:
            yield _Window(stream, place)


class _Window(io.RawIOBase):
    """A part of a file, as if it were a file: its tensor is read without a copy of the bytes."""

    def __init__(self, stream: io.FileIO, place: FileRange) -> None:
        self._stream, self._place = stream, place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._at, self._place.length)[whence]
        if start + offset < 0:
            raise ValueError("before the start")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(self._place.length - self._at, 0)
        self._stream.seek(self._place.offset + self._at)
        count = self._stream.readinto(memoryview(buffer).cast("B")[:left])
        self._at += count
        return count


class _Chunks:
    """The chunks of one tensor, sorted, so that those near a part are found without a search."""

    def __init__(self, places: dict[Region, FileRange]) -> None:
        self.places = places
        self._sorted = list(places.items())
        self._starts = [offset[:1] for offset, _ in places]
        self._longest = max((shape[0] for _, shape in places if shape), default=0)

    def near(
        self, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterable[tuple[Region, FileRange]]:
        """The chunks that can overlap with a part, by the first axis."""
        if not shape:
            return self._sorted
        first = bisect_left(self._starts, (offset[0] - self._longest + 1,))
        return self._sorted[first : bisect_left(self._starts, (offset[0] + shape[0],))]


def _overlap(
    start: tuple[int, ...],
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """(slices in the wanted part, slices in a chunk) of what both have; None if they have nothing.

    start, shape: the wanted part of a tensor. offset, sizes: the chunk's part of it.
    """
    here, there = [], []
    for a, n, b, m in zip(start, shape, offset, sizes, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        here.append(slice(low - a, high - a))
        there.append(slice(low - b, high - b))
    return tuple(here), tuple(there)
