"""`weft bench`: times several layouts on the same ranks."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.markup import escape

from weft._terminal import Terminal
from weft.errors import DeclarationError, ShapeError, UnsupportedError, WeftError, shown
from weft.inspect import words
from weft.inspect.words import digits, show_time, unit_of
from weft.launch import launcher as launch
from weft.launch.environment import already_launched
from weft.layout import Layout
from weft.masks.names import mask_named
from weft.plan.predict import plan_for
from weft.testing.cases import Case

from ..inspect import tables
from . import options
from .options import console

if TYPE_CHECKING:
    from .side_by_side import TimedPasses

_SHAPE = re.compile(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)x(\d+)")
MOST_ROUNDS = 10_000


def bench(
    context: typer.Context,
    label: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_SHAPE",
            help="A model: its name (see `weft list models`) or a path to a .toml. Or the sizes of "
            "one attention call, over all ranks: BATCHxHEADSxTOKENSxHEAD_DIM, such as 1x8x4096x64, "
            "or 1x16/4x4096x64 with 4 key/value heads.",
            show_default=False,
        ),
    ],
    layouts: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYOUT LAYOUT ...",
            help="Layouts of as many ranks: names, paths, or layouts on one line.",
            show_default=False,
        ),
    ],
    axis: Annotated[
        str | None,
        options.of_call(
            "The attended axis of a shape; 'a+b' attends two axes jointly.",
            show_default="the first that communicates",
        ),
    ] = None,
    mask: options.Mask = options.MASK,
    batch: options.Batch = None,
    length: Annotated[
        str | None,
        options.of_call(
            "Lengths of a model's axes, over all ranks: 'time=8,lat=32'.",
            show_default=options.OF_MODEL,
        ),
    ] = None,
    dtype: options.RunDType = None,
    rounds: Annotated[
        int, options.of_run("How often each layout is timed.", min=1, max=MOST_ROUNDS)
    ] = 7,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
    timeout: options.Timeout = None,
) -> None:
    """Time layouts side by side: which is the fastest here?

    Starts the ranks, and times the forward and the backward pass of every layout
    in turns, round after round, so that whatever else the machine does slows them
    equally. A model's backward pass ends with the sums of its gradients over
    ranks.

    Times are medians over the rounds, of the slowest rank in each round. Bytes
    are counted, not predicted: those that the busiest rank receives, those that a
    forward pass keeps for its backward pass, and the most that one pass of
    attention holds for other ranks. The first pass of each is not timed.

    Run it where you train, as you train, when nothing else runs there. Ranks of
    one machine share its memory: links between nodes show only between nodes.

    Examples:

        weft bench 1x8x4096x64 ring-4 ulysses-4 tile-2x2

        weft bench 1x16/4x8192x64 ring-zigzag-4 pass-q-4 --mask causal

        weft bench weather weather-dp-x-ring weather-axial-2x2 --length lat=32,lon=64

        weft bench causal_lm "tokens: ring=2" "tokens: ulysses=2" --batch 4

        torchrun --nnodes 2 --nproc-per-node 8 ... -m weft bench mine.toml a.toml b.toml
    """
    declared = [options.layout_named(name) for name in layouts]
    ranks = _ranks(declared, nproc)
    chosen = [layout.resolve(ranks) for layout in declared]
    place = options.device_for(device, ranks)
    named = dtype or options.DTYPES[place]
    kind = options.dtype_named(named)
    shape = _SHAPE.fullmatch(label)
    job: list[Case] | _Model
    if shape:
        options.refuse_given(
            context, ("batch", "length"), "not allowed with a shape, which already gives it"
        )
        job = _cases(shape, chosen, axis, mask, kind)
    else:
        options.refuse_given(context, ("axis", "mask"), "not for a model, whose file says it")
        job = _model(label, chosen, batch, length)
    with options.still_here(f"timing {', '.join(layouts)} on {ranks} ranks"):
        found = launch.run(_rank, job, layouts, named, place, rounds, timeout, ranks=ranks)
    if found is None:  # not the rank that answers
        return
    where = f"{ranks} {'processes' if ranks > 1 else 'process'} on {place}"
    names = [layout.name for layout in chosen]
    _show(f"{escape(label)}, {named}: {where}, medians of {rounds} rounds", names, found, place)


def _ranks(layouts: Sequence[Layout], nproc: int | None) -> int:
    """Number of ranks that every one of the layouts takes."""
    sized = {each.name: each.world_size for each in layouts if -1 not in each.mesh.values()}
    if len({*sized.values()}) > 1:
        sizes = ", ".join(f"{ranks} ({name})" for name, ranks in sized.items())
        raise DeclarationError(f"layouts are timed on the same ranks, but these take {sizes}")
    ranks = nproc or next(iter(sized.values()), None)
    for layout in layouts:
        taken = options.ranks_of(layout, ranks)
    return taken


def _cases(
    shape: re.Match, layouts: Sequence[Layout], axis: str | None, mask: str, dtype: torch.dtype
) -> list[Case]:
    """The call of every layout, refused before anything is started where it cannot be planned."""
    batch, heads, kv_heads, tokens, head_dim = shape.groups()
    cases = []
    for layout in layouts:
        attended = options.attended(layout, axis or options.first_axis(layout))[0]
        options.refuse_routed_axis(layout, attended)
        if min(int(size) for size in shape.groups("1")) < 1:
            raise ShapeError(f"{shape.group()}: sizes are 1 or more")
        lengths = options.lengths_of(tokens, attended)
        n = math.prod(lengths)
        case = Case(
            name=shape.group(),
            n=lengths,
            batch=int(batch),
            heads=int(heads),
            kv_heads=int(kv_heads or heads),
            dim=int(head_dim),
            mask=mask_named(mask, n, n, int(batch), lengths),
            axis=attended,
            dtype=dtype,
        )
        try:
            plan_for(layout, case.problem, rank=0)
        except WeftError as error:
            raise type(error)(f"{layout.source}: {error}") from None
        cases.append(case)
    for case in cases:
        _refuse_large(case)
    return cases


def _refuse_large(case: Case) -> None:
    """Raise for a call whose tensors alone, with their gradients, are more than this machine has.

    Where a launcher started the ranks, they may be on several machines, and nothing is refused.
    """
    nbytes = 2 * sum(map(math.prod, case.shapes.values())) * case.dtype.itemsize
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if already_launched() is None and nbytes > memory:
        raise ShapeError(
            f"{case.name}: q, k, v, the output and their gradients take {words.nbytes(nbytes)}, "
            f"and this machine has {words.nbytes(memory)}; take smaller sizes, or start ranks on "
            "more machines"
        )


@dataclass(frozen=True)
class _Model:
    """A model file, and the sizes that it is timed at."""

    name: str
    batch: int
    lengths: Mapping[str, int]


def _model(name: str, layouts: Sequence[Layout], batch: int | None, length: str | None) -> _Model:
    from weft_models.models import ModelSpec, check_fit
    from weft_models.train.data import KINDS
    from weft_planner.work import lengths_of_model

    if name[:1].isdigit() and not Path(name).exists():
        raise ShapeError(
            f"{shown(name)} is no shape: BATCHxHEADSxTOKENSxHEAD_DIM is, such as 1x8x4096x64 or, "
            "with 4 key/value heads, 1x16/4x4096x64"
        )
    spec = ModelSpec.load(name)
    if spec.head is not None and spec.head not in KINDS:
        raise UnsupportedError(
            f"model {spec.name!r}: head {spec.head!r} is registered by a program, and data of it "
            "are not known here; time its blocks, in a model file without a head"
        )
    batch = batch or spec.train.batch
    for layout in layouts:
        check_fit(spec, layout)
        if batch < layout.size(spec.axes[0]):
            raise ShapeError(
                f"{layout.source}: {layout.size(spec.axes[0])} ranks split axis {spec.axes[0]!r}, "
                f"and there are {batch} examples; give at least one each with --batch"
            )
    return _Model(name, batch, lengths_of_model(spec, options.lengths_of_axes(length)))


def _rank(
    label: list[Case] | _Model,
    layouts: list[str],
    dtype: str,
    device: str,
    rounds: int,
    timeout: float | None,
) -> list[TimedPasses]:
    """One rank of `weft bench`."""
    from weft_models.models import ModelSpec
    from weft_planner.work import Work, model_work

    from .side_by_side import call_work, side_by_side

    def work(place: int, layout: Layout) -> Work:
        if not isinstance(label, _Model):
            return call_work(layout, label[place], device)
        spec, kind = ModelSpec.load(label.name), options.dtype_named(dtype)
        return model_work(layout, spec, label.batch, label.lengths, kind, device)

    bound = [options.layout_named(name).build(device, timeout=timeout) for name in layouts]
    works = [(layout, work(place, layout)) for place, layout in enumerate(bound)]
    with _progress(bound[0].rank == 0, rounds) as tell:
        return side_by_side(works, rounds, device, tell)


@contextlib.contextmanager
def _progress(shown: bool, rounds: int) -> Iterator[Callable[[int], None]]:
    """A line that says how far the rounds are, where rank 0 has a terminal."""
    from rich.progress import (  # this module is loaded for every command
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    screen = Terminal(stderr=True)
    bar = Progress(
        TextColumn("timing, round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=not shown or not screen.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=rounds)
        yield lambda number: bar.update(task, completed=number)


def _show(title: str, names: Sequence[str], found: Sequence[TimedPasses], device: str) -> None:
    """A row per layout: its times, and its bytes."""
    columns = ["forward", "backward", "both", "spread of both", "x best"]
    times = tables.table(title, "layout", *columns, right=columns)
    columns = ["in forward", "in backward", "kept", "held"]
    columns += ["GPU peak"] * (device == "cuda")
    moved = tables.table(
        "bytes of the busiest rank",
        "layout",
        *columns,
        right=columns,
        caption="in: received. kept: for the backward pass. held: for other ranks, at one time.",
    )
    best = min(passes.medians[2] for passes in found)
    for name, passes in zip(names, found):
        both = passes.medians[2]
        per, unit = unit_of(both)
        spread = " .. ".join(digits(edge(passes.whole) / per) for edge in (min, max))
        style = "bold" if both == best else None
        seconds = map(show_time, passes.medians)
        times.add_row(escape(name), *seconds, f"{spread} {unit}", f"{both / best:.2f}", style=style)
        sizes = [*passes.received, passes.kept, passes.held]
        sizes += [passes.allocated] * (device == "cuda")
        moved.add_row(escape(name), *map(words.nbytes, sizes))
    console().print(times)
    console().print(moved)
