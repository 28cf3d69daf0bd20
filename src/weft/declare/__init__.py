"""Declarations: text becomes validated, immutable strategies, layouts and models; no ranks."""
