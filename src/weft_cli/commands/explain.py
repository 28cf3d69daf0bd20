"""`weft explain`: communication, memory and computation of a layout."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from torch.distributed.tensor import Shard

from weft.choice import ChoiceKind
from weft.declare.hardware import Hardware
from weft.declare.one_line import is_line
from weft.declare.placements import SEQ
from weft.declare.rates import rates_for, rates_of
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.fetching.bounds import ByteBounds, chosen_bounds
from weft.fetching.rules import fetches
from weft.inspect import words
from weft.kernels import accumulate_dtype
from weft.layout import Layout
from weft.plan.lists import IndexSizes, list_plan
from weft.plan.memory import memory_bound
from weft.plan.order import count
from weft.plan.plan import Plan
from weft.plan.predict import forecast_of, plans_for
from weft.plan.problem import Problem
from weft.plan.sides import TRAVELS, Side
from weft.plan.travel import WORTH, Travel, choose_travel, of_keys
from weft_models.declare.model_file import ModelSpec
from weft_models.routing.attention import blocks_per_rank, check_routed
from weft_models.routing.bounds import routed_bounds
from weft_models.routing.geometry import is_routed
from weft_models.routing.module import routing_options
from weft_planner.flow import Timing, replayed
from weft_planner.shares import choose_shares

from ..inspect import tables
from ..inspect.ranks import Reading, reading
from ..inspect.ranks import plans as read_plans
from . import options
from .explain_model import explain_model, is_model
from .options import console

#: Of how many ranks the bounds of a routed call are read, and how many are planned.
MOST_READ, MOST_PLANNED = 32, 1 << 16
#: Ranks of which shares are tried: each try replays all of them.
MOST_SHARED = 64
#: Options that only a call has, not a model.
_OF_CALL = (
    *("axis", "keys", "heads", "kv_heads", "head_dim", "value_dim", "latents", "mask", "choose"),
    *("index", "device"),
    *("state", "every_rank", "score_matrix", "timeline", "html"),
)


_CHOSEN = "what a layout moves and computes of chosen keys depends on the choice"
_ROUTED = "what a routed layout moves and computes depends on the router's weights"


def explain(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] LAYOUT...",
            help="A layout: its name (see `weft list layouts`), a path to a .toml, or one line "
            "such as 'tokens: ulysses=2 x ring=2'. After a model's name or path, one layout or "
            "several, compared.",
            show_default=False,
        ),
    ],
    axis: Annotated[
        str | None,
        options.of_call(
            "The attended axis; 'a+b' attends two axes jointly.",
            show_default="the first that communicates",
        ),
    ] = None,
    length: Annotated[
        str | None,
        options.of_call(
            "Queries of the whole axis, over all ranks; 'a=64,b=5' for several axes.",
            show_default=f"{options.LENGTH}; {options.OF_MODEL}",
        ),
    ] = None,
    keys: options.Keys = None,
    heads: options.Heads = options.HEADS,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = options.HEAD_DIM,
    value_dim: options.ValueDim = None,
    latents: options.LatentDims = None,
    batch: options.Batch = None,
    mask: options.Mask = options.MASK,
    choose: options.Choose = None,
    index: options.Index = None,
    order: options.Order = None,
    dtype: options.DType = options.PLANNED_DTYPE,
    device: options.PlannedDevice = None,
    nproc: options.Nproc = None,
    hardware: Annotated[
        str | None,
        options.of_run(
            "Predict times on a machine: a name (see `weft list hardware`), or a path to a .toml.",
            show_default="the layout's rates, if it has any",
        ),
    ] = None,
    state: Annotated[
        bool,
        options.of_run("Also the states that a recurrent layer of these heads receives."),
    ] = False,
    ranks_per_node: Annotated[
        int | None,
        options.of_run(
            "Refuse a layout whose inside_node mesh dims would span nodes of this many ranks.",
            min=1,
            show_default="not checked",
        ),
    ] = None,
    gradients: options.Gradients = None,
    every_rank: Annotated[
        bool,
        options.of_run("Read every rank's plan, however many there are."),
    ] = False,
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
    """Show the rules, traffic, memory and work of a layout. Starts nothing.

    Shows the mesh and each mesh dim's rule in words; then, for an attention call
    of the sizes given, the bytes that ranks receive, and memory and work per
    rank; and predicted times, where the layout has rates (weft rates measures
    them). Ranks that are proven equivalent are read once, and of more than 64
    that are not a few are read, spread over the mesh; the output says which. Of a
    routed layout it shows the bytes at least and at most, whatever the router has
    learned, and so where only those keys travel that a model chooses (--choose).
    A layout on one line is printed as the file that it stands for.

    After a model: everything that a training step moves and holds, by its
    purpose, of one layout or several side by side. The model's own code is
    counted, on tensors without numbers.

    Examples:

        weft explain tile-2x2

        weft explain ring-zigzag-4 --mask causal --score-matrix scores.png

        weft explain hierarchical-2x2 --kv-heads 4 --timeline program.png

        weft explain 'tokens(zigzag): ulysses=2 x ring=4' --mask causal

        weft explain tile-2x4 'tokens(zigzag): ring=8' --mask causal --hardware h100-8 \\
            --html page.html

        weft explain tile-2x2 --mask causal --choose 2048 --index 64x128

        weft explain chosen-4 --mask causal --choose 16 --length 1024 --index 64x128

        weft explain causal_lm head-x-ring tp-x-ring --length tokens=4096 --hardware h100-8
    """
    if is_model(names[0]):
        options.refuse_given(context, _OF_CALL, "it is of one attention call, not of a model")
        if len(names) == 1:
            raise DeclarationError(f"which layouts for model {names[0]!r}? Name one or several")
        several = [options.layout_named(name, order) for name in names[1:]]
        resolved = [each.resolve(options.ranks_of(each, nproc)) for each in several]
        kind = options.dtype_named(dtype)
        spec = ModelSpec.load(names[0])
        explain_model(spec, resolved, batch, length, kind, gradients, hardware, ranks_per_node)
        return
    if html is not None and hardware is None:
        raise DeclarationError("--html: a page plays layouts on a machine; name it by --hardware")
    if len(names) > 1 and html is None:
        raise DeclarationError(
            f"{names[0]!r} is no model, and one layout is explained at a time; `weft plan` compares"
            " layouts for an attention call, `--html` shows them side by side, and `weft explain"
            " MODEL LAYOUT...` for a model"
        )
    options.refuse_given(context, ["gradients"], options.NO_GRADIENTS)
    declared = options.layout_named(names[0], order, axis)
    layout = declared.resolve(options.ranks_of(declared, nproc))
    options.refuse_split_nodes(layout, ranks_per_node)
    axis = options.attended(layout, axis or options.first_axis(layout))[0]
    if is_line(names[0]):
        console().print("the line stands for this file:\n")
        console().print(declared.to_toml() + "\n", markup=False, soft_wrap=True)
    machine = None if hardware is None else Hardware.load(hardware)
    problem = options.problem_of(
        axis,
        options.lengths_of(length or options.LENGTH, axis, options.known_axes(layout)),
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
        device=device or options.planned_device(None, machine),
    )
    if index is not None and choose is None:
        raise DeclarationError("--index: index keys choose keys; say how many by --choose")
    index_keys = None if index is None else options.heads_by_size("--index", index)
    if choose is not None:
        chosen = ChoiceKind(1, min(choose, problem.m), check=False)
        problem = replace(problem, choice=chosen)
    travel, fetched = None, fetches(layout, problem.axes)
    if problem.expanded is not None and not (fetched and choose is not None):
        options.refuse_routed_axis(layout, axis)
        travel = choose_travel(_rated(layout, machine), problem.on(layout, 0))
        before, problem = problem, problem if travel.latents else of_keys(problem)
    if html is not None and machine is not None:
        _write_page([layout, *names[1:]], problem, machine, f"{mask}, on {hardware}", html)
        if len(names) > 1:
            return
    if is_routed(layout, problem.axes):
        if score_matrix or timeline:
            options.refuse_routed_axis(layout, axis)
        of_plans = ["hardware", "state", "every_rank", "device", "choose", "index"]
        options.refuse_given(context, of_plans, _ROUTED)
        _print_routed(layout, axis, problem)
        return
    if fetched:
        if problem.choice is None:
            raise DeclarationError(
                f"{layout.source}: only those keys travel that the model chooses, R(top_k); say how"
                " many each query chooses by --choose"
            )
        of_plans = ["hardware", "state", "every_rank", "score_matrix", "timeline"]
        options.refuse_given(context, of_plans, _CHOSEN)
        _print_chosen(layout, axis, problem)
        if index_keys is not None:
            _print_index(layout, problem, *index_keys)
        return
    if layout.world_size > MOST_PLANNED:
        raise ShapeError(
            f"{layout.source}: {layout.world_size:,} ranks are more than the {MOST_PLANNED:,} that "
            "are planned here"
        )
    work = f"planning {layout.world_size:,} ranks"
    with console().status(work), options.still_here(work):
        read = reading(layout, problem, every_rank)
    _print(layout, axis, problem, read)
    if travel is not None:
        _print_travel(layout, before, travel, f"of {hardware}" if machine else "of the layout")
    if index_keys is not None:
        _print_index(layout, problem, *index_keys)
    if state or axis in layout.carry:
        _print_states(layout, axis, problem)
    if machine is not None:
        _print_times(layout, problem, machine, f"on {hardware}")
    elif layout.rates:
        _print_rated_times(layout, problem)
    if score_matrix or timeline:
        plans = list(plans_for(layout, problem, range(layout.world_size)))
        _draw(plans, f"{layout.name}, {axis}, {mask}", score_matrix, timeline)


def _rated(layout: Layout, machine: Hardware | None) -> Layout:
    """The layout at the rates of a machine, by which calls on it choose."""
    if machine is None:
        return layout
    data = {**layout.declaration, "rates": rates_of(machine)}
    return Layout.from_dict(data, layout.name, layout.source)


def _print_travel(layout: Layout, problem: Problem, travel: Travel, whose: str) -> None:
    """The choice between latents and keys: bytes of a rank, and seconds, of both passes."""
    expanded = problem.expanded
    assert expanded is not None
    wide = expanded.heads * (expanded.head_dim + expanded.value_dim)
    result = tables.table(
        f"latents of {' + '.join(map(str, expanded.carried))} numbers per token, keys and values of"
        f" {wide:,}: {'latents' if travel.latents else 'keys'} travel",
        *("what travels", "received, both passes", "time"),
        right=("received, both passes", "time"),
    )
    for name, way in (("latents", travel.if_latents), ("keys and values", travel.if_keys)):
        result.add_row(name, words.nbytes(way.received), words.show_time(way.seconds))
    why = travel.why or (
        f"fewer bytes, unless the call takes longer by more than {round(100 * (WORTH - 1))} %"
    )
    result.caption = (
        f"of one rank without a mask, at the rates {whose}; every rank expands what arrives, in"
        f" both passes. Chosen: {why}"
    )
    result.caption_justify = "left"
    console().print()
    console().print(result)
    if travel.latents:
        entry = next(plans_for(layout, problem, [0])).compute.key
        held = entry.batch * count(entry.spans) * wide * problem.dtype.itemsize
        console().print(f"expanded, while a chunk is computed with: {words.nbytes(held)}")


def _write_page(
    layouts: Sequence[Layout | str], problem: Problem, machine: Hardware, where: str, path: Path
) -> None:
    """A page of layouts side by side, all of them of one call."""
    from ..inspect.page import write_page

    found = [options.layout_named(each) if isinstance(each, str) else each for each in layouts]
    resolved = [each.resolve(options.ranks_of(each, None)) for each in found]
    for each in resolved:
        options.attended(each, "+".join(problem.axes))
        if is_routed(each, problem.axes):
            raise UnsupportedError(f"--html: {each.source}: {_ROUTED}")
    title = f"{problem.n:,} tokens, {where}"
    with console().status("playing"), options.still_here("playing layouts"):
        write_page(resolved, problem, machine, title, path)
    console().print(f"page: {path}", markup=False)


def _print_routed(layout: Layout, axis: str, problem: Problem) -> None:
    """Least and most bytes of a routed call: which blocks travel depends on weights."""
    out = console()
    _print_rules(layout, axis, {})
    routing = routing_options(layout, problem.axes)
    dims = check_routed(layout, problem.axes, problem.mask)
    per_rank = blocks_per_rank(routing, layout, dims)
    blocks = per_rank * math.prod(layout.mesh[d] for d in dims)
    out.print(
        f"\nwith {problem.n} queries, {problem.m} keys, {problem.heads} heads of "
        f"{problem.head_dim}, {problem.kv_heads} key/value heads, batch {problem.batch}, "
        f"{str(problem.dtype)[6:]}: each of {blocks} blocks of queries attends to its own block of "
        f"keys and to {min(routing.top_k, blocks - 1)} of {blocks - 1} others\n",
        highlight=False,
    )
    _print_bounds(layout, lambda rank: routed_bounds(layout, problem, routing, rank))
    (first,) = plans_for(layout, problem, [0])
    _print_as_ring(problem, first, "Which blocks travel depends on the router's weights.")


def _print_chosen(layout: Layout, axis: str, problem: Problem) -> None:
    """Least and most bytes of a call whose keys the model chooses."""
    out, (first,) = console(), plans_for(layout, problem, [0])
    _print_rules(layout, axis, {})
    assert problem.choice is not None
    out.print(
        f"\nwith {problem.n} queries, {problem.m} keys, {problem.heads} heads of "
        f"{first.problem.head_dim}, {_of_keys(problem)}, batch {problem.batch}, "
        f"{str(problem.dtype)[6:]}: each query attends to {problem.choice.count:,} keys\n",
        highlight=False,
    )
    with console().status("counting"), options.still_here("counting the keys that queries see"):
        _print_bounds(layout, lambda rank: chosen_bounds(layout, problem, rank))
    _print_as_ring(problem, first, "Which keys travel depends on the choices.")


def _print_as_ring(problem: Problem, first: Plan, why: str) -> None:
    """Bytes that rank 0 would receive if all keys travelled."""
    entry, p = first.compute.key, first.problem
    keys = problem.m - count(entry.spans)
    as_ring = keys * entry.batch * entry.heads * sum(p.dims(Side.KEY)) * p.dtype.itemsize
    console().print(
        f"{why} All of them would be {words.nbytes(as_ring)} to rank 0, forward, as in a ring.",
        highlight=False,
    )


def _print_bounds(layout: Layout, bounds_of: Callable[[int], list[ByteBounds]]) -> None:
    """Tables of both passes, of all ranks or of some."""
    bounds = [bounds_of(rank) for rank in _some_ranks(layout.world_size)]
    for backward in (False, True):
        console().print(_routed(bounds, backward))
    if len(bounds) < layout.world_size:
        read = f"{len(bounds)} of {layout.world_size} ranks"
        console().print(f"read: {read}, spread over the mesh")


def _routed(bounds: Sequence[Sequence[ByteBounds]], backward: bool) -> Table:
    """Bytes that ranks receive in a routed pass: at least and at most, by mesh dim and tensor."""
    name = "backward" if backward else "forward"
    result = tables.table(
        f"{name}: bytes that each rank receives, at least and at most",
        *("mesh dim", "what", "rank 0", "any rank"),
        right=("rank 0", "any rank"),
    )
    per_rank: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for rank, of_rank in enumerate(bounds):
        for b in of_rank:
            if b.backward == backward:
                rows = per_rank.setdefault((b.mesh_dim, b.what), [(0, 0)] * len(bounds))
                rows[rank] = b.least, b.most
    for (mesh_dim, label), rows in per_rank.items():
        if any(most for _, most in rows):
            least, most = (f(column) for f, column in zip((min, max), zip(*rows)))
            payload = words.PAYLOAD.get((label, backward), label)
            result.add_row(mesh_dim, payload, _between(*rows[0]), _between(least, most))
    return result


def _between(least: int, most: int) -> str:
    """Bytes at least and at most."""
    if least == most:
        return words.nbytes(least)
    return f"{words.nbytes(least)} to {words.nbytes(most)}"


def _some_ranks(ranks: int) -> list[int]:
    """All ranks, or some of many, spread evenly, the first and the last among them."""
    if ranks <= MOST_READ:
        return list(range(ranks))
    return sorted({i * (ranks - 1) // (MOST_READ - 1) for i in range(MOST_READ)})


def _print_rated_times(layout: Layout, problem: Problem) -> None:
    """Times at the layout's own rates, with those named that are assumed."""
    links = () if "level" in layout.rates else ("bandwidth", "latency")
    assumed = [name for name in ("flops", *links) if name not in layout.rates]
    title = "at the layout's rates" + (f"; {', '.join(assumed)} assumed" if assumed else "")
    try:
        _print_times(layout, problem, rates_for(problem.device, layout.rates), title)
    except UnsupportedError as error:  # too many ranks: nobody asked for times
        console().print(f"no predicted times: {error}", markup=False)


