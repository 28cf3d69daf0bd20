"""Files: one way to open them for reading, and one to write them.

Who shares a folder can put a link, a pipe or a device where a file is expected. Names that weft
makes up are therefore never links, only regular files are read, no pipe is waited for, and a file
that is written is a new one, which takes its name when it is complete:

    open_to_read     a regular file; `links=True` for a path that the user names
    read_bytes       all of it, unless it is larger than it may be
    open_to_lock     a file to lock, whose content stays
    replacing        a new file, renamed when the block ends; the old one stays if it fails
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedRandom, BufferedReader
from pathlib import Path

#: What files are called while they are written.
PARTIAL = ".weft-"
_LINK = "it is a link, and no file; weft neither follows nor replaces one here"
_ODD = "it is no regular file"
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def open_to_read(path: str | os.PathLike, *, links: bool = False) -> BufferedReader:
    """A regular file, open for reading; `OSError` for a link, a pipe, a device or a folder.

    `links` lets the path itself be a link: a user's own, and not one that a folder's content names.
    """
    return os.fdopen(_regular(path, os.O_RDONLY | (0 if links else os.O_NOFOLLOW)), "rb")


def read_bytes(path: str | os.PathLike, most: int, *, links: bool = False) -> bytes:
    """The content of a regular file; `OSError` if it is larger than `most` bytes.

    >>> read_bytes("/dev/zero", 10)
    Traceback (most recent call last):
        ...
    OSError: [Errno 22] it is no regular file: '/dev/zero'
    """
    with open_to_read(path, links=links) as file:
        large = os.fstat(file.fileno()).st_size > most
        content = b"" if large else file.read(most + 1)
    if large or len(content) > most:
        why = f"it is larger than {most:,} bytes, the most that are read of such a file"
        raise OSError(errno.EFBIG, why, str(path))
    return content


def open_to_lock(path: str | os.PathLike) -> BufferedRandom:
    """A regular file for locks, made if there is none; `OSError` for a link, pipe or device.

    Its owner alone may open it: who can read a file can lock it.
    """
    handle = _regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    with contextlib.suppress(PermissionError):  # another user's
        os.fchmod(handle, 0o600)
    return os.fdopen(handle, "r+b")


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike, *, new: bool = False, synced: bool = False
) -> Iterator[Path]:
    """A path to write to, whose file replaces `path` when the block ends, and not if it raises."""
    path = Path(path)
    _check_replaceable(path, new)
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(8)}-{path.name[-48:]}")
    try:
        yield partial
        if synced:
            sync_to_disk(partial)
        if new:
            _rename_new(partial, path)
        else:
            os.replace(partial, path)
        if synced:
            sync_to_disk(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def check_folder(path: str | os.PathLike) -> None:
    """Raise `OSError` where a folder that weft made up the name of is a link, or no folder."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        raise OSError(errno.ENOTDIR, _LINK if stat.S_ISLNK(mode) else "it is no folder", str(path))


def sync_to_disk(path: str | os.PathLike) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _regular(path: str | os.PathLike, flags: int) -> int:
    """The handle of a regular file."""
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, _LINK, str(path)) from None
        if error.errno == errno.ENXIO:  # a socket
            raise OSError(errno.EINVAL, _ODD, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, _ODD, str(path))
    return handle


def _check_replaceable(path: Path, new: bool) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, _LINK, str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, _ODD, str(path))
    if new:
        raise FileExistsError(errno.EEXIST, "the file exists, and is not overwritten", str(path))


def _rename_new(partial: Path, path: Path) -> None:
    """Give a file a name that nothing has."""
    try:
        os.link(partial, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _check_replaceable(path, new=True)
        os.replace(partial, path)
