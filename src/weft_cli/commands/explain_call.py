"""`weft explain call`: communication, memory and computation of one attention call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from weft.choice import ChoiceKind
from weft.declare.hardware import Hardware
from weft.declare.one_line import is_line
from weft.declare.rates import rates_for, rates_of
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.inspect import words
from weft.layout import Layout
from weft.plan.memory import memory_bound
from weft.plan.order import count
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of, plans_for
from weft.plan.problem import Problem
from weft.plan.sides import Side
from weft.plan.travel import WORTH, Travel, choose_travel, of_keys
from weft_axes.fetching.bounds import ByteBounds, chosen_bounds
from weft_axes.fetching.rules import fetches
from weft_models.routing.attention import blocks_per_rank, check_routed
from weft_models.routing.bounds import routed_bounds
from weft_models.routing.geometry import is_routed
from weft_models.routing.module import routing_options
from weft_planner.flow import replayed

from ..inspect import tables
from ..inspect.printer import console, print_table, say, still_here, working, wrote
from ..inspect.ranks import Reading, reading
from ..inspect.rule_words import PAYLOAD, limit
from . import options

#: Of how many ranks the bounds of a routed call are read, and how many are planned.
MOST_READ, MOST_PLANNED = 32, 1 << 16

_CHOSEN = "what a layout moves and computes of chosen keys depends on the choice"
_ROUTED = "what a routed layout moves and computes depends on the router's weights"


def call(
    layouts: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYOUT",
            help="Its name (see `weft list layouts`), a path to a .toml, or one line such as "
            "'tokens: ulysses=2 x ring=2'. Several only for --html.",
            show_default=False,
        ),
    ],
    axis: options.MovingAxis = None,
    length: options.Length = options.LENGTH,
    keys: options.Keys = None,
    heads: options.Heads = options.HEADS,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = options.HEAD_DIM,
    value_dim: options.ValueDim = None,
    latents: options.LatentDims = None,
    batch: options.Batch = None,
    mask: options.Mask = options.MASK,
    choose: options.Choose = None,
    order: options.Order = None,
    dtype: options.DType = options.PLANNED_DTYPE,
    nproc: options.Nproc = None,
    hardware: options.TimedOn = None,
    score_matrix: Annotated[
        Path | None,
        options.of_picture("The score matrix, coloured by the rank that computes it."),
    ] = None,
    timeline: Annotated[
        Path | None,
        options.of_picture("The program, step by step: tiles and messages in flight."),
    ] = None,
    html: Annotated[
        Path | None,
        options.of_file(
            "A page that plays one or several layouts on --hardware, for a browser; no network."
        ),
    ] = None,
) -> None:
    """Show the rules, traffic, memory and work of an attention call. Starts nothing.

    Shows the mesh and each mesh dim's rule in words; then the bytes that ranks
    receive, and memory and work per rank; and predicted times, on --hardware or
    where the layout has rates (weft rates measures them). Of more than 64 ranks
    that are not all equivalent a few are read, spread over the mesh; the output
    says which. Of a routed layout it shows the
    bytes at least and at most, whatever the router has learned, and so where only
    those keys travel that a model chooses (--choose). --order balanced shows the
    order of layout.balance. A layout on one line is printed as the file that it
    stands for.

    Examples:

        weft explain call tile-2x2

        weft explain call ring-zigzag-4 --mask causal --score-matrix scores.png

        weft explain call ring-4 --mask prefix:500 --order balanced --score-matrix scores.png

        weft explain call hierarchical-2x2 --kv-heads 4 --timeline program.png

        weft explain call 'tokens(zigzag): ulysses=2 x ring=4' --mask causal

        weft explain call tile-2x4 'tokens(zigzag): ring=8' --mask causal --hardware h100-8 \\
            --html page.html

        weft explain call tile-2x2 --mask causal --choose 2048

        weft explain call chosen-4 --mask causal --choose 16 --length 1024
    """
    if html is not None and hardware is None:
        raise DeclarationError("--html: a page plays layouts on a machine; name it by --hardware")
    if len(layouts) > 1 and html is None:
        raise DeclarationError(
            "one layout is explained at a time; --html shows several side by side, `weft explain"
            " model` compares them for a model, and `weft plan call` finds the fastest"
        )
    balanced, order = order == "balanced", None if order == "balanced" else order
    layout = options.resolved(layouts[0], nproc, order, axis)
    axis = options.first_attended(layout, axis)
    if is_line(layouts[0]):
        declared = options.layout_named(layouts[0], order, axis)
        say("the line stands for this file:\n", f"{declared.to_toml()}\n")
    machine = None if hardware is None else Hardware.load(hardware)
    problem = options.problem_of(
        axis,
        options.lengths_of(length, axis, options.known_axes(layout)),
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        latents=latents,
        batch=batch,
        parts=layout.batch_parts(axis.split("+")),
        mask=mask,
        dtype=dtype,
        device="cpu" if machine is None else machine.device.kernels,
    )
    if balanced:
        layout = layout.reorder(axis, layout.balance(axis, problem.mask, problem.n))
    if choose is not None:
        problem = replace(problem, choice=ChoiceKind(1, min(choose, problem.m), check=False))
    travel, fetched = None, fetches(layout, problem.axes)
    if problem.expanded is not None and not (fetched and choose is not None):
        options.refuse_routed_axis(layout, axis)
        travel = choose_travel(_rated(layout, machine), problem.on(layout, 0))
        before, problem = problem, problem if travel.latents else of_keys(problem)
    if html is not None and machine is not None:
        _write_page([layout, *layouts[1:]], problem, machine, f"{mask}, on {hardware}", html)
        if len(layouts) > 1:
            return
    of_plans = {"hardware": hardware, "score-matrix": score_matrix, "timeline": timeline}
    if is_routed(layout, problem.axes):
        _refuse(_ROUTED, of_plans | {"choose": choose})
        _print_routed(layout, axis, problem)
        return
    if fetched:
        if problem.choice is None:
            raise DeclarationError(
                f"{layout.source}: only those keys travel that the model chooses, R(top_k); say how"
                " many each query chooses by --choose"
            )
        _refuse(_CHOSEN, of_plans)
        _print_chosen(layout, axis, problem)
        return
    if layout.world_size > MOST_PLANNED:
        raise ShapeError(
            f"{layout.source}: {layout.world_size:,} ranks are more than the {MOST_PLANNED:,} that "
            "are planned here"
        )
    with working(f"planning {layout.world_size:,} ranks"):
        read = reading(layout, problem)
    _print(layout, axis, problem, read)
    if travel is not None:
        _print_travel(layout, before, travel, f"of {hardware}" if machine else "of the layout")
    if machine is not None:
        _print_times(layout, problem, machine, f"on {hardware}")
    elif layout.rates:
        _print_rated_times(layout, problem)
    if score_matrix or timeline:
        plans = list(plans_for(layout, problem, range(layout.world_size)))
        _draw(plans, f"{layout.name}, {axis}, {mask}", score_matrix, timeline)


def _refuse(why: str, asked: Mapping[str, object]) -> None:
    """Raise for what was asked of a layout whose plan does not have it."""
    for name, value in asked.items():
        if value:
            raise DeclarationError(f"--{name}: {why}")


def _rated(layout: Layout, machine: Hardware | None) -> Layout:
    """The layout at the rates of a machine, by which calls on it choose."""
    if machine is None:
        return layout
    data = {**layout.declaration, "rates": rates_of(machine)}
    return Layout.from_dict(data, layout.name, layout.source)


def _write_page(
    layouts: Sequence[Layout | str], problem: Problem, machine: Hardware, where: str, path: Path
) -> None:
    """A page of layouts side by side, all of them of one call."""
    from ..inspect.page import write_page

    found = [options.resolved(each) if isinstance(each, str) else each for each in layouts]
    for each in found:
        options.attended(each, "+".join(problem.axes))
        if is_routed(each, problem.axes):
            raise UnsupportedError(f"--html: {each.source}: {_ROUTED}")
    with working("playing layouts"):
        write_page(found, problem, machine, f"{problem.n:,} tokens, {where}", path)
    wrote("page", path)


def _draw(plans: list[Plan], title: str, score_matrix: Path | None, timeline: Path | None) -> None:
    if score_matrix is not None:
        from ..inspect.score_matrix import draw_score_matrix

        draw_score_matrix(plans, score_matrix, title)
        wrote("score matrix", score_matrix)
    if timeline is not None:
        from weft.inspect.timeline import from_plans

        from_plans(plans).draw(timeline, title)
        wrote("timeline", timeline)


# -- a call whose plan is known -------------------------------------------------------------------


def _print(layout: Layout, axis: str, problem: Problem, read: Reading) -> None:
    out = console()
    plans = list(plans_for(layout, problem, read.ranks))
    first, p = plans[0].forward, plans[0].problem
    halo = () if plans[0].seen is None else plans[0].seen.dims
    chunked = {d.name: d.transport for along in first.dims for d in along}
    _print_rules(layout, axis, chunked | dict.fromkeys(halo, "halo"))
    kernel = plans[0].kernel(False).name
    say(f"\n{_sizes(problem, p.head_dim)}; kernel {kernel}; {read}\n")
    passes = ([plan.forward, plan.backward] for plan in plans)
    calls = max(
        sum(len(run.block(b).groups) for run in both for b in run.program.blocks) for both in passes
    )
    say(f"kernel calls of a rank, forward and backward: {calls}\n")
    forecasts = [forecast_of(plan) for plan in plans]
    chunks = math.prod(layout.size(axis) for axis in problem.axes)
    unit = p.batch * p.heads * p.n * p.head_dim * p.dtype.itemsize / chunks
    for backward in (False, True):
        out.print(tables.traffic_table(forecasts, backward, unit))
        out.print()
    out.print(tables.per_rank(forecasts))
    for name in ("forward", "backward"):
        bounds = [memory_bound(getattr(plan, name)) for plan in plans]
        if any(b.nbytes for b in bounds):
            out.print(f"{name}, held for others at one time: at most {limit(bounds)}")


def _print_rules(layout: Layout, axis: str, transports: dict[str, str]) -> None:
    out = console()
    out.print(f"[bold]{escape(layout.name)}[/]  {escape(layout.about)}")
    rest = [a for a in layout.attend if a != axis]
    note = f"; it also attends {', '.join(rest)} (--axis)" if rest else ""
    out.print(f"attention over [bold]{axis}[/]{note}\n")
    if layout.mesh:
        out.print(tables.mesh(layout, axis.split("+")))
    if layout.inside_node:
        out.print(
            f"inside_node: a launch that puts ranks along {' or '.join(layout.inside_node)} on "
            "several nodes is refused\n"
        )
    for line in tables.rules_in_words(layout, axis.split("+"), transports):
        out.print(line)


def _sizes(problem: Problem, head_dim: int) -> str:
    keys = f"{problem.kv_heads} key/value heads"
    if problem.expanded is not None:
        keys = f"{problem.expanded.heads} key/value heads made of latents on arrival"
    return (
        f"with {problem.n} queries, {problem.m} keys, {problem.heads} heads of {head_dim}, {keys},"
        f" batch {problem.batch}, {str(problem.dtype)[6:]}"
    )


def _print_travel(layout: Layout, problem: Problem, travel: Travel, whose: str) -> None:
    """The choice between latents and keys: bytes of a rank, and seconds, of both passes."""
    expanded = problem.expanded
    assert expanded is not None
    wide = expanded.heads * (expanded.head_dim + expanded.value_dim)
    why = travel.why or (
        f"fewer bytes, unless the call takes longer by more than {round(100 * (WORTH - 1))} %"
    )
    ways = (("latents", travel.if_latents), ("keys and values", travel.if_keys))
    console().print()
    print_table(
        f"latents of {' + '.join(map(str, expanded.carried))} numbers per token, keys and values of"
        f" {wide:,}: {'latents' if travel.latents else 'keys'} travel",
        ("what travels", ">received, both passes", ">time"),
        [(name, words.nbytes(way.received), words.show_time(way.seconds)) for name, way in ways],
        f"of one rank without a mask, at the rates {whose}; every rank expands what arrives, in"
        f" both passes. Chosen: {why}",
    )
    if travel.latents:
        entry = next(plans_for(layout, problem, [0])).compute.key
        held = entry.batch * count(entry.spans) * wide * problem.dtype.itemsize
        say(f"expanded, while a chunk is computed with: {words.nbytes(held)}")


def _print_rated_times(layout: Layout, problem: Problem) -> None:
    """Times at the layout's own rates, with those named that are assumed."""
    links = () if "level" in layout.rates else ("bandwidth", "latency")
    assumed = [name for name in ("flops", *links) if name not in layout.rates]
    title = "at the layout's rates" + (f"; {', '.join(assumed)} assumed" if assumed else "")
    try:
        _print_times(layout, problem, rates_for(problem.device, layout.rates), title)
    except UnsupportedError as error:  # too many ranks: nobody asked for times
        say(f"no predicted times: {error}")


