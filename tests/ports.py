"""Ports where ranks can meet, and job numbers, which decide one."""

import socket
from collections.abc import Callable
from random import SystemRandom


def free_port() -> int:
    """One below those that the system hands out (from 32768): no client takes it meanwhile."""
    return 20000 + free_job(lambda job: 20000 + job % 10000) % 10000


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
