"""The orders in which the tokens of an axis may lie, by name; `weft.plan.order` computes them."""

from __future__ import annotations

from ..errors import DeclarationError, did_you_mean

ORDER_NAMES = ("contiguous", "zigzag", "striped")


def check_order(order: str) -> str:
    """The order's name, or `DeclarationError` with the known ones."""
    if order not in ORDER_NAMES:
        raise DeclarationError(f"order {order!r}{did_you_mean(order, ORDER_NAMES)}")
    return order
