"""`weft diff`: the first tensor of a training that two layouts compute otherwise."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from weft.layout import Layout
from weft_models.declare.model_file import ModelSpec
from weft_models.train.traces import first_beyond, trace

from ..inspect.printer import console, still_here
from . import options


def diff(
    one: Annotated[str, typer.Argument(metavar="LAYOUT", help="A layout, or one on one line.")],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[LAYOUT]", help="Another; default one device.", show_default=False),
    ] = None,
    model: Annotated[
        str, typer.Option(help="A model file of this library, or a path.", metavar="MODEL")
    ] = "causal_lm",
    steps: Annotated[int, options.of_run("Training steps.", min=1)] = 2,
    batch: options.Batch = None,
    length: Annotated[
        str | None,
        options.of_call("Of the axes, such as tokens=64.", show_default="the model file's"),
    ] = None,
    tolerance: Annotated[
        float, options.of_run("Beyond that is rounding, absolute and relative.", min=0)
    ] = 1e-9,
    seed: Annotated[int, options.of_run("Of weights and data.", min=0, max=options.MOST_SEED)] = 0,
) -> None:
    """Name the first tensor that two layouts compute otherwise.

    Trains a model for a few steps on each, in float64 and with threads of this
    process as ranks, and compares in order the outputs of blocks, the loss,
    gradients and weights, all whole.

    Exit code 1 if a number differs by more than the tolerance.

    Examples:

        weft diff "tokens: ring=2" "tokens: tile=2x2"

        weft diff "rows: ring=2" --model tabular --length rows=40
    """
    spec = ModelSpec.load(model)
    changes: dict[str, Any] = {} if batch is None else {"batch": batch}
    if length is not None:
        given = options.lengths_of_axes(length)
        changes["length"] = spec.train.length | {axis: (n, n) for axis, n in given.items()}
    traces = []
    for line in (one, other):
        layout = Layout.single() if line is None else options.layout_named(line)
        with still_here(f"training on {layout.name}"):
            traces.append(trace(spec, layout, steps, seed, **changes))
    found = first_beyond(traces[0], traces[1], tolerance)
    if found is not None:
        console().print(f"[red]differs first[/]: {escape(str(found))}", highlight=False)
        raise typer.Exit(1)
    count = f"{steps} step{'s' * (steps != 1)}"
    console().print(
        f"[green]same to {tolerance:.0e}[/]: {len(traces[0])} tensors of {count} of {spec.name}",
        highlight=False,
    )
