"""Files of tables, plain or compressed, as a stream of bytes that has an end.

What a file holds says how it is compressed, and not its name. A few kilobytes may hold gigabytes,
so how much is unpacked is limited, and how long a line is.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import itertools
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from weft._opening import open_to_read
from weft.errors import WeftError

#: Bytes of a table, unpacked, and of one line of it.
MOST_BYTES = 1 << 30
MOST_LINE = 1 << 24

_BROKEN = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


class UnpackedTable(io.RawIOBase):
    """The bytes of a table; `refused` is why reading ended, if it did before the end."""

    def __init__(self, inner: IO[bytes], path: Path) -> None:
        self.path, self.refused = path, ""
        self._inner, self._bytes, self._line = inner, 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes; `WeftError` for a damaged file, or one that has too many."""
        if self.refused:
            raise WeftError(self.refused)
        try:
            content = self._inner.read(len(buffer))
        except _BROKEN as error:
            why = " ".join(str(getattr(error, "strerror", None) or error).split())
            return self._refuse(f"cannot be unpacked, as a damaged file cannot: {why}")
        buffer[: len(content)] = content
        self._bytes += len(content)
        last = content.rfind(b"\n")
        self._line = self._line + len(content) if last < 0 else len(content) - last - 1
        if max(self._line, content.find(b"\n")) > MOST_LINE:
            return self._refuse(f"has a line of more than {MOST_LINE:,} bytes, as no table has")
        if self._bytes > MOST_BYTES:
            return self._refuse(
                f"holds more than {MOST_BYTES:,} bytes, the most that weft predict reads: train on"
                " a stratified sample of the rows, and cut a test file into several"
            )
        return len(content)

    def _refuse(self, why: str) -> int:
        self.refused = f"{self.path} {why}"
        raise WeftError(self.refused)


@contextlib.contextmanager
def open_table(path: Path) -> Iterator[tuple[io.BufferedReader, UnpackedTable]]:
    """The bytes of a table in a file: plain, or packed by gzip, bzip2, xz, zip, tar, zstandard."""
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(open_to_read(path, links=True))
            start = file.read(512)
            file.seek(0)
            inner = _unpacked(start)(opened, file, path)
        except _BROKEN as error:
            why = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise WeftError(f"{path} cannot be read: {why}") from None
        stream = UnpackedTable(inner, path)
        yield io.BufferedReader(stream, 1 << 18), stream


def read_start(path: Path) -> bytes:
    """The first bytes of a file as it lies on disk."""
    try:
        with open_to_read(path, links=True) as file:
            return file.read(512)
    except OSError as error:
        raise WeftError(f"{path} cannot be read: {error.strerror or error}") from None


_Opened = contextlib.ExitStack
_Unpack = Callable[[_Opened, IO[bytes], Path], IO[bytes]]


def _unpacked(start: bytes) -> _Unpack:
    """Unpacking of a file that begins with these bytes."""
    for magic, unpack in _PACKED.items():
        if start.startswith(magic):
            return unpack
    return _tar if start[257:262] == b"ustar" else _plain


def _plain(opened: _Opened, file: IO[bytes], path: Path) -> IO[bytes]:
    return file


def _gzip(opened: _Opened, file: IO[bytes], path: Path) -> IO[bytes]:
    inner: Any = gzip.GzipFile(fileobj=file)
    return opened.enter_context(inner)


def _bzip2(opened: _Opened, file: IO[bytes], path: Path) -> IO[bytes]:
    return opened.enter_context(bz2.BZ2File(file))


def _xz(opened: _Opened, file: IO[bytes], path: Path) -> IO[bytes]:
    return opened.enter_context(lzma.LZMAFile(file))


def _zip(opened: _Opened, file: IO[bytes], path: Path) -> IO[bytes]:
    archive = opened.enter_context(zipfile.ZipFile(file))
    names = [name for name in archive.namelist() if not name.endswith("/")]
    return opened.enter_context(archive.open(_only(names, path)))


def _tar(opened: _Opened, file: IO[bytes], path: Path) -> IO[bytes]:
    archive = opened.enter_context(tarfile.TarFile(fileobj=file))
    members = [member for member in itertools.islice(archive, 100) if member.isreg()]
    _only([member.name for member in members], path)
    inner = archive.extractfile(members[0])
    assert inner is not None
    return opened.enter_context(inner)


def _zstandard(opened: _Opened, file: IO[bytes], path: Path) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise WeftError(
            f"{path} is packed by zstandard, which pip install zstandard reads; or unpack it"
        ) from None
    return opened.enter_context(zstandard.ZstdDecompressor().stream_reader(file))


def _only(names: list[str], path: Path) -> str:
    if len(names) != 1:
        raise WeftError(f"{path} is an archive of {len(names)} files; give one of one file")
    return names[0]


#: First bytes of compressed files.
_PACKED: dict[bytes, _Unpack] = {
    b"\x1f\x8b": _gzip,
    b"BZh": _bzip2,
    b"\xfd7zXZ\x00": _xz,
    b"PK\x03\x04": _zip,
    b"PK\x05\x06": _zip,
    b"\x28\xb5\x2f\xfd": _zstandard,
}
