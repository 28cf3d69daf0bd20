"""The command line: its commands by name, imported when they run, and its errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

#: In the order of `weft --help`, each with the first sentence of its docstring. Of two words the
#: first names a group.
COMMANDS = {
    "list": "Show the strategies, layouts, models, masks and hardware that ship.",
    "explain call": "Show the rules, traffic, memory and work of an attention call.",
    "explain model": "Show what a training step moves and holds, layouts side by side.",
    "plan call": "Find the layout of an attention call on a machine.",
    "plan model": "Find the layout of a model file's training step on a machine.",
    "plan config": "Find how to train, or serve, a transformers model on a machine.",
    "check": "Run a layout, and compare it with softmax attention on one device.",
    "rates": "Measure this machine or cluster: for a hardware file, and for \\[rates] of a layout.",
    "train": "Train a model on a layout.",
    "verify": "Compare a transformers model on a layout with itself on one device.",
    "diff": "Name the first tensor that two layouts compute otherwise.",
    "blackbox": "Say which rank waits for whom, and where ranks diverged.",
}
GROUPS = {
    "explain": "Show what a layout moves, holds and computes. Starts nothing.",
    "plan": "Find the layout for the machine that you have, or may get. Starts nothing.",
}


def function_of(name: str) -> Callable[..., Any]:
    """The function behind a command, whose module is imported when it runs."""
    own = name.rpartition(" ")[2]
    module = "listing" if own == "list" else name.replace(" ", "_")
    found = import_module(f".commands.{module}", __package__)
    return getattr(found, "list_" if own == "list" else own)


class _Group(TyperGroup):
    """Imports a command when it runs; shows an error of weft as one message, exit code 1."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = [word for name in COMMANDS for word in name.split()]
        return sorted(super().list_commands(ctx), key=order.index)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = f"{self.name} {args[0]}" if self.name in GROUPS else args[0]
        if name in COMMANDS:
            self.commands[args[0]] = parser_of(name)
        elif self.name in GROUPS:
            known = ", ".join(f"weft {n}" for n in COMMANDS if n.startswith(f"{self.name} "))
            ctx.fail(f"No such command {args[0]!r}; there are {known}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            _show(error)
            raise typer.Exit(1) from None


def parser_of(name: str) -> Any:
    """A command with its options, imported.

    >>> [option.name for option in parser_of("verify").params][:2]
    ['model', 'config']
    """
    single = typer.Typer(**_OPTIONS)
    single.command(name.split()[-1])(_loaded(name))
    return typer.main.get_command(single)


def _loaded(name: str) -> Callable[..., Any]:
    import gc

    # Imports make a million objects that stay for good. To look through them for garbage, now and
    # again at the end, takes as long as the imports.
    gc.disable()
    try:
        return function_of(name)
    except ModuleNotFoundError as error:
        from weft.errors import lacks

        typer.echo(lacks(f"weft {name}", error), err=True)
        raise typer.Exit(1) from None
    finally:
        gc.freeze()
        gc.enable()


def _show(error: Exception) -> None:
    """Print an error of weft on one line; raise any other.

    Before a command has imported weft there are no errors of it, and a misspelt word is answered
    without torch.
    """
    errors = sys.modules.get("weft.errors")
    kinds = (FloatingPointError,) if errors is None else (FloatingPointError, errors.WeftError)
    if not isinstance(error, kinds):
        raise error
    from rich.markup import escape

    from weft._terminal import Terminal
    from weft.launch.environment import already_launched

    place = already_launched()
    who = f"rank {place.rank}: " if place else ""
    message = f"[bold red]error:[/] {who}{escape(str(error))}"
    Terminal(stderr=True).print(message, highlight=False, soft_wrap=True)


_OPTIONS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    cls=_Group,
    name="weft",
    no_args_is_help=True,
    help="Attention over several axes on an N-D device mesh: every mesh dim plays one role, "
    "declared in a file; the communication follows.\n\n"
    "Start with `weft list layouts`, `weft explain call tile-2x2`, and `weft check tile-2x2`; "
    "nothing of it needs a GPU. Every command has examples in its --help.",
    **_OPTIONS,
)
_groups = {"": app}
for _name, _help in COMMANDS.items():
    _group, _, _own = _name.rpartition(" ")
    if _group not in _groups:
        _groups[_group] = typer.Typer(
            cls=_Group, no_args_is_help=True, help=GROUPS[_group], **_OPTIONS
        )
        app.add_typer(_groups[_group], name=_group)
    _groups[_group].command(_own, help=_help)(lambda: None)


def _version(show: bool) -> None:
    if show:
        from weft import __version__

        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


if __name__ == "__main__":
    app()
