"""`weft list`: the strategies, layouts, models and hardware that ship."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.kernels import support as kernel_support

from ..inspect import tables
from .options import console

KINDS = {
    "strategies": tables.strategies,
    "layouts": tables.layouts,
    "models": tables.models,
    "masks": tables.masks,
    "hardware": tables.hardware,
}


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="strategies, layouts, models, masks or hardware.", show_default="all of them"
        ),
    ] = None,
    support: Annotated[
        bool,
        typer.Option("--support", help="Instead: the options that each kernel supports."),
    ] = False,
) -> None:
    """Show the strategies, layouts, models, masks and hardware that ship.

    A strategy is the role of a mesh dim in attention. A layout is a mesh, the
    placement of tensors on it, and a strategy for each attended axis. A model
    knows nothing of either. Any of the three may also be a .toml file of your
    own.

    Examples:

        weft list

        weft list layouts

        weft list --support
    """
    out = console()
    if support:
        typer.echo(f"{kernel_support.markdown()}\n{kernel_support.here()}", nl=False)
        return
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r}; known: {', '.join(KINDS)}")
    for name, make in KINDS.items():
        if kind in (None, name):
            out.print(make())
