"""Context groups: the ranks that hold the same rows and split their tokens."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft.comm.transport import disagreement
from weft.comm.world import gather_over_world, init_process_group, world_mesh
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.launch.environment import wait_limit
from weft.layout import Layout

if TYPE_CHECKING:
    from torch.utils.data import Dataset, DistributedSampler

#: The mesh dim of data parallelism, which the layout does not name.
REPLICAS = "replicas"


@dataclass(frozen=True)
class ContextGroup:
    """The context group of this rank, among those of the world.

        world of 4, layout "tokens: ring=2"      rank   0  1  2  3
                                                 index  0  0  1  1      size 2, count 2

    Attributes:
        size: ranks of a group.
        index: of this rank's group.
        count: groups of the world; each has other rows.
        leads: this rank is the first of its group.
    """

    size: int
    index: int
    count: int
    leads: bool

    @classmethod
    def of(cls, layout: Layout) -> ContextGroup:
        """The group that a bound layout makes of the world.

        Refuses a layout that splits rows, is not bound on processes, or whose ranks are not
        consecutive and aligned ones of the world.
        """
        _check_rows(layout)
        if not layout.bound.world_ranks or not layout.mesh:
            rank = dist.get_rank() if dist.is_initialized() else 0
            return cls(1, rank, _world(), True)
        if layout.device_mesh is None:
            raise DeclarationError(
                f"{layout.source}: a trainer runs on processes; bind the layout with "
                "trainers.layout"
            )
        ranks = sorted(layout.device_mesh.mesh.flatten().tolist())
        size, world = len(ranks), _world()
        if ranks != [*range(ranks[0], ranks[0] + size)] or ranks[0] % size or world % size:
            raise DeclarationError(
                f"{layout.source}: the ranks of a context group must be consecutive, as loaders "
                f"count them (0..{size - 1}, {size}..{2 * size - 1}, ...), found {ranks} in a "
                f"world of {world}; make the layout's dims the innermost of the mesh, as "
                "trainers.layout does"
            )
        return cls(size, ranks[0] // size, world // size, dist.get_rank() == ranks[0])


def layout(
    text: str | Layout, device_type: str | None = None, timeout: float | None = None
) -> Layout:
    """A layout of context groups, bound on a world that has as many of them as fit.

        world of 4, "tokens: ring=2"     mesh ("replicas", "ring") of 2 x 2
                                         ranks 0, 1 share rows and split tokens; so do ranks 2, 3

    Data parallelism over the groups stays the trainer's: the layout does not name it. All ranks
    call it. The process group is joined first if nobody has done so.

    Args:
        text: the name of a layout, a path, one line such as `"tokens: ring=4"`, or a `Layout`.
        device_type: "cpu" or "cuda"; default cuda where there is one.
        timeout: seconds that a wait for another rank may last; default 300, or `WEFT_TIMEOUT`.

    Raises:
        DeclarationError: on every rank: the world is no multiple of the layout's ranks.
        UnsupportedError: the layout splits rows.

    Example::

        layout = trainers.layout("tokens(zigzag): ring=4")          # 8 ranks: two groups of 4
        layout = trainers.layout("tokens: ring=2 x ulysses=2")

    >>> layout(Layout.single()).mesh  # one process has no groups to make
    {}
    """
    declared = text if isinstance(text, Layout) else Layout.named(text)
    _check_rows(declared)
    if not declared.mesh:
        return declared
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    limit = datetime.timedelta(seconds=wait_limit(timeout))
    init_process_group(device_type, limit)
    if -1 in declared.mesh.values():
        declared = declared.resolve(_world())
    ranks = declared.world_size
    if _world() % ranks:
        raise DeclarationError(
            f"{declared.source}: mesh {dict(declared.mesh)} has {ranks} ranks, of which a world "
            f"of {_world()} is no multiple; start {ranks} processes, or a multiple of them"
        )
    if REPLICAS in declared.mesh:
        raise DeclarationError(
            f"{declared.source}: the mesh dim {REPLICAS!r} is the trainer's; give it another name"
        )
    mesh = world_mesh(device_type, {REPLICAS: _world() // ranks, **declared.mesh}, limit)
    return declared.bind(mesh[tuple(declared.mesh)], timeout=timeout)


def compare_arguments(values: Mapping[str, str], processes: int) -> None:
    """Raise `ShapeError` on every rank of the world unless these are the same on all of them.

    Ranks whose arguments differ make other numbers of calls, and would wait for each other.
    `processes` are those that train together: the world, or this one alone.
    """
    if processes == 1:
        return
    label, limit = "the arguments of a trainer", datetime.timedelta(seconds=wait_limit())
    texts = gather_over_world(label, json.dumps(dict(values)), limit)
    rows = {rank: json.loads(text) for rank, text in texts.items()}
    names = dict.fromkeys(name for row in rows.values() for name in row)
    wrong = [name for name in names if len({row.get(name) for row in rows.values()}) > 1]
    if wrong:
        differing = {
            rank: ", ".join(f"{name}={row.get(name)}" for name in wrong)
            for rank, row in rows.items()
        }
        raise ShapeError(disagreement(label, differing))


def sampler(
    dataset: Dataset, layout: Layout, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler:
    """torch's `DistributedSampler` over context groups: their ranks get the same rows.

    For Lightning Fabric, with `fabric.setup_dataloaders(loader, use_distributed_sampler=False)`,
    and for any `DataLoader` of your own.

    Args:
        dataset: has a length.
        layout: bound, of the context group alone.
        shuffle: rows in an order drawn from `seed` and the epoch, `sampler.set_epoch(epoch)`.
        seed: the same on every rank.
        drop_last: leave out rows that do not fill the last round over groups, instead of giving
            first ones twice.

    Raises:
        DeclarationError: as for `attach`.
        UnsupportedError: the layout splits rows.

    >>> import weft
    >>> list(sampler(range(3), weft.Layout.single(), shuffle=False))
    [0, 1, 2]
    """
    from torch.utils.data import DistributedSampler

    group = ContextGroup.of(layout)
    return DistributedSampler(dataset, group.count, group.index, shuffle, seed, drop_last)


def _check_rows(layout: Layout) -> None:
    if layout.size("batch") > 1:
        raise UnsupportedError(
            f"{layout.source}: mesh dims {layout.shard_dims('batch')} split rows, which the "
            "trainer does itself over the other ranks; leave batch out of the layout"
        )


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
