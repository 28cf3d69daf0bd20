"""`python -m weft`, for `torchrun -m weft`: the command line of `weft_cli`."""

from weft_cli.__main__ import app

if __name__ == "__main__":
    app()
