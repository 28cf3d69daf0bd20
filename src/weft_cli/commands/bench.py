"""`weft bench call`, `weft bench model`: times several layouts on the same ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from weft.errors import DeclarationError, ShapeError, UnsupportedError, WeftError
from weft.inspect import words
from weft.inspect.words import digits, show_time, unit_of
from weft.launch import launcher as launch
from weft.launch.environment import already_launched
from weft.layout import Layout
from weft.plan.predict import plan_for
from weft_axes.testing.cases import Case

from ..inspect.printer import print_table, working
from . import options

if TYPE_CHECKING:
    from .side_by_side import TimedPasses

MOST_ROUNDS = 10_000

Layouts = Annotated[
    list[str],
    typer.Argument(
        metavar="LAYOUT",
        help="Layouts of as many ranks: names, paths, or layouts on one line.",
        show_default=False,
    ),
]
Rounds = Annotated[int, options.of_run("How often each layout is timed.", min=1, max=MOST_ROUNDS)]


@dataclass(frozen=True)
class _Model:
    """A model file, and the sizes that it is timed at."""

    name: str
    batch: int
    lengths: Mapping[str, int]


@dataclass(frozen=True)
class _Run:
    """Where and how often layouts are timed."""

    layouts: list[str]
    dtype: torch.dtype
    device: str
    rounds: int
    timeout: float | None


def call(
    layouts: Layouts,
    axis: options.MovingAxis = None,
    length: options.Length = options.LENGTH,
    heads: options.Heads = options.HEADS,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = options.HEAD_DIM,
    batch: options.Batch = None,
    mask: options.Mask = options.MASK,
    dtype: options.RunDType = None,
    rounds: Rounds = 7,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
    timeout: options.Timeout = None,
) -> None:
    """Time an attention call on layouts side by side: which is the fastest here?

    Starts the ranks, and times the forward and the backward pass of every layout
    in turns, round after round, so that whatever else the machine does slows them
    equally.

    Times are medians over the rounds, of the slowest rank in each round. Bytes
    are counted, not predicted: those that the busiest rank receives, those that a
    forward pass keeps for its backward pass, and the most that one pass of
    attention holds for other ranks. The first pass of each is not timed.

    Run it where you train, as you train, when nothing else runs there. Ranks of
    one machine share its memory: links between nodes show only between nodes.

    Examples:

        weft bench call ring-4 ulysses-4 tile-2x2

        weft bench call ring-zigzag-4 pass-q-4 --mask causal --length 8192 --kv-heads 4

        torchrun --nnodes 2 --nproc-per-node 8 ... -m weft bench call a.toml b.toml
    """
    chosen, run = _prepared(layouts, nproc, device, dtype, rounds, timeout)
    cases = []
    for layout in chosen:
        attended = options.first_attended(layout, axis)
        options.refuse_routed_axis(layout, attended)
        sequences = options.batch_of(batch, mask, layout.batch_parts(attended.split("+")))
        sizes = Case(mask, 0, None, sequences, heads, kv_heads or heads, head_dim, dtype=run.dtype)
        case = options.along(sizes, attended, length, options.known_axes(layout))
        try:
            plan_for(layout, case.problem, rank=0)
        except WeftError as error:
            raise type(error)(f"{layout.source}: {error}") from None
        cases.append(case)
    for case in cases:
        _refuse_large(case)
    n, kv = "x".join(f"{n}" for n, _ in cases[0].lengths), cases[0].kv_heads
    _time(f"{n} tokens, {heads}/{kv} heads of {head_dim}, {mask}", cases, chosen, run)


def model(
    model: options.ModelName,
    layouts: Layouts,
    length: options.ModelLength = None,
    batch: options.ModelBatch = None,
    dtype: options.RunDType = None,
    rounds: Rounds = 7,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
    timeout: options.Timeout = None,
) -> None:
    """Time a model file's step on layouts side by side: which is the fastest here?

    As weft bench call; the backward pass ends with the sums of gradients over
    ranks.

    Examples:

        weft bench model weather weather-dp-x-ring weather-axial-2x2 --length lat=32,lon=64

        weft bench model causal_lm "tokens: ring=2" "tokens: ulysses=2" --batch 4
    """
    from weft_models.models import ModelSpec, check_fit
    from weft_models.train.data import KINDS
    from weft_planner.work import lengths_of_model

    chosen, run = _prepared(layouts, nproc, device, dtype, rounds, timeout)
    spec = ModelSpec.load(model)
    if spec.head is not None and spec.head not in KINDS:
        raise UnsupportedError(
            f"model {spec.name!r}: head {spec.head!r} is registered by a program, and data of it "
            "are not known here; time its blocks, in a model file without a head"
        )
    batch = batch or spec.train.batch
    for layout in chosen:
        check_fit(spec, layout)
        if batch < layout.size(spec.axes[0]):
            raise ShapeError(
                f"{layout.source}: {layout.size(spec.axes[0])} ranks split axis {spec.axes[0]!r}, "
                f"and there are {batch} examples; give at least one each with --batch"
            )
    lengths = lengths_of_model(spec, options.lengths_of_axes(length))
    _time(model, _Model(model, batch, lengths), chosen, run)


def _prepared(
    layouts: list[str],
    nproc: int | None,
    device: str,
    dtype: str | None,
    rounds: int,
    timeout: float | None,
) -> tuple[list[Layout], _Run]:
    """The layouts on the number of ranks that every one of them takes, and how they are timed."""
    declared = [options.layout_named(name) for name in layouts]
    sized = {each.name: each.world_size for each in declared if -1 not in each.mesh.values()}
    if len({*sized.values()}) > 1:
        sizes = ", ".join(f"{ranks} ({name})" for name, ranks in sized.items())
        raise DeclarationError(f"layouts are timed on the same ranks, but these take {sizes}")
    ranks = nproc or next(iter(sized.values()), None)
    chosen = [each.resolve(options.ranks_of(each, ranks)) for each in declared]
    place = options.device_for(device, chosen[0].world_size)
    kind = options.dtype_named(dtype or options.DTYPES[place])
    return chosen, _Run(layouts, kind, place, rounds, timeout)


def _time(title: str, job: list[Case] | _Model, layouts: Sequence[Layout], run: _Run) -> None:
    ranks = layouts[0].world_size
    with working(f"timing {', '.join(run.layouts)} on {ranks} ranks"):
        found = launch.run(_rank, job, run, ranks=ranks)
    if found is None:  # not the rank that answers
        return
    where = f"{ranks} {'processes' if ranks > 1 else 'process'} on {run.device}"
    title = f"{title}, {str(run.dtype)[6:]}: {where}, medians of {run.rounds} rounds"
    _show(title, [layout.name for layout in layouts], found, run.device)


def _refuse_large(case: Case) -> None:
    """Raise for a call whose tensors alone, with their gradients, are more than this machine has.

    Where a launcher started the ranks, they may be on several machines, and nothing is refused.
    """
    nbytes = 2 * sum(map(math.prod, case.shapes.values())) * case.dtype.itemsize
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if already_launched() is None and nbytes > memory:
        raise ShapeError(
            f"q, k, v, the output and their gradients take {words.nbytes(nbytes)}, "
            f"and this machine has {words.nbytes(memory)}; take smaller sizes, or start ranks on "
            "more machines"
        )


def _rank(job: list[Case] | _Model, run: _Run) -> list[TimedPasses]:
    """One rank of `weft bench`."""
    from weft_models.models import ModelSpec
    from weft_planner.work import Work, model_work

    from .side_by_side import call_work, side_by_side

    def work(place: int, layout: Layout) -> Work:
        if not isinstance(job, _Model):
            return call_work(layout, job[place], run.device)
        spec = ModelSpec.load(job.name)
        return model_work(layout, spec, job.batch, job.lengths, run.dtype, run.device)

    named = map(options.layout_named, run.layouts)
    bound = [layout.build(run.device, timeout=run.timeout) for layout in named]
    works = [(layout, work(place, layout)) for place, layout in enumerate(bound)]
    return side_by_side(works, run.rounds, run.device)


def _show(title: str, names: Sequence[str], found: Sequence[TimedPasses], device: str) -> None:
    """A row per layout: its times, and its bytes."""
    best = min(passes.medians[2] for passes in found)
    times = []
    for name, passes in zip(names, found):
        per, unit = unit_of(passes.medians[2])
        spread = " .. ".join(digits(edge(passes.whole) / per) for edge in (min, max))
        share = f"{passes.medians[2] / best:.2f}"
        times.append((name, *map(show_time, passes.medians), f"{spread} {unit}", share))
    columns = (">forward", ">backward", ">both", ">spread of both", ">x best")
    print_table(title, ("layout", *columns), times)
    gpu = device == "cuda"
    print_table(
        "bytes of the busiest rank",
        ("layout", ">in forward", ">in backward", ">kept", ">held", *[">GPU peak"] * gpu),
        [
            (name, *map(words.nbytes, (*p.received, p.kept, p.held, *[p.allocated] * gpu)))
            for name, p in zip(names, found)
        ],
        "in: received. kept: for the backward pass. held: for other ranks, at one time.",
    )
