"""Random numbers of fields: every rank draws those of the whole tensor, as one device does."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from weft.comm.threads import ThreadTransport
from weft.errors import UnsupportedError

from .place import FieldRegion


def generator_state(name: str, region: FieldRegion, x: Tensor, generator: Any, alone: bool) -> int:
    """A digest of the generator that a function is about to draw from, the same on all ranks.

    Ranks compare it where they exchange next; where nothing is split (`alone`), at once.
    """
    bound = region.layout.bound
    if x.is_meta:  # which has no numbers
        return 0
    if region.axes and isinstance(bound, ThreadTransport):
        raise UnsupportedError(
            f"{name} draws random numbers of weft.Fields: ranks that are threads share torch's"
            " generator, so that each would draw others; run ranks as processes"
        )
    state = state_on(x.device) if generator is None else generator.get_state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7).hexdigest()
    if alone:
        dims = tuple(d for axis in region.axes for d in region.layout.shard_dims(axis))
        bound.agree(f"the generator of {name}: give ranks one seed; its state", digest, dims)
    return int(digest, 16)


def state_on(device: torch.device) -> Tensor:
    """The state of torch's own generator of a device."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


__all__ = ["generator_state", "state_on"]
