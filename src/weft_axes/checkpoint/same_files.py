"""Agreement on files: all ranks of a layout read one file, or equal copies on several disks.

    rank 0, rank 1    host a: one file, which rank 0 reads for both    sha256 5be1f07a...
    rank 2            host b: a copy of its own                        sha256 5be1f07a...

A stale copy on one node gives results that are wrong on all ranks alike, which nothing else tells.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from weft._opening import check_folder
from weft.layout import Layout

from .folder import (
    INDEX,
    CheckpointError,
    Index,
    digest,
    failing,
    index_digest,
    read_index,
    verify_folder,
)
from .shards import everywhere


class DifferentFilesError(CheckpointError):
    """Ranks read files of one name and other contents."""


def agree_on_file(layout: Layout, path: Path, name: str = "") -> None:
    """Raise on every rank unless all read the same bytes at `path`; all ranks call this.

    Of ranks that see one file the first reads it, and nobody where all do.
    """
    identities = everywhere(layout, lambda: _identity(path))
    _, leader, count = _sharing(identities, layout.rank)
    if count == len(identities):
        return
    found = everywhere(layout, lambda: digest(path) if leader == layout.rank else None)
    _compare(layout, name or str(path), found)


def agreed_index(folder: Path, layout: Layout) -> Index:
    """The index of a folder of tensors, the same on every rank, which verify its files together."""
    found: list[Index] = []

    def look() -> list:
        with failing(folder, "read"):
            check_folder(folder)
        found.append(read_index(folder))
        return [index_digest(found[0]), _identity(folder / INDEX)]

    rows = everywhere(layout, look)
    _compare(layout, str(folder), [row[0] for row in rows])
    place, _, count = _sharing([row[1] for row in rows], layout.rank)
    names = sorted(found[0].files)[place::count]
    everywhere(layout, lambda: verify_folder(folder, found[0], names))
    return found[0]


def _identity(path: Path) -> list:
    """Identity of a file, equal on ranks that see the same one."""
    with failing(path, "read"):
        status = path.stat()
    return [socket.gethostname(), status.st_dev, status.st_ino]


def _sharing(identities: Sequence[list], rank: int) -> tuple[int, int, int]:
    """Place of a rank among those that see its file, the first of these, and their number."""
    sharing = [r for r, identity in enumerate(identities) if identity == identities[rank]]
    return sharing.index(rank), sharing[0], len(sharing)


def _compare(layout: Layout, name: str, digests: Sequence[str | None]) -> None:
    by_rank = {rank: text for rank, text in enumerate(digests) if text is not None}
    if len({*by_rank.values()}) > 1:
        shown = {rank: f"sha256 {text[:16]}" for rank, text in by_rank.items()}
        error = layout.bound.disagreement(f"the content of {name}", shown)
        raise DifferentFilesError(
            f"{error}\na rank reads a stale or another copy: give all ranks one folder that they"
            " share, or copy it anew to every disk"
        )
