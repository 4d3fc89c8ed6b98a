"""Opens files that may be compressed: .gz and .zst; every other file is read as it is."""

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any, cast

from megatron_fp4.mcore.data.errors import DataError

COMPRESSED = (".gz", ".zst")
_READ_BYTES = 2**17  # of a compressed file at a time
_LARGEST_WINDOW = 2**31  # of zstd --long=31: how far back a frame may refer, in bytes


class DamagedFile(Exception):
    """The content of a compressed file is damaged or ends too early; the message has the reason."""


# What reading a stream of `decompressed` raises if the compressed content is damaged. An OSError
# with an errno is not one of them: it is a failure of the disk or of the network.
DAMAGE = (DamagedFile, EOFError, zlib.error, gzip.BadGzipFile)


def suffix_of(path: Path) -> str:
    """The file name's extension in lower case, without .gz or .zst: ".jsonl" for a.jsonl.gz."""
    kind = path.suffix.lower()
    return Path(path.stem).suffix.lower() if kind in COMPRESSED else kind


def is_compressed(path: Path) -> bool:
    """Whether the file's name ends in .gz or .zst, in upper or lower case."""
    return path.suffix.lower() in COMPRESSED


def check_packages(path: Path) -> None:
    """Raises DataError if `path` is a .zst file and the package zstandard is not installed."""
    if path.suffix.lower() == ".zst":
        _zstandard(path)


def decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    """The content of the file `path`, decompressed as its name says.

    raw: the file, opened in binary mode. Reading the result raises one of DAMAGE if the compressed
    content is damaged. Raises DataError if a package is missing.
    """
    kind = path.suffix.lower()
    if kind == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if kind == ".zst":
        return io.BufferedReader(_Zstandard(raw, _zstandard(path)))
    return raw


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path} needs the package zstandard, which is not installed: pip install zstandard"
        ) from error
    return zstandard


class _Zstandard(io.RawIOBase):
    """The decompressed content of a .zst file of one or more frames.

    zstandard's own reader does not notice that a file is cut short.
    """

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._raw, self._error = raw, zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        self._frame: Any = None  # the decompressor of the frame that is being read
        self._input, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_READ_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise DamagedFile("the file ends before the end of its last zstd frame")
                return 0
            self._output = memoryview(self._decompress())
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count

    def _decompress(self) -> bytes:
        """The next part of the content; empty if the input at hand completes no block of it."""
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            output: bytes = self._frame.decompress(self._input)
        except self._error as error:
            raise DamagedFile(str(error)) from error
        self._input = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return output
