"""Job numbers whose ranks can meet: what a job is called decides its port."""

import socket
from collections.abc import Callable
from random import SystemRandom


def free_job(port_of: Callable[[int], int]) -> int:
    """A job's number whose port nobody on this machine listens at."""
    while True:
        job = SystemRandom().randrange(10**6)
        with socket.socket() as probe:
            try:
                probe.bind(("", port_of(job)))
            except OSError:
                continue
        return job
