"""A mesh that is bound: transports between ranks, collectives, joining and launching ranks."""

from ..declare.mesh import coordinates, index_at, places, rank_at
from ..declare.traffic import Traffic
from .processes import ProcessTransport
from .threads import run_threads
from .transport import Alone, P2PBatch, Shuffle, Transport, Watch, alive

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
