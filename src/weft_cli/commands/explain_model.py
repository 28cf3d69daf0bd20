"""`weft explain model`: a training step of a full model, layouts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.markup import escape

from weft.declare.hardware import Hardware
from weft.errors import DeclarationError, WeftError
from weft.inspect import words
from weft.layout import Layout
from weft_models.declare.model_file import ModelSpec
from weft_models.models import check_fit
from weft_planner.step_count import StepCount, busiest, by_part, count_steps, part_of
from weft_planner.step_time import StepTime, step_time
from weft_planner.work import lengths_of_model

from ..inspect.printer import console, print_table, say, working
from ..inspect.rule_words import PAYLOAD
from . import options
from .explain_split import maker, show

#: What bytes are for, in the order of the columns.
PARTS = ("attention", "resharding", "sums", "weights", "gradients")


@dataclass(frozen=True)
class Row:
    """A layout of the comparison: the busiest rank's step, and its time on hardware."""

    layout: Layout
    count: StepCount
    ranks: int
    time: StepTime | None


def model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model file: its name (see `weft list models`), or a path to a .toml. Or a "
            "transformers model: its folder, or its config.json. Or one of your own, "
            "package.module:function.",
            show_default=False,
        ),
    ],
    layouts: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYOUT", help="One or several: names, paths, or layouts on one line."
        ),
    ],
    length: options.ModelLength = None,
    batch: options.ModelBatch = None,
    dtype: options.DType = options.PLANNED_DTYPE,
    gradients: options.Gradients = None,
    nproc: options.Nproc = None,
    hardware: options.TimedOn = None,
) -> None:
    """Show what a training step moves and holds, layouts side by side. Starts nothing.

    Everything that a step of a model file sends and keeps, by its purpose, and
    its time on --hardware. The model's own code is counted, on tensors without
    numbers.

    Of a transformers model, and of one of yours, it shows what weft.parallelize
    splits, by module: functions of torch that have a rule, that run in islands
    (on a rank's own tensors), and that run whole on every rank, and the bytes
    that each module sends. Your function returns the model, the arguments of a
    call, and options of weft.parallelize:

        def mine(): return Decoder(), {"ids": ids}, {"dims": {"tokens": 1}}

    Examples:

        weft explain model ./llama 'tokens(zigzag): ring=4' --length tokens=32768

        weft explain model package.module:mine 'tokens: ulysses=2 x ring=2'

        weft explain model weather weather-dp-x-ring weather-axial-2x2

        weft explain model causal_lm head-x-ring tp-x-ring --length tokens=4096 --hardware h100-8

        weft explain model mine.toml 'tokens: ring=8' --gradients fsdp
    """
    resolved = [options.resolved(name, nproc) for name in layouts]
    kind = options.dtype_named(dtype)
    make = maker(model, options.lengths_of_axes(length), batch, kind)
    if make is not None:
        if gradients or hardware:
            raise DeclarationError(
                "--gradients, --hardware: of a model file; `weft plan config` predicts times of"
                " transformers models"
            )
        for layout in resolved:
            show(model, layout, make)
        return
    spec = ModelSpec.load(model)
    machine = None if hardware is None else Hardware.load(hardware)
    lengths = lengths_of_model(spec, options.lengths_of_axes(length))
    batch = batch or max([spec.train.batch, *(each.size(spec.axes[0]) for each in resolved)])
    way = gradients or spec.train.gradients
    sizes = ", ".join(f"{axis} {n:,}" for axis, n in lengths.items())
    console().print(
        f"[bold]{escape(spec.name)}[/]  a training step of {batch} examples, {sizes}; "
        f"{str(kind)[6:]}, gradients {way}\n",
        highlight=False,
    )
    rows, refused = [], []
    with working("counting a step"):
        for layout in resolved:
            try:
                check_fit(spec, layout)
                counts = count_steps(layout, spec, batch, lengths, kind, way)
            except WeftError as error:
                if len(resolved) == 1:
                    raise
                refused.append(f"refused: {layout.name}: {error}")
                continue
            most = busiest(counts)
            time = None if machine is None else step_time(most, layout, machine)
            rows.append(Row(layout, most, len(counts), time))
    if len(resolved) == 1:
        _show_messages(rows[0])
    if rows:
        _show_bytes(rows)
        _show_memory(rows)
        if machine is not None:
            _show_times(rows, f"{hardware}")
    say(*refused)


def _show_messages(row: Row) -> None:
    """Every kind of message of one layout."""
    print_table(
        f"what rank {row.count.rank} receives",
        ("pass", "mesh dim", "what", "for", ">bytes", ">messages sent"),
        [
            (
                each.when,
                each.mesh_dim,
                PAYLOAD.get((each.what, each.when == "backward"), each.what)
                if each.attention
                else each.what,
                part_of(each),
                words.nbytes(each.nbytes),
                str(each.messages),
            )
            for each in row.count.moved
        ],
    )


def _show_bytes(rows: Sequence[Row]) -> None:
    parts = [by_part(row.count) for row in rows]
    named = [*PARTS, *sorted({p for part in parts for p in part} - {*PARTS})]
    used = [name for name in named if any(part[name] for part in parts)]
    counted = {
        "all" if row.ranks == (size := row.layout.world_size) else f"{row.ranks} of {size:,}"
        for row in rows
    }
    print_table(
        "bytes that the busiest rank receives in a step",
        ("layout", *(f">{name}" for name in used), ">all"),
        [
            (
                row.layout.name,
                *(words.nbytes(part[name]) if part[name] else "-" for name in used),
                words.nbytes(row.count.nbytes),
            )
            for row, part in zip(rows, parts)
        ],
        f"counted with shapes alone on {', '.join(sorted(counted))} ranks.",
    )


def _show_memory(rows: Sequence[Row]) -> None:
    parts = list(rows[0].count.memory)
    print_table(
        "bytes of a rank",
        ("layout", *(f">{part}" for part in parts), ">all", ">peak beside weights"),
        [
            (
                row.layout.name,
                *(words.nbytes(held[part]) for part in parts),
                words.nbytes(sum(held.values())),
                words.nbytes(row.count.peak),
            )
            for row in rows
            for held in [row.count.memory]
        ],
        "peak beside weights: activations, temporaries and gradients that are alive at one time",
    )


def _show_times(rows: Sequence[Row], name: str) -> None:
    timed = [(row.layout.name, row.time) for row in rows if row.time is not None]
    timed.sort(key=lambda pair: pair[1].total)
    print_table(
        f"predicted on {name}",
        ("layout", ">attention", ">matrix products", ">the rest", ">step", ">x best"),
        [
            (
                name,
                *map(words.show_time, (time.attention, time.products, time.rest, time.total)),
                f"{time.total / timed[0][1].total:.2f}",
            )
            for name, time in timed
        ],
        "the rest: resharding, sums and gradients, hidden by nothing. Matrix products at "
        "the attention kernel's best rate, assumed.",
    )
