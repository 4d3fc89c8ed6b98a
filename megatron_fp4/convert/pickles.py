"""Reads pickled objects without running any code that they name, and writes them again.

A pickle names the classes and functions that rebuild its objects, and Python's own unpickler calls
whatever is named. Here a few names that checkpoints need are known, all of which only build data.
Any other name becomes an `Unknown` class, which keeps what it is given and runs nothing.
"""

from __future__ import annotations

import io
import pickle
from copyreg import __newobj__  # type: ignore[attr-defined]
from typing import Any

import torch

# Functions and classes that build tensors, arrays, containers and the metadata of checkpoints from
# their arguments, and do nothing else.
_BUILTINS = {"bytearray", "complex", "frozenset", "range", "set", "slice"}
_KNOWN = {
    "argparse": {"Namespace"},
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,  # their module in pickles of protocol 2, which torch.save writes
    "collections": {"OrderedDict", "deque"},
    "_codecs": {"encode"},
    "io": {"BytesIO"},
    "_io": {"BytesIO"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}  # fmt: skip


class Unknown:
    """An object of a class or function that `load` does not know, with what the pickle gave it.

    Classes derived from it are made by `load`, one for each name; `name` is "module.class".
    arguments: positional arguments of the constructor. state: what the object contained, or None.
    items, pairs: what was appended to it, if its class is a list, and set in it, if it is a dict.
    `save` writes it as it was read.
    """

    name = ""
    place = ("", "")  # module and class, as the pickle names them

    def __new__(cls, *arguments: Any, **keywords: Any) -> Unknown:
        made = super().__new__(cls)
        made.arguments, made.state, made.is_called = arguments, None, False
        made.items, made.pairs = [], []
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # A pickle makes an object by calling its class, or by its class's __new__ alone.
        self.is_called = True
        self.arguments: tuple[Any, ...]
        self.state: Any
        self.items: list[Any]
        self.pairs: list[tuple[Any, Any]]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    # A list or dict of an unknown class is filled by these methods.
    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        cls = type(self)
        made = (cls, self.arguments) if self.is_called else (__newobj__, (cls, *self.arguments))
        return *made, self.state, iter(self.items) or None, iter(self.pairs) or None

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        """For an enum's member, which is pickled as its class and value, "module.class(value)"."""
        given = (*self.arguments, *self.items, *self.pairs)
        return f"{self.name}({', '.join(map(repr, given))})"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()) or (module == "torch" and _is_storage_or_dtype(name)):
            return super().find_class(module, name)
        return type(name, (Unknown,), {"name": f"{module}.{name}", "place": (module, name)})


def _is_storage_or_dtype(name: str) -> bool:
    return name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)


class _Pickler(pickle._Pickler):
    """Python's own pickler, which writes the names of `Unknown` classes without importing them."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not (isinstance(obj, type) and issubclass(obj, Unknown)):
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + "\n".join((*obj.place, "")).encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


class _PickleModule:
    """What `torch.load` and `torch.save` need of a module like `pickle`."""

    Unpickler = _Unpickler
    Pickler = _Pickler

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _Unpickler(file, **options).load()


def load(data: bytes) -> Any:
    """The object that `pickle.dumps` wrote to `data`; what is not known becomes `Unknown`.

    Raises an exception of any kind if the data are damaged.
    """
    return _Unpickler(io.BytesIO(data)).load()


def load_saved(stream: Any) -> Any:
    """The object that `torch.save` wrote, on the CPU; see `load`. stream: a file opened to read."""
    return torch.load(stream, map_location="cpu", weights_only=False, pickle_module=_PickleModule)


def save(value: Any) -> bytes:
    """What `torch.save` writes for an object; `Unknown` objects are written as they were read."""
    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=_PickleModule)
    return stream.getvalue()
