"""The command line: `weft list`, `explain`, `check`, `bench`, `train`, `predict`, and others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup


class Command(NamedTuple):
    """A command as `weft --help` lists it; its module is imported when it runs."""

    module: str
    help: str
    function: str = ""

    def load(self, name: str) -> Callable[..., Any]:
        """The function behind a command.

        Raises `ModuleNotFoundError` if a package is missing that the command needs.
        """
        module = import_module(f".commands.{self.module}", __package__)
        return getattr(module, self.function or name)


#: In the order of `weft --help`; each text is the first sentence of the function's docstring.
COMMANDS = {
    "list": Command(
        "listing",
        "Show the strategies, layouts, models, masks and hardware that ship.",
        "list_",
    ),
    "explain": Command(
        "explain",
        "Show the rules, traffic, memory and work of a layout. Starts nothing.",
    ),
    "plan": Command(
        "plan",
        "Find the layout for the machine that you have, or may get. Starts nothing.",
    ),
    "check": Command(
        "check",
        "Run a layout, and compare it with softmax attention on one device.",
    ),
    "rates": Command(
        "rates",
        "Measure this machine or cluster: for a hardware file, and for \\[rates] of a layout.",
    ),
    "bench": Command(
        "bench",
        "Time layouts side by side: which is the fastest here?",
    ),
    "train": Command(
        "train",
        "Train a model on a layout.",
    ),
    "predict": Command(
        "predict",
        "Predict the classes of rows from rows whose class is known.",
    ),
    "verify": Command(
        "verify",
        "Compare a transformers model on a layout with itself on one device.",
    ),
    "diff": Command(
        "diff",
        "Name the first tensor that two layouts compute otherwise.",
    ),
    "blackbox": Command(
        "blackbox",
        "Say which rank waits for whom, and where ranks diverged.",
    ),
}


class _Group(TyperGroup):
    """Imports a command when it runs; shows an error of weft as one message, exit code 1."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = parser_of(args[0])
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
    single.command(name)(_loaded(name))
    return typer.main.get_command(single)


def _loaded(name: str) -> Callable[..., Any]:
    import gc

    # Imports make a million objects that stay for good. To look through them for garbage, now and
    # again at the end, takes as long as the imports.
    gc.disable()
    try:
        return COMMANDS[name].load(name)
    except ModuleNotFoundError as error:
        typer.echo(lacks(name, error), err=True)
        raise typer.Exit(1) from None
    finally:
        gc.freeze()
        gc.enable()


#: The extra that brings a package which a command imports.
EXTRAS = {"sklearn": "tables", "pandas": "tables", "transformers": "transformers"} | dict.fromkeys(
    ("typer", "rich", "matplotlib", "tensorboard"), "cli"
)


def lacks(name: str, error: ModuleNotFoundError) -> str:
    """The message of a command whose package is not installed.

    >>> lacks("train", ModuleNotFoundError(name="tensorboard"))
    "weft train needs tensorboard: pip install 'weft-attention[cli]'"
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        raise error
    return f"weft {name} needs {package}: pip install 'weft-attention[{EXTRAS[package]}]'"


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
    "Start with `weft list layouts`, then `weft explain tile-2x2`, then `weft check tile-2x2`; "
    "nothing of it needs a GPU. Every command has examples in its --help.",
    **_OPTIONS,
)
for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.help)(lambda: None)


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
