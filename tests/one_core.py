"""Ranks that are threads run on one core, whichever it is when they begin.

Every operation of torch hands the interpreter's lock on; between two cores each of these is a call
of the kernel, where exhaustive tests then spend more than half of their time.
"""

import contextlib
import ctypes
import os
import re
import sys
import threading


def keep_ranks_together() -> None:
    """From now on; other threads run where they like, and what is begun by those."""
    if sys.platform != "linux":
        return
    current = ctypes.CDLL(None).sched_getcpu
    start, run = threading.Thread.start, threading.Thread.run
    cores = [current()]  # of the run that began last

    def started(thread: threading.Thread) -> None:
        if thread.name == "rank0":
            cores[:] = [current()]
        start(thread)

    def ran(thread: threading.Thread) -> None:
        if re.fullmatch(r"rank\d+", thread.name):
            with contextlib.suppress(OSError, ValueError):  # it may not: it runs where it likes
                os.sched_setaffinity(0, cores)
        run(thread)

    threading.Thread.start, threading.Thread.run = started, ran
