"""`weft`, and `python -m weft_cli`: the command line, or how to install it."""

import sys

try:
    from .cli import app
except ModuleNotFoundError as error:
    from weft.errors import lacks

    sys.exit(lacks("the command line of weft", error))

if __name__ == "__main__":
    app()
