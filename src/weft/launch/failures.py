"""Naming the rank that failed: the first to notice records it in the store, for all.

The store lives in some rank's process, which may be the one that is gone: every question to it is
asked on a separate thread and given up after a limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import torch.distributed as dist

from .._torch import default_store

#: Seconds that a rank which noticed a failure waits for the others, and for the store.
NOTICE, ANSWER = 1.0, 3.0


def within(seconds: float, call: Callable[[], Any], otherwise: Any = None) -> Any:
    """The result of a call; `otherwise` if it raises, or takes longer and is left running."""
    result = [otherwise]

    def work() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, too
            result[0] = call()

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0]


def missing_ranks(name: str, step: int, rank: int, ranks: Sequence[int]) -> list[int]:
    """The participants of a failed step that do not report the failure within a second."""

    def ask() -> list[int]:
        store, key = default_store(), f"weft/{name}/here/{step}"
        store.set(f"{key}/{rank}", "")
        absent, end = [r for r in ranks if r != rank], time.monotonic() + NOTICE
        while absent and time.monotonic() < end:
            absent = [r for r in absent if not store.check([f"{key}/{r}"])]
            time.sleep(0.02)
        return absent

    return within(NOTICE + ANSWER, ask, [])


def first(name: str, cause: str) -> str | None:
    """The cause of a failure as the first rank that noticed it recorded it; None without a store.

    The rank that keeps the store stays for a second, so that others learn it, too.
    """
    key = f"weft/{name}/failed"

    def record() -> str:
        return default_store().compare_set(key, "", cause).decode()

    recorded = within(ANSWER, record)
    if recorded == cause and dist.get_rank() == 0 and _is_kept_by_rank_0():
        time.sleep(NOTICE)
    return recorded


def without_store() -> str:
    """The message about the rank that failed, where the store that recorded it is gone."""
    keeper = "rank 0, whose process keeps" if _is_kept_by_rank_0() else "the process that keeps"
    return (
        f"{keeper} the store of all ranks, ended or cannot be reached, and with it who failed first"
    )


def _is_kept_by_rank_0() -> bool:
    """True if ranks met by their environment, and not at a launcher's store."""
    return "MASTER_ADDR" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def lost(ranks_lost: Callable[[], list[int]], why: str) -> list[int]:
    """Ranks that are known to be lost, looked for after a wait that ended because of `why`.

    A process that is killed closes its connections before it is gone: then it has a second.
    """
    end = time.monotonic() + (NOTICE if is_broken(why) else 0.0)
    while not (ranks := ranks_lost()) and time.monotonic() < end:
        time.sleep(0.05)
    return ranks


def is_broken(why: str) -> bool:
    """True if a wait ended because of `why` as the process at the other end closed it."""
    return re.search("clos|reset|refused|broken", why, re.IGNORECASE) is not None


def who(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> who([3]), who([1, 2]), who([])
    ('rank 3', 'ranks 1, 2', 'a rank')
    """
    return f"rank{'s' * (len(ranks) > 1)} {rank_list(ranks)}" if ranks else "a rank"


def rank_list(ranks: Sequence[int]) -> str:
    """Ranks with commas, the first eight of many."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} ranks)"


def reason(error: Exception) -> str:
    """The first line of a communication library's error, without location and advice.

    >>> reason(RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [::1]:6. This is"))
    'Connection closed by peer [::1]:6'
    """
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    line = re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", line)
    return line.split(". This is")[0].rstrip("!. ")
