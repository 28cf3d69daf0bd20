"""weft inside other code: F.scaled_dot_product_attention, transformers, torch's own tools."""

from typing import Any, TypeAlias

#: A module of another package, whose attributes are in no type of weft.
Foreign: TypeAlias = Any
