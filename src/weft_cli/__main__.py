"""`weft`, and `python -m weft_cli`: the command line, or how to install it."""

import sys

try:
    from .cli import app
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich"):
        raise
    sys.exit(f"weft's commands need {error.name}: pip install 'weft-attention[cli]'")

if __name__ == "__main__":
    app()
