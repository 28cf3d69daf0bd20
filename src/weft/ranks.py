"""Starting and ending torch.distributed, and comparing layouts between ranks."""

from __future__ import annotations

import atexit
import datetime
import os

import torch
import torch.distributed as dist

from .errors import ShapeError


def init_process_group(device_type: str, timeout: datetime.timedelta) -> None:
    """Join the ranks that a launcher announced, or be the only one; no-op if already done."""
    if dist.is_initialized():
        return
    backend = "nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    atexit.register(_close_process_group)


def _close_process_group() -> None:
    """What weft opened it closes: gloo's threads must not outlive the interpreter."""
    if dist.is_initialized():
        dist.destroy_process_group()


def compare_layouts(fingerprint: str) -> None:
    """Raise `ShapeError` on every rank unless all ranks have the same layout."""
    said: list = [None] * dist.get_world_size()
    dist.all_gather_object(said, fingerprint)
    if len(set(said)) > 1:
        differ = next(i for i, text in enumerate(said) if text != said[0])
        raise ShapeError(
            f"the layout must be the same on every rank, but rank 0 has {said[0]} and rank "
            f"{differ} has {said[differ]}"
        )
