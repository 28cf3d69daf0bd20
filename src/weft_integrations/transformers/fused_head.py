"""TRL's fused head and loss, which treats rows (T, d) of hidden states one by one."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from weft_axes.fields import Field
from weft_axes.fields.islands import on_positions

from .. import Foreign

_FUNCTION = "_ChunkedLogProbFunction"


def fused_head_by_rows() -> None:
    """Have the function that computes TRL's head take fields: each rank its own rows."""
    module: Foreign = sys.modules.get("trl.trainer.utils")
    stock: Foreign = getattr(module, _FUNCTION, None)
    if stock is None or hasattr(stock, "stock"):
        return

    class ByRows:
        """The same function, in one call of this rank's rows and labels."""

        @staticmethod
        def apply(states: Tensor, weight: Tensor, bias: Any, labels: Tensor, *rest: Any) -> Any:
            if not isinstance(states, Field):
                return stock.apply(states, weight, bias, labels, *rest)

            def run(x: Tensor, y: Tensor) -> Any:
                return stock.apply(x, weight, bias, y, *rest)

            return on_positions("TRL's fused head", run, (states, labels), {})

    ByRows.stock = stock  # type: ignore[attr-defined]
    setattr(module, _FUNCTION, ByRows)


__all__ = ["fused_head_by_rows"]