def _print_times(layout: Layout, problem: Problem, machine: Hardware, title: str) -> None:
    with console().status("replaying"), options.still_here("replaying the ranks' programs"):
        run = replayed(layout, problem, machine)
    console().print(_on_hardware(run.timing, machine, f"{title}{run.note}"))
    if len(set(machine.device.speeds)) > 1 and layout.world_size <= MOST_SHARED:
        _print_shares(layout, problem, machine)


def _print_shares(layout: Layout, problem: Problem, machine: Hardware) -> None:
    """The shares of ranks that are not alike with which the call ends first."""
    try:
        with console().status("trying shares"):
            choice = choose_shares(layout, problem, machine)
    except (DeclarationError, UnsupportedError):  # it splits no tokens, or has an order as data
        return
    if not choice.layout.share:
        console().print("equal shares end first", highlight=False)
        return
    share = ", ".join(f"{dim} = {list(each)}" for dim, each in choice.layout.share.items())
    console().print(
        f"shares that end first, [share] {share}: {words.show_time(choice.timing.total)},"
        f" {choice.timing.total / choice.equal.total:.2f} of equal ones",
        markup=False,
        highlight=False,
    )


def _on_hardware(timing: Timing, machine: Hardware, title: str) -> Table:
    """Seconds of each pass on some hardware, and bytes sent at each of its levels."""
    result = tables.table(
        f"predicted times {title}",
        *("pass", "compute alone", "in all"),
        right=("compute alone", "in all"),
    )
    passes = (timing.forward, timing.backward)
    for name, compute, seconds in zip(("forward", "backward"), timing.compute, passes):
        result.add_row(name, words.show_time(compute), words.show_time(seconds))
    result.add_row("both", words.show_time(sum(timing.compute)), words.show_time(timing.total))
    levels = zip(machine.level, timing.bytes_of_levels)
    moved = ", ".join(f"{level.name} {words.nbytes(n)}" for level, n in levels)
    result.caption = f"bytes sent by all ranks replayed, by level: {moved}"
    if len(set(machine.device.speeds)) > 1:
        each = ", ".join(words.show_time(seconds) for seconds in timing.compute_of_ranks)
        result.caption += f"\ncompute alone, rank by rank: {each}"
    result.caption_justify = "left"
    return result


