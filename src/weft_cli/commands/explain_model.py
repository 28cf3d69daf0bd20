"""`weft explain MODEL LAYOUT...`: a training step of a full model, layouts side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from weft.declare import catalog
from weft.declare.hardware import Hardware
from weft.errors import WeftError
from weft.inspect import words
from weft.layout import Layout
from weft_models.declare.model_file import ModelSpec
from weft_models.models import check_fit
from weft_planner.step_count import StepCount, busiest, by_part, count_steps, part_of
from weft_planner.step_time import StepTime, step_time
from weft_planner.work import lengths_of_model

from ..inspect import tables
from . import options
from .options import console

#: What bytes are for, in the order of the columns.
PARTS = ("attention", "resharding", "sums", "weights", "gradients")


@dataclass(frozen=True)
class Row:
    """A layout of the comparison: the busiest rank's step, and its time on hardware."""

    layout: Layout
    count: StepCount
    ranks: int
    time: StepTime | None


def is_model(name: str) -> bool:
    """True if a word names a model: one that ships, or a file with blocks."""
    if name in catalog.names("models"):
        return True
    if not name.endswith(".toml") or not Path(name).is_file():
        return False
    return "block" in catalog.parse(Path(name))


def explain_model(
    spec: ModelSpec,
    layouts: Sequence[Layout],
    batch: int | None,
    length: str | None,
    dtype: torch.dtype,
    gradients: str | None,
    hardware: str | None,
    ranks_per_node: int | None,
) -> None:
    """Print what a training step moves and holds on every layout, and takes on some hardware."""
    machine = None if hardware is None else Hardware.load(hardware)
    lengths = lengths_of_model(spec, options.lengths_of_axes(length))
    batch = batch or max([spec.train.batch, *(each.size(spec.axes[0]) for each in layouts)])
    way = gradients or spec.train.gradients
    sizes = ", ".join(f"{axis} {n:,}" for axis, n in lengths.items())
    out = console()
    out.print(
        f"[bold]{escape(spec.name)}[/]  a training step of {batch} examples, {sizes}; "
        f"{str(dtype)[6:]}, gradients {way}\n",
        highlight=False,
    )
    rows, refused = [], {}
    label = "counting a step"
    with out.status(label), options.still_here(label):
        for layout in layouts:
            try:
                rows.append(_row(spec, layout, batch, lengths, dtype, way, machine, ranks_per_node))
            except WeftError as error:
                if len(layouts) == 1:
                    raise
                refused[layout.name] = error
    if len(layouts) == 1:
        out.print(_details(rows[0]))
    if rows:
        out.print(_bytes(rows))
        out.print(_memory(rows))
        if machine is not None:
            out.print(_times(rows, f"{hardware}"))
    for name, why in refused.items():
        line = f"refused: {name}: {why}"
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _row(
    spec: ModelSpec,
    layout: Layout,
    batch: int,
    lengths: dict[str, int],
    dtype: torch.dtype,
    way: str,
    machine: Hardware | None,
    ranks_per_node: int | None,
) -> Row:
    """A layout's row; raises what it refuses."""
    options.refuse_split_nodes(layout, ranks_per_node)
    check_fit(spec, layout)
    counts = count_steps(layout, spec, batch, lengths, dtype, way)
    most = busiest(counts)
    time = None if machine is None else step_time(most, [layout], machine)
    return Row(layout, most, len(counts), time)


def _details(row: Row) -> Table:
    """Every kind of message of one layout."""
    result = tables.table(
        f"what rank {row.count.rank} receives",
        *("pass", "mesh dim", "what", "for", "bytes", "messages sent"),
        right=("bytes", "messages sent"),
    )
    for each in row.count.moved:
        name = words.PAYLOAD.get((each.what, each.when == "backward"), each.what)
        if not each.attention:
            name = each.what
        result.add_row(
            each.when,
            each.mesh_dim,
            name,
            part_of(each),
            words.nbytes(each.nbytes),
            str(each.messages),
        )
    return result


def _bytes(rows: Sequence[Row]) -> Table:
    parts = [by_part(row.count) for row in rows]
    named = [*PARTS, *sorted({p for part in parts for p in part} - {*PARTS})]
    used = [name for name in named if any(part[name] for part in parts)]
    result = tables.table(
        "bytes that the busiest rank receives in a step",
        *("layout", *used, "all"),
        right=(*used, "all"),
        caption="counted with shapes alone on " + ", ".join(sorted(set(_ranks(rows)))) + " ranks.",
    )
    for row, part in zip(rows, parts):
        numbers = [words.nbytes(part[name]) if part[name] else "-" for name in used]
        result.add_row(escape(row.layout.name), *numbers, words.nbytes(row.count.nbytes))
    return result


def _ranks(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        size = row.layout.world_size
        yield "all" if row.ranks == size else f"{row.ranks} of {size:,}"


def _memory(rows: Sequence[Row]) -> Table:
    parts = list(rows[0].count.memory)
    columns = (*parts, "all", "peak beside weights")
    result = tables.table("bytes of a rank", "layout", *columns, right=columns)
    for row in rows:
        held = row.count.memory
        numbers = (*(held[part] for part in parts), sum(held.values()), row.count.peak)
        result.add_row(escape(row.layout.name), *map(words.nbytes, numbers))
    result.caption = (
        "peak beside weights: activations, temporaries and gradients that are alive at one time"
    )
    result.caption_justify = "left"
    return result


def _times(rows: Sequence[Row], name: str) -> Table:
    columns = ("attention", "matrix products", "the rest", "step", "x best")
    result = tables.table(
        f"predicted on {name}",
        *("layout", *columns),
        right=columns,
        caption="the rest: resharding, sums and gradients, hidden by nothing. Matrix products at "
        "the attention kernel's best rate, assumed.",
    )
    times = sorted(
        ((row.layout.name, row.time) for row in rows if row.time is not None),
        key=lambda timed: timed[1].total,
    )
    for name, time in times:
        seconds = (time.attention, time.products, time.rest, time.total)
        share = f"{time.total / times[0][1].total:.2f}"
        result.add_row(escape(name), *map(words.show_time, seconds), share)
    return result
