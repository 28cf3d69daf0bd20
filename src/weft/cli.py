"""The command line: `weft list`, `explain`, `check`, `bench`, `train`, `predict`, and others."""

from __future__ import annotations

from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from . import __version__
from ._terminal import Terminal
from .commands.bench import bench
from .commands.blackbox import blackbox
from .commands.check import check
from .commands.diff import diff
from .commands.explain import explain
from .commands.listing import list_
from .commands.plan import plan
from .commands.predict import predict
from .commands.rates import rates
from .commands.simulate import simulate
from .commands.train import train
from .commands.verify import verify
from .errors import WeftError
from .launch.environment import already_launched


class _Group(TyperGroup):
    """Shows an error of weft as one readable message, exit code 1."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer makes no other
        try:
            return super().invoke(ctx)
        except (WeftError, FloatingPointError) as error:
            place = already_launched()
            who = f"rank {place.rank}: " if place else ""
            message = f"[bold red]error:[/] {who}{escape(str(error))}"
            Terminal(stderr=True).print(message, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            Terminal(stderr=True).print("stopped")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Attention over several axes on an N-D device mesh: every mesh dim plays one role, "
    "declared in a file; the communication follows.\n\n"
    "Start with `weft list layouts`, then `weft explain tile-2x2`, then `weft check tile-2x2`; "
    "nothing of it needs a GPU. Every command has examples in its --help.",
)
app.command("list")(list_)
app.command()(explain)
app.command()(plan)
app.command()(check)
app.command()(rates)
app.command()(simulate)
app.command()(bench)
app.command()(train)
app.command()(predict)
app.command()(verify)
app.command()(diff)
app.command()(blackbox)


def _version(show: bool) -> None:
    if show:
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
