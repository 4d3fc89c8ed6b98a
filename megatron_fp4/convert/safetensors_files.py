"""Reads and writes folders of safetensors files, as `transformers` names and shards them.

One file is model.safetensors. Several are model-00001-of-00003.safetensors and so on, with
model.safetensors.index.json, which names the file of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp4.convert.metadata import TensorInfo
from megatron_fp4.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PACKAGES = "pip install 'safetensors>=0.5' 'transformers>=4.57' accelerate compressed-tensors"

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Folder:
    """A folder of safetensors files, opened for reading.

    tensors: shape and dtype of each tensor, by name, read from the headers of the files.
    Raises ConfigError if there are no safetensors files, and if one is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for file in _files(path):
            with _opened(file) as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise ConfigError(f"{file}: {name} has the dtype {part.get_dtype()}")
                    self._files[name] = file
                    self.tensors[name] = TensorInfo(tuple(part.get_shape()), dtype)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name. Raises ConfigError if there is none."""
        if name not in self._files:
            raise ConfigError(f"{self.path} has no tensor {name}")
        with _opened(self._files[name]) as opened:
            found: Tensor = opened.get_tensor(name)
            return found


@dataclass(frozen=True)
class Named:
    """A tensor to write: its name, shape, dtype, and a function that returns its values."""

    name: str
    info: TensorInfo
    load: Callable[[], Tensor]


def write(
    path: Path,
    tensors: Iterable[Named],
    shard_bytes: int,
    written: Callable[[Named], None] = lambda named: None,
) -> None:
    """Writes tensors to files of at most `shard_bytes` each, in the folder `path`.

    A larger tensor gets a file of its own. The tensors of one file are in memory at a time.
    written: called after each tensor was loaded.
    """
    from safetensors.torch import save_file

    shards = list(_shards(tensors, shard_bytes))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        loaded = {}
        for named in shard:
            loaded[named.name] = _checked(named)
            written(named)
        save_file(loaded, path / name, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(n.info.bytes for shard in shards for n in shard)},
            "weight_map": {
                named.name: name
                for name, shard in zip(names, shards, strict=True)
                for named in shard
            },
        }
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Iterable[Named], most: int) -> Iterator[list[Named]]:
    shard: list[Named] = []
    size = 0
    for named in tensors:
        if shard and size + named.info.bytes > most:
            yield shard
            shard, size = [], 0
        shard.append(named)
        size += named.info.bytes
    yield shard


def _checked(named: Named) -> Tensor:
    found = named.load().contiguous()
    if found.dtype != named.info.dtype or tuple(found.shape) != named.info.shape:
        raise AssertionError(
            f"{named.name}: {found.dtype} {tuple(found.shape)} is not {named.info}"
        )
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder: give the folder of a Hugging Face model")
    if (path / INDEX).is_file():
        try:
            names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{path / INDEX} is damaged: fetch the model again") from error
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ConfigError(f"{path / INDEX} names a file outside its folder: do not trust it")
        if missing := [name for name in names if not (path / name).is_file()]:
            raise ConfigError(f"{path} lacks {missing[0]}: fetch the model again")
        return [path / name for name in names]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        raise ConfigError(
            f"{path} has pickled weights, which could run code: have transformers save it as "
            "safetensors (save_pretrained) where you trust it, and give that"
        )
    raise ConfigError(f"{path} has no {SINGLE}: give the folder of a Hugging Face model")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(f"safetensors is not installed: {PACKAGES}") from None
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged or incomplete: {error}; fetch it again") from error