def _draw(plans: list[Plan], title: str, score_matrix: Path | None, timeline: Path | None) -> None:
    if score_matrix is not None:
        from weft.inspect.score_matrix import draw_score_matrix

        draw_score_matrix(plans, score_matrix, title)
        console().print(f"score matrix: {score_matrix}")
    if timeline is not None:
        from weft.inspect.timeline import from_plans

        from_plans(plans).draw(timeline, title)
        console().print(f"timeline: {timeline}")


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


def _of_keys(problem: Problem) -> str:
    if problem.expanded is None:
        return f"{problem.kv_heads} key/value heads"
    return f"{problem.expanded.heads} key/value heads made of latents on arrival"


def _print(layout: Layout, axis: str, problem: Problem, read: Reading) -> None:
    out = console()
    plans = list(read_plans(layout, problem, read))
    first, p = plans[0].forward, plans[0].problem
    halo = () if plans[0].seen is None else plans[0].seen.dims
    chunked = {d.name: d.transport for along in first.dims for d in along}
    _print_rules(layout, axis, chunked | dict.fromkeys(halo, "halo"))
    out.print(
        f"\nwith {problem.n} queries, {problem.m} keys, {problem.heads} heads of {p.head_dim}, "
        f"{_of_keys(problem)}, batch {problem.batch}, {str(p.dtype)[6:]}; kernel "
        f"{plans[0].kernel(False).name}; {read}\n",
        highlight=False,
    )
    out.print(f"{_kernel_calls(layout, problem, plans, read)}\n", highlight=False)
    forecasts = [forecast_of(plan) for plan in plans]
    chunks = math.prod(layout.size(axis) for axis in problem.axes)
    unit = p.batch * p.heads * p.n * p.head_dim * p.dtype.itemsize / chunks
    for backward in (False, True):
        name = "backward" if backward else "forward"
        if any(getattr(f, name).traffic.bytes for f in forecasts):
            out.print(tables.traffic_table(forecasts, backward, unit))
            out.print()
        else:
            out.print(f"{name}: nothing travels\n")
    out.print(tables.per_rank(forecasts))
    for name in ("forward", "backward"):
        bounds = [memory_bound(getattr(plan, name)) for plan in plans]
        if any(b.nbytes for b in bounds):
            out.print(f"{name}, held for others at one time: at most {words.limit(bounds)}")


