"""The commands behind `weft`, one module each."""
