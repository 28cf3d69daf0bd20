"""A mesh that is bound: transports between ranks, collectives, joining and launching ranks."""

from .grid import coordinates, index_at, places, rank_at
from .processes import ProcessTransport
from .threads import run_threads
from .transport import (
    Alone,
    P2PBatch,
    Shuffle,
    Traffic,
    Transport,
    Watch,
    alive,
)

__all__ = [
    "Alone",
    "P2PBatch",
    "ProcessTransport",
    "Shuffle",
    "Traffic",
    "Transport",
    "Watch",
    "alive",
    "coordinates",
    "index_at",
    "places",
    "rank_at",
    "run_threads",
]
