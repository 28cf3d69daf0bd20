"""`weft`, and `python -m weft`, for `torchrun -m weft`."""

import gc

# Imports make a million objects that stay for good. To look through them for garbage, now and again
# at the end, takes as long as the imports.
gc.disable()

from .cli import app  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    app()
