"""Model files and run files: text becomes validated, immutable declarations."""
