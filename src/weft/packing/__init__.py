"""Packed documents assigned to ranks, with balanced work."""
