"""`weft train`: a model file on a layout file."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .. import launch
from ..check import dtype_named
from ..errors import WeftError
from ..layout import Layout
from . import options
from .options import console


def train(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Name of a shipped model or a path to a .toml.",
            show_default=False,
        ),
    ],
    layout: Annotated[
        str | None,
        typer.Argument(
            metavar="[LAYOUT]",
            help="Name of a shipped layout, a path to a .toml, or a layout on one line.",
            show_default="one device",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Length of the run.", show_default="the model file's")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Examples per step, over all ranks.", show_default="the model file's"),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default="the model file's")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of parameters and computation.")] = "float32",
    log_dir: Annotated[
        Path | None,
        typer.Option(help="TensorBoard files.", show_default="runs/MODEL-LAYOUT"),
    ] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Where checkpoints go.", show_default="none are written")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints.", show_default="the last step")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the latest checkpoint, on any layout.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option(help="At the end, try a table model on real tables.")
    ] = True,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
) -> None:
    """Train a model on a layout.

    The ranks start by themselves. The same seed gives the same loss curve on
    every layout. A table model is tried on real tables at the end, beside
    logistic regression and a random forest (pip install 'weft[tables]').

    Examples:

        weft train tabular tabular-2x2

        weft train causal_lm head-x-ring --steps 100

        weft train tabular tabular-2x2 --checkpoint-dir runs/a --resume

        torchrun --nproc-per-node 4 -m weft train tabular tabular-2x2
    """
    from ..nn import ModelSpec

    spec = ModelSpec.load(model)
    chosen = Layout.single() if layout is None else options.layout_named(layout)
    ranks = options.ranks_of(chosen, nproc)
    if resume and checkpoint_dir is None:
        raise typer.BadParameter("--resume needs --checkpoint-dir, the folder to resume from")
    if evaluate and spec.head == "table" and importlib.util.find_spec("sklearn") is None:
        raise WeftError(
            "the real tables at the end need scikit-learn: pip install 'weft[tables]', or pass "
            "--no-evaluate"
        )
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
    started = launch.already_launched()
    if started is None or started.rank == 0:
        threads = launch.threads_per_rank(launch.ranks_here(ranks))
        console().print(
            f"[bold]{spec.name}[/] on [bold]{escape(chosen.name)}[/]: {ranks} ranks on {place}, "
            f"{threads} threads each; curves in {given['log_dir']}",
            highlight=False,
        )
    seconds = launch.run(_rank, model, layout, place, given, ranks=ranks)
    if seconds is not None:
        console().print(f"trained in {seconds:.0f} s", highlight=False)


def _rank(model: str, layout: str | None, device: str, given: dict) -> float:
    """One rank of `weft train`; returns the seconds it took."""
    from ..nn import ModelSpec
    from ..train import train as run

    chosen = Layout.single() if layout is None else options.layout_named(layout)
    chosen.build(device)
    return run(ModelSpec.load(model), chosen, device=device, **given).seconds
