"""Processes: their environment, starting and watching ranks, the trace that outlives them."""
