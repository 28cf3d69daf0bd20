"""Recurrences over a split axis: fragments and states, planned, exchanged, proven."""
