"""`weft train`: a model file on a layout file."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from typer.models import OptionInfo

from ..comm import blackbox, launch
from ..errors import WeftError
from ..inspect.check import dtype_named
from ..layout import Layout
from . import options
from .options import console

if TYPE_CHECKING:
    from ..nn import ModelSpec

MODELS = "the model file's"


def _of_training(what: str, default: str | bool = True, **options) -> OptionInfo:
    return typer.Option(help=what, show_default=default, rich_help_panel="Training", **options)


def _of_files(what: str, default: str, **more) -> OptionInfo:
    return typer.Option(help=what, show_default=default, rich_help_panel=options.FILES, **more)


def train(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name of a shipped model (see `weft list models`), or a path to a .toml.",
            show_default=False,
        ),
    ],
    layout: Annotated[
        str | None,
        typer.Argument(
            metavar="[LAYOUT]",
            help="Name of a shipped layout (see `weft list layouts`), a path to a .toml, or a "
            "layout on one line such as 'tokens: ring=2'.",
            show_default="one device",
        ),
    ] = None,
    steps: Annotated[int | None, _of_training("Length of the run.", MODELS, min=1)] = None,
    batch: Annotated[
        int | None, _of_training("Examples per step, over all ranks.", MODELS, min=1)
    ] = None,
    lr: Annotated[float | None, _of_training("Peak learning rate.", MODELS, min=0)] = None,
    seed: Annotated[int, _of_training("Of weights and data.", min=0, max=options.MOST_SEED)] = 0,
    dtype: Annotated[str, _of_training("Of parameters and computation.")] = "float32",
    evaluate: Annotated[bool, _of_training("Try a table model on real tables at the end.")] = True,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
    timeout: options.Timeout = options.TIMEOUT,
    restarts: Annotated[
        int, options.of_run("How often to start again, from the last checkpoint.", min=0)
    ] = 0,
    log_dir: Annotated[Path | None, _of_files("TensorBoard files.", "runs/MODEL-LAYOUT")] = None,
    checkpoint_dir: Annotated[Path | None, _of_files("Checkpoints.", "none are written")] = None,
    checkpoint_every: Annotated[
        int | None, _of_files("Steps between checkpoints.", "only the last step", min=1)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the latest checkpoint in --checkpoint-dir, written on any layout.",
            show_default=False,
            rich_help_panel=options.FILES,
        ),
    ] = False,
) -> None:
    r"""Train a model on a layout.

    Starts the ranks itself. The same seed gives the same loss curve on every
    layout. A table model is tried on real tables at the end, beside logistic
    regression and a random forest (pip install 'weft-attention\[tables]').

    Examples:

        weft train tabular tabular-2x2

        weft train causal_lm head-x-ring --steps 100

        weft train tabular tabular-2x2 --checkpoint-dir runs/a --resume

        weft train tabular tabular-2x2 --checkpoint-dir runs/a --checkpoint-every 50 --restarts 3

        torchrun --nproc-per-node 4 -m weft train tabular tabular-2x2
    """
    from ..nn import ModelSpec

    spec = ModelSpec.load(model)
    chosen = Layout.single() if layout is None else options.layout_named(layout)
    ranks = options.ranks_of(chosen, nproc)
    if checkpoint_every and checkpoint_dir is None:
        raise typer.BadParameter("--checkpoint-every needs --checkpoint-dir, the folder for them")
    _refuse_early(spec, evaluate, resume, checkpoint_dir)
    where = "one-device" if layout is None else re.sub(r"[^\w.=-]+", "-", chosen.name)
    given = {
        "steps": steps,
        "batch": batch,
        "lr": lr,
        "seed": seed,
        "dtype": dtype_named(dtype),
        "log_dir": log_dir or Path("runs") / f"{spec.name}-{where}",
        "checkpoint_dir": checkpoint_dir,
        "checkpoint_every": checkpoint_every,
        "resume": resume,
        "evaluate_tables": evaluate,
    }
    place = options.device_for(device, ranks)
    _announce(spec, chosen, ranks, place, given["log_dir"])
    job = (model, layout, place, timeout, given)
    seconds = launch.run(_rank, *job, ranks=ranks, restarts=restarts, on_restart=_print)
    if seconds is not None:
        console().print(f"trained in {seconds:.0f} s", highlight=False)


def _refuse_early(
    spec: ModelSpec, evaluate: bool, resume: bool, checkpoint_dir: Path | None
) -> None:
    """Raise for what would only be found out at the end, or on every rank."""
    from ..train.streams import check_trains

    check_trains(spec)
    if resume and checkpoint_dir is None:
        raise typer.BadParameter("--resume needs --checkpoint-dir, the folder to resume from")
    if evaluate and spec.head == "table" and importlib.util.find_spec("sklearn") is None:
        raise WeftError(
            "the real tables at the end need scikit-learn: pip install 'weft-attention[tables]', "
            "or pass --no-evaluate"
        )


def _announce(spec: ModelSpec, layout: Layout, ranks: int, place: str, log_dir: Path) -> None:
    started = launch.already_launched()
    if started is None or started.rank == 0:
        threads = launch.threads_per_rank(launch.ranks_here(ranks))
        console().print(
            f"[bold]{spec.name}[/] on [bold]{escape(layout.name)}[/]: {ranks} ranks on {place}, "
            f"{threads} threads each; curves in {log_dir}",
            highlight=False,
        )


def _print(text: str) -> None:
    console().print(escape(text), highlight=False, soft_wrap=True)


def _rank(model: str, layout: str | None, device: str, timeout: float, given: dict) -> float:
    """One rank of `weft train`; returns the seconds it took."""
    from ..nn import ModelSpec
    from ..train import train as run

    chosen = Layout.single() if layout is None else options.layout_named(layout)
    blackbox.write_to(given["log_dir"])
    bound = chosen.build(device, timeout=timeout)
    return run(ModelSpec.load(model), bound, device=device, **given).seconds
