"""Lower bounds on the seconds of messages at every card and uplink that they pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ..declare.hardware import Hardware


def link_seconds(
    hardware: Hardware, nbytes: Mapping[int, float], ranks: int
) -> dict[tuple[str, str], float]:
    """Seconds that every link is busy where each of some ranks sends so many bytes per level.

    A rank's card carries what the ranks that share it send; an uplink what a whole group of the
    level below sends. All links work side by side, so the largest is a lower bound of the time.

    Args:
        nbytes: that one rank sends, by the number of the level.
        ranks: how many there are in all.

    Returns:
        Seconds by level and kind of link, "card" or "uplink".

    >>> two = Hardware.from_dict({"device": {"flops": 1e12}, "level": [
    ...     {"name": "node", "ranks": 4, "rate": 8e9},
    ...     {"name": "cluster", "through": True, "uplink": 2e9}]})
    >>> link_seconds(two, {1: 4e9}, 16)
    {('cluster', 'uplink'): 8.0, ('node', 'card'): 0.5}
    """
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for number, sent in nbytes.items():
        for i in range(number, -1, -1):
            level = hardware.level[i]
            if level.uplink:
                below = min(hardware.widths[i - 1] if i else 1, ranks)
                seconds[level.name, "uplink"] += below * sent / level.uplink
            if level.rate is not None:
                seconds[level.name, "card"] += min(level.card_ranks, ranks) * sent / level.rate
            if not level.through:
                break
    return dict(seconds)


def longest(seconds: Mapping[tuple[str, str], float]) -> float:
    """Of the link that is busy longest."""
    return max(seconds.values(), default=0.0)
