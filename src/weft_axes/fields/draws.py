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
    if generator is not None:
        state = generator.get_state()
    elif x.device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(x.device).get_rng_state(x.device)
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7).hexdigest()
    if alone:
        dims = tuple(d for axis in region.axes for d in region.layout.shard_dims(axis))
        bound.agree(f"the generator of {name}: give ranks one seed; its state", digest, dims)
    return int(digest, 16)


__all__ = ["generator_state"]
