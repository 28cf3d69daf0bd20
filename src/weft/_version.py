"""The version of weft, which ranks of one run must share."""

__version__ = "0.1.0"