def _kernel_calls(layout: Layout, problem: Problem, plans: list[Plan], read: Reading) -> str:
    """Kernel calls of the busiest rank, and an order of mesh dims that makes fewer of them."""
    calls = _calls(plans)
    text = f"kernel calls of a rank, forward and backward: {calls}"
    rules = plans[0].rules.items()
    exchanging = [d for d, r in rules if r.role not in TRAVELS and r.query.rest == Shard(SEQ)]
    order = [*(d for d in layout.mesh if d not in exchanging), *exchanging]
    if list(layout.mesh) == order or not exchanging:
        return text
    declared = tomllib.loads(layout.to_toml())
    declared["mesh"] = {d: declared["mesh"][d] for d in order}
    for axis, dims in declared["shard"].items():
        declared["shard"][axis] = sorted(dims, key=order.index)
    other = Layout.from_dict(declared)
    fewer = _calls(list(read_plans(other, problem, read)))
    mesh = " x ".join(f"{d}={n}" for d, n in other.mesh.items())
    return f"{text}; with the mesh dims in the order {mesh}: {fewer}" if fewer < calls else text


def _calls(plans: list[Plan]) -> int:
    """Calls of both passes, of the rank that makes the most."""
    return max(
        sum(
            len(run.block(b).groups)
            for run in (plan.forward, plan.backward)
            for b in run.program.blocks
        )
        for plan in plans
    )


