"""Transports move chunks between ranks: process groups, or threads of one process."""

from .base import Alone, Parcel, Shuffle, Traffic, Transport, Watch, alive, coordinates, rank_at
from .process import ProcessTransport
from .threads import run_threads

__all__ = [
    "Alone",
    "Parcel",
    "ProcessTransport",
    "Shuffle",
    "Traffic",
    "Transport",
    "Watch",
    "alive",
    "coordinates",
    "rank_at",
    "run_threads",
]