def _print_times(layout: Layout, problem: Problem, machine: Hardware, title: str) -> None:
    """Seconds of each pass on some hardware, bytes sent at each of its levels, and shares."""
    with working("replaying the ranks' programs"):
        run = replayed(layout, problem, machine)
    timing = run.timing
    times = {
        "forward": (timing.compute[0], timing.forward),
        "backward": (timing.compute[1], timing.backward),
        "both": (sum(timing.compute), timing.total),
    }
    levels = zip(machine.level, timing.bytes_of_levels)
    moved = ", ".join(f"{level.name} {words.nbytes(n)}" for level, n in levels)
    caption = f"bytes sent by all ranks replayed, by level: {moved}"
    if len(set(machine.device.speeds)) > 1:
        each = ", ".join(words.show_time(seconds) for seconds in timing.compute_of_ranks)
        caption += f"\ncompute alone, rank by rank: {each}"
    print_table(
        f"predicted times {title}{run.note}",
        ("pass", ">compute alone", ">in all"),
        [(name, *map(words.show_time, seconds)) for name, seconds in times.items()],
        caption,
    )


# -- a call whose keys a router or the model chooses ----------------------------------------------


def _print_routed(layout: Layout, axis: str, problem: Problem) -> None:
    """Least and most bytes of a routed call: which blocks travel depends on weights."""
    _print_rules(layout, axis, {})
    routing = routing_options(layout, problem.axes)
    dims = check_routed(layout, problem.axes, problem.mask)
    blocks = blocks_per_rank(routing, layout, dims) * math.prod(layout.mesh[d] for d in dims)
    say(
        f"\n{_sizes(problem, problem.head_dim)}: each of {blocks} blocks of queries attends to its"
        f" own block of keys and to {min(routing.top_k, blocks - 1)} of {blocks - 1} others\n"
    )
    _print_bounds(layout, lambda rank: routed_bounds(layout, problem, routing, rank))
    _print_as_ring(layout, problem, "Which blocks travel depends on the router's weights.")