def _print_index(layout: Layout, problem: Problem, heads: int, size: int) -> None:
    """Bytes by which a model chooses keys: of index keys, or of index queries and lists."""
    if len(problem.axes) > 1:
        raise UnsupportedError("--index: keys are chosen along one axis, not along several jointly")
    (axis,), (plan,) = problem.axes, plans_for(layout, problem, [0])
    kind, batch, item = plan.problem.choice, plan.problem.batch, problem.dtype.itemsize
    assert kind is not None
    score = accumulate_dtype(problem.dtype).itemsize
    sizes = IndexSizes(batch, kind.count, size * item, heads * (size + 1) * item, score)
    lists = list_plan(layout.unbound, axis, (problem.n, problem.m), 0, sizes)
    rows, keys = (sum(map(count, t)) for t in (lists.query_spans(), lists.key_spans()))
    moved = lists.traffic(False).by_tensor()
    if lists.lists:
        way = (
            f"by lists along {', '.join(lists.lists)}: rank 0 receives"
            f" {words.nbytes(moved.get('index', 0))} of index queries of {size}, their weights and"
            f" index keys, and {words.nbytes(moved.get('lists', 0))} of lists of (score, position)"
        )
    else:
        held = count(lists.own_keys(lists.coords))
        way = (
            f"by rows: index keys of {size}: rank 0 receives"
            f" {words.nbytes(moved.get('index', 0))}, those of {problem.m - held:,} other tokens"
        )
    console().print(
        f"\nchosen: {kind.count:,} of {problem.m:,} keys per query, {way}, forward, and nothing"
        f" backward; of {words.nbytes(score * batch * rows * heads * keys)} of scores ({rows:,}"
        f" queries, {heads} heads, {keys:,} keys) it makes a few rows at a time",
        highlight=False,
    )


def _print_states(layout: Layout, axis: str, problem: Problem) -> None:
    """Bytes that a recurrent layer of these heads receives, where the axis is split."""
    result = tables.states(layout, axis, problem.on(layout, 0))
    console().print()
    console().print(f"nothing is carried along {axis}" if result is None else result)
