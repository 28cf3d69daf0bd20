"""`weft diff`: the first tensor of a training whose bits differ between two layouts."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from weft.layout import Layout
from weft_models.declare.model_file import ModelSpec
from weft_models.train.same_bits import first_other_bits, trace

from . import options
from .options import console


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
    dtype: options.RunDType = None,
    seed: Annotated[int, options.of_run("Of weights and data.", min=0, max=options.MOST_SEED)] = 0,
) -> None:
    """Name the first tensor whose bits differ between two layouts.

    Trains a model for a few steps on each, with threads of this process as
    ranks, and compares in order the outputs of blocks, the loss, gradients and
    weights, all whole. Layouts with `reproducible = true` agree in every bit;
    of others it shows where rounding begins to differ, and by how much.

    Exit code 1 if a bit differs.

    Examples:

        weft diff "tokens: ring=2; reproducible" "tokens: tile=2x2; reproducible"

        weft diff "rows: ring=2; reproducible" --model tabular --length rows=40
    """
    spec = ModelSpec.load(model)
    changes: dict[str, Any] = {} if batch is None else {"batch": batch}
    if length is not None:
        given = options.lengths_of_axes(length)
        changes["length"] = spec.train.length | {axis: (n, n) for axis, n in given.items()}
    traces = []
    first = options.layout_named(one)
    single = Layout.single(reproducible=first.reproducible)
    for layout in (first, single if other is None else options.layout_named(other)):
        with options.still_here(f"training on {layout.name}"):
            kind = options.dtype_named(dtype or options.DTYPES["cpu"])
            traces.append(trace(spec, layout, steps, seed=seed, dtype=kind, **changes))
    found = first_other_bits(*traces)
    if found is None:
        count = f"{steps} step{'s' * (steps != 1)}"
        console().print(
            f"[green]the same bits[/]: {len(traces[0])} tensors of {count} of {spec.name}",
            highlight=False,
        )
        return
    console().print(f"[red]other bits[/] first in {escape(str(found))}", highlight=False)
    raise typer.Exit(1)
