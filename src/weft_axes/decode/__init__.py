"""Decoding: the rank that holds each position of a cache, and attention over it."""
