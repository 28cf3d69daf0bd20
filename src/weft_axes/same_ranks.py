"""Several layouts on the same ranks: a second one bound to the ranks of the first."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from weft.comm.processes import ProcessTransport
from weft.comm.threads import Post, ThreadTransport
from weft.errors import DeclarationError
from weft.layout import Layout


def bind_on_same_ranks(layout: Layout, other: Layout) -> Layout:
    """`other`, bound on the ranks of `layout`; all of them call this.

    >>> bind_on_same_ranks(Layout.single(), Layout.single()).rank
    0
    """
    if other.transport is not None:
        return other
    if math.prod(other.mesh.values()) != layout.world_size:
        other = other.resolve(layout.world_size)
    if isinstance(layout.transport, ThreadTransport):
        sizes = dict(other.mesh)
        post = _Room(layout.transport.post, tuple(sizes.items()))
        return other.on(ThreadTransport(sizes, layout.rank, post))
    if layout.device_mesh is None:
        raise DeclarationError(f"{layout.source}: bind the layout before another on its ranks")
    if layout.world_size != dist.get_world_size():
        raise DeclarationError(
            f"{layout.source} is bound to {layout.world_size} of {dist.get_world_size()} ranks;"
            f" bind {other.source} to a slice of the same mesh yourself, other.bind(mesh[...]), and"
            " give that"
        )
    assert isinstance(layout.bound, ProcessTransport)
    return other.build(layout.device_mesh.device_type, layout.bound.timeout.total_seconds())


class _Room(Post):
    """Mailboxes of a second mesh among the same threads, apart from those of the first."""

    def __init__(self, post: Post, name: tuple) -> None:
        self.size, self.timeout, self._post, self._name = post.size, post.timeout, post, name

    def put(self, key: tuple, item: Any) -> None:
        self._post.put((self._name, *key), item)

    def take(self, key: tuple, who: str) -> Any:
        return self._post.take((self._name, *key), who)

    def fail(self, message: str) -> None:
        self._post.fail(message)
