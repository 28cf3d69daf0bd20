"""Other people's models and trainers on a layout: transformers, diffusers, TabPFN, TabICL, TRL."""

from typing import Any, TypeAlias

#: A module of another package, whose attributes are in no type of weft.
Foreign: TypeAlias = Any
