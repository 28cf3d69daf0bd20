"""The name of a start of all ranks, under which they meet in a store that outlives them.

Launchers start ranks again after one died. Each torchrun agent counts restarts for itself, and none
that follows a change of membership: counts of ranks that start together may differ, and those of
two starts may be the same. So rank 0 draws a name and lists who joined under it:

    rank 0      start = c4f1          all of c4f1 = a, b
    rank 1      reads c4f1, joins it as b, finds b on the list: goes on under c4f1
    too late    read the name of an earlier start; is not on its list, and reads again
"""

from __future__ import annotations

import datetime
import secrets
import time

import torch.distributed as dist

from ..errors import RankError

#: Seconds after which a rank that waits for a list looks whether the name is still that one.
_LOOK_AGAIN = datetime.timedelta(seconds=1)


def name_of_start(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> str:
    """The name of this start of `size` ranks, which no earlier start had; all of them call it."""
    until = time.monotonic() + timeout.total_seconds()
    token = secrets.token_hex(8)
    if rank == 0:
        store.set("weft/start", token)
        joined = {other: f"weft/{token}/{size}/{other}" for other in range(1, size)}
        if not _appear(store, list(joined.values()), until):
            absent = [other for other, key in joined.items() if not store.check([key])]
            raise RankError(
                f"ranks {absent} of {size} did not join this start within"
                f" {timeout.total_seconds():g} s; their processes ended, or are still starting"
            )
        names = [token, *(store.get(key).decode() for key in joined.values())]
        store.set(f"weft/{token}/all", ",".join(names))
        return token
    start = ""
    while time.monotonic() < until:
        if not _appear(store, ["weft/start"], until):
            break
        if (found := store.get("weft/start").decode()) != start:
            start = found
            store.set(f"weft/{start}/{size}/{rank}", token)
        everyone = f"weft/{start}/all"
        if _appear(store, [everyone], min(until, time.monotonic() + _LOOK_AGAIN.total_seconds())):
            if token in store.get(everyone).decode().split(","):
                return start
            time.sleep(0.05)  # the list of an earlier start: rank 0 of this one is not there yet
    raise RankError(
        f"rank 0 did not list rank {rank} of {size} in this start within"
        f" {timeout.total_seconds():g} s; its process ended, or is still starting"
    )


def _appear(store: dist.Store, keys: list[str], until: float) -> bool:
    """Wait for entries of the store; False if they are not all there in time."""
    left = max(0.01, until - time.monotonic())
    if not keys or store.check(keys):
        return True
    try:
        store.wait(keys, datetime.timedelta(seconds=left))
    except RuntimeError:  # DistStoreError: the time is over, or the store is gone
        return False
    return True