def _print_chosen(layout: Layout, axis: str, problem: Problem) -> None:
    """Least and most bytes of a call whose keys the model chooses."""
    _print_rules(layout, axis, {})
    assert problem.choice is not None
    (first,) = plans_for(layout, problem, [0])
    say(
        f"\n{_sizes(problem, first.problem.head_dim)}: each query attends to"
        f" {problem.choice.count:,} keys\n"
    )
    with console().status("counting"), still_here("counting the keys that queries see"):
        _print_bounds(layout, lambda rank: chosen_bounds(layout, problem, rank))
    _print_as_ring(layout, problem, "Which keys travel depends on the choices.")


def _print_as_ring(layout: Layout, problem: Problem, why: str) -> None:
    """Bytes that rank 0 would receive if all keys travelled."""
    (first,) = plans_for(layout, problem, [0])
    entry, p = first.compute.key, first.problem
    keys = problem.m - count(entry.spans)
    as_ring = keys * entry.batch * entry.heads * sum(p.dims(Side.KEY)) * p.dtype.itemsize
    ring = words.nbytes(as_ring)
    say(f"{why} All of them would be {ring} to rank 0, forward, as in a ring.")


def _print_bounds(layout: Layout, bounds_of: Callable[[int], list[ByteBounds]]) -> None:
    """Bytes that ranks receive in both passes, at least and at most, by mesh dim and tensor."""
    total = layout.world_size
    last = max(1, min(total, MOST_READ) - 1)  # of many ranks some, from the first to the last
    bounds = [bounds_of(i * (total - 1) // last) for i in range(min(total, MOST_READ))]
    for backward in (False, True):
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for place, of_rank in enumerate(bounds):
            for b in of_rank:
                if b.backward == backward:
                    rows = found.setdefault((b.mesh_dim, b.what), [(0, 0)] * len(bounds))
                    rows[place] = b.least, b.most
        name = "backward" if backward else "forward"
        print_table(
            f"{name}: bytes that each rank receives, at least and at most",
            ("mesh dim", "what", ">rank 0", ">any rank"),
            [
                (
                    mesh_dim,
                    PAYLOAD.get((label, backward), label),
                    _between(*rows[0]),
                    _between(min(least for least, _ in rows), max(most for _, most in rows)),
                )
                for (mesh_dim, label), rows in found.items()
                if any(most for _, most in rows)
            ],
        )
    if len(bounds) < total:
        say(f"read: {len(bounds)} of {total} ranks, spread over the mesh")


def _between(least: int, most: int) -> str:
    """Bytes at least and at most."""
    if least == most:
        return words.nbytes(least)
    return f"{words.nbytes(least)} to {words.nbytes(most)}"
