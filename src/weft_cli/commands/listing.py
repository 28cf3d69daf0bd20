"""`weft list`: the strategies, layouts, models and hardware that ship."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from weft.declare import catalog
from weft.declare.hardware import Hardware
from weft.declare.strategy import Strategy
from weft.layout import Layout
from weft_cli.inspect import support as kernel_support
from weft_cli.mask_names import MASKS

from ..inspect.printer import print_table


def _strategy(name: str) -> tuple[str, str]:
    strategy = Strategy.load(name)
    about = strategy.about.split("; ")[0].split(": ")[0].rstrip(".")
    return ", ".join(strategy.all_rules) or "-", about


def _layout(name: str) -> tuple[str, str, str]:
    layout = Layout.load(name)
    mesh = " x ".join(f"{d} {size}" for d, size in layout.mesh.items())
    return mesh or "-", ", ".join(layout.attend), layout.about


def _model(name: str) -> tuple[str, str]:
    data, _ = catalog.read_declaration("models", name)
    return ", ".join(data.get("axes", ())), data.get("about", "")


def _machine(name: str) -> tuple[str, str]:
    machine = Hardware.load(name)
    return ", ".join(level.name for level in machine.level), machine.about


#: Kind -> its title, what a table says of each beside its name, and how that is read.
KINDS: dict[str, tuple[str, tuple[str, ...], Callable[[str], tuple[str, ...]]]] = {
    "strategies": ("strategies", ("rules", "about"), _strategy),
    "layouts": ("layouts", ("mesh", "attends", "about"), _layout),
    "models": ("models", ("axes", "about"), _model),
    "masks": ("masks, as --mask takes them", ("who sees whom",), lambda name: (MASKS[name],)),
    "hardware": ("hardware, as --hardware takes it", ("levels", "about"), _machine),
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
    if support:
        typer.echo(f"{kernel_support.markdown()}\n{kernel_support.here()}", nl=False)
        return
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r}; known: {', '.join(KINDS)}")
    for each, (title, columns, about) in KINDS.items():
        if kind in (None, each):
            names = MASKS if each == "masks" else catalog.names(each)
            print_table(title, ("name", *columns), [(name, *about(name)) for name in names])
