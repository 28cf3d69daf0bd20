"""Starting and ending torch.distributed, and comparing layouts between ranks."""

from __future__ import annotations

import atexit
import datetime
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._digest import number_of
from .._torch import is_fake, nccl_options
from ..declare.mesh import coordinates
from ..errors import DeclarationError, RankError, ShapeError
from ..launch import failures
from ..launch.environment import STORE, already_launched, number, tell_torch
from .control import control_group
from .meeting import await_ranks, store_of_environment
from .start import name_of_start
from .transport import TEXT, disagreement


def init_process_group(device_type: str, timeout: datetime.timedelta) -> None:
    """Join the ranks that a launcher announced, or be the only one; no-op if already done."""
    if dist.is_initialized():
        return
    tell_torch()
    backend: str = "gloo"
    options: dict[str, Any] = {}
    device: torch.device | None = None
    if device_type == "cuda":
        device = torch.device("cuda", gpu_of(os.environ, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        # With its device the group connects at once, not in its first message.
        backend, options = "nccl", {"device_id": device, "pg_options": nccl_options(timeout)}
    store, rank, size = _announced(timeout)
    if device is not None and size > 1:
        gpu = f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
        refuse_shared_gpu(store, rank, size, gpu)
    place: dict[str, Any] = {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timeout, **place, **options)
    atexit.register(_close_process_group)


def _announced(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """The store in which ranks meet, this one's number, and how many a launcher announced."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    already_launched()  # refuses variables that are no numbers
    rank = number(os.environ, "RANK", 0)
    try:
        size = number(os.environ, "WORLD_SIZE", 1)
        if file := os.environ.get(STORE):
            shared = dist.FileStore(file, size)
            shared.set_timeout(timeout)
            await_ranks(shared, rank, size, timeout)
            return shared, rank, size
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return _store_of_start(rank, size, timeout), rank, size
        store = store_of_environment(rank, size, timeout)
    except RankError:
        raise
    except (RuntimeError, ValueError) as error:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RankError(
            f"rank {rank} cannot reach the store where ranks meet, at {where} (MASTER_ADDR,"
            f" MASTER_PORT), within {timeout.total_seconds():g} s: {failures.reason(error)}; start"
            " all ranks together, with the address of rank 0's machine and a free port"
        ) from error
    store.set_timeout(timeout)
    await_ranks(store, rank, size, timeout)
    return dist.PrefixStore("default_pg", store), rank, size


def refuse_shared_gpu(store: dist.Store, rank: int, size: int, gpu: str) -> None:
    """Raise `DeclarationError` on every rank if two of them have the same GPU.

    NCCL refuses that in its own words, or hangs.
    """
    prefix = f"weft/gpus/{store.add(f'weft/gpus/{rank}', 1)}"  # a process may start torch again
    sharing = store.add(f"{prefix}/{gpu}", 1)
    store.set(f"{prefix}/{gpu}/{sharing}", str(rank))
    if sharing > 1:  # ranks of several GPUs may come here: the first to do so names its own
        store.compare_set(f"{prefix}/shared", "", gpu)
    if store.add(f"{prefix}/arrived", 1) == size:
        store.set(f"{prefix}/all", "")
    store.get(f"{prefix}/all")
    if store.check([f"{prefix}/shared"]):
        shared = store.get(f"{prefix}/shared").decode()
        sharing = store.add(f"{prefix}/{shared}", 0)
        ranks = sorted(int(store.get(f"{prefix}/{shared}/{i + 1}")) for i in range(sharing))
        raise DeclarationError(
            f"ranks {ranks} share one GPU, {shared}, and NCCL takes one rank of each: start as many"
            " processes per node as there are GPUs, and show each process its own one or all of"
            " them (CUDA_VISIBLE_DEVICES); build('cpu') runs any number of ranks without a GPU"
        )


def gpu_of(environ: Mapping[str, str], count: int) -> int:
    """The index, among the `count` visible GPUs, of the one that is this process's.

    Launchers either show every process all GPUs of its node, or each its own one only.

    >>> own = {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}
    >>> gpu_of({"LOCAL_RANK": "3"}, 8), gpu_of(own, 1)
    (3, 0)
    """
    if count == 1 and "CUDA_VISIBLE_DEVICES" in environ:
        return 0
    local = number(environ, "LOCAL_RANK", 0)
    processes = max(local + 1, number(environ, "LOCAL_WORLD_SIZE", 0))
    if processes > count:
        raise DeclarationError(
            f"process {local} of this node, one of {processes} at least, sees {count} GPU(s); start"
            " as many processes per node as there are GPUs, or show each process its own one"
            " (CUDA_VISIBLE_DEVICES)"
        )
    return local


def _store_of_start(rank: int, size: int, timeout: datetime.timedelta) -> dist.Store:
    """The store that torch's elastic launcher keeps, under the name of this start of all ranks.

    It outlives its ranks: those that are started again would find entries of the dead ones there,
    such as addresses where nobody listens any more.
    """
    address = os.environ.get("MASTER_ADDR", "localhost")
    port = number(os.environ, "MASTER_PORT", 0)
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    name = name_of_start(store, rank, size, timeout)
    return dist.PrefixStore(f"weft/start-{name}", store)


def _close_process_group() -> None:
    """Close the process group that weft opened: gloo's threads must not outlive the interpreter."""
    if dist.is_initialized():
        dist.destroy_process_group()


_meshes: dict[tuple, tuple[object, DeviceMesh]] = {}


def world_mesh(
    device_type: str, sizes: Mapping[str, int], timeout: datetime.timedelta
) -> DeviceMesh:
    """The `DeviceMesh` of all ranks, by name and size of its dims: made once, with its groups.

    On GPUs every mesh dim has a group of its own with `timeout`, on a stream that goes before
    kernels, so that messages move while attention computes.
    """
    key = (device_type, *sizes.items(), *([timeout] if device_type == "cuda" else []))
    world, mesh = _meshes.get(key, (None, None))
    if world is not dist.group.WORLD:
        local: dict[Any, Any] | None = None
        if device_type == "cuda" and not is_fake(dist.group.WORLD):
            local = {name: ("nccl", nccl_options(timeout)) for name in sizes}
        mesh = init_device_mesh(
            device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=local
        )
        _meshes[key] = dist.group.WORLD, mesh
    assert mesh is not None
    return mesh


def node(environ: Mapping[str, str] | None = None) -> str:
    """The node this process runs on, as its launcher numbers them; without a launcher the host.

    >>> node({"GROUP_RANK": "1"}), node({"RANK": "5", "LOCAL_WORLD_SIZE": "4"})
    ('node 1', 'node 1')
    >>> node({"SLURM_NODEID": "2"})
    'node 2'
    """
    env = os.environ if environ is None else environ
    if "GROUP_RANK" in env:
        return f"node {env['GROUP_RANK']}"
    if "RANK" in env and "LOCAL_WORLD_SIZE" in env:
        return f"node {number(env, 'RANK', 0) // max(1, number(env, 'LOCAL_WORLD_SIZE', 1))}"
    if "SLURM_NODEID" in env:
        return f"node {env['SLURM_NODEID']}"
    return f"host {socket.gethostname()}"


def check_inside_node(
    dims: Sequence[str], nodes: Mapping[int, str], sizes: Mapping[str, int], source: str
) -> None:
    """Raise `DeclarationError` if a mesh dim of `dims` spans nodes; `nodes` says where ranks run.

    Ranks number the mesh row by row, so the inner dims of a mesh are the ones that fit into a node.
    """
    for dim in dims:
        lines: dict[tuple, list[int]] = {}
        for rank in nodes:
            coords = coordinates(sizes, rank)
            lines.setdefault(tuple(c for d, c in coords.items() if d != dim), []).append(rank)
        for ranks in lines.values():
            spanned = sorted({nodes[rank] for rank in ranks})
            if len(spanned) > 1:
                largest = max(list(nodes.values()).count(n) for n in spanned)
                raise DeclarationError(
                    f"{source}: inside_node lists mesh dim {dim!r}, but ranks {ranks} along it run "
                    f"on {', '.join(spanned)}; start {sizes[dim]} or a multiple of it per node "
                    f"(there are {largest}), and put {dim!r} last in [mesh] {dict(sizes)}"
                )


#: How often this process agreed with the world: failures are named by it.
_met = itertools.count()


def compare_over_world(label: str, detail: str, timeout: datetime.timedelta) -> None:
    """Raise `ShapeError` on every rank of the world unless `detail` is the same on all of them."""
    texts = gather_over_world(label, detail, timeout)
    if len(set(texts.values())) > 1:
        raise ShapeError(disagreement(label, texts))


def gather_over_world(label: str, detail: str, timeout: datetime.timedelta) -> dict[int, str]:
    """The `detail` of every rank of the world; `RankError` where not all of them come."""
    step, world = next(_met), range(dist.get_world_size())
    group = control_group(world, timeout)
    try:
        answer = group.vote(number_of(label), timeout)
        texts = group.all_gather_text(f"{label}{TEXT}{detail}", timeout)
        answer()
    except RuntimeError as error:
        absent = failures.missing_ranks("world", step, dist.get_rank(), world)
        raise RankError(
            f"{failures.who(absent)} ended or did not agree on {label} within"
            f" {timeout.total_seconds():g} s: {failures.reason(error)}"
            if absent
            else f"ranks cannot agree on {label}, as an earlier failure closed the connections"
            f" between them ({failures.reason(error)}); start them anew"
        ) from error
    parts = {rank: text.partition(TEXT) for rank, text in texts.items()}
    if any(part[0] != label for part in parts.values()):
        next(group.passes)  # another call counted one
        raise ShapeError(disagreement("a call", {rank: part[0] for rank, part in parts.items()}))
    return {rank: part[2] for rank, part in parts.items()}
