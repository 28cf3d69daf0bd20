"""Rich tables: declarations that ship, and a layout's traffic, cost and exactness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from weft.carry.fragments import ChainExchange, StateExchange, by_heads, fragments
from weft.carry.pieces import MOST_GATHERED
from weft.declare import catalog
from weft.declare.hardware import Hardware
from weft.declare.layout_file import HEADS
from weft.declare.strategy import Strategy
from weft.inspect import words
from weft.layout import Layout
from weft.masks.names import MASKS
from weft.plan.predict import Forecast
from weft.plan.problem import LocalProblem
from weft.proof.symbolic import Claim
from weft.relayout.plan import placement, plan_redistribution
from weft.relayout.windows import TakePass, Windows


def table(title: str, *columns: str, right: Sequence[str] = (), **options: Any) -> Table:
    """An empty table in weft's style; columns in `right` hold numbers."""
    result = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
        min_width=min(len(title), 100),  # rich wraps a title to the width of its columns
        **options,
    )
    for i, name in enumerate(columns):
        result.add_column(
            name,
            justify="right" if name in right else "left",
            style="bold cyan" if i == 0 else None,
            no_wrap=i == 0 or name in right,
        )
    return result


# -- weft list ------------------------------------------------------------------------------------


def strategies() -> Table:
    """Every shipped strategy with its rules."""
    result = table("strategies", "name", "rules", "about")
    for name in catalog.names("strategies"):
        strategy = Strategy.load(name)
        result.add_row(name, ", ".join(strategy.all_rules) or "-", _first_sentence(strategy.about))
    return result


def layouts() -> Table:
    """Every shipped layout with its mesh and the axes it attends."""
    result = table("layouts", "name", "mesh", "attends", "about")
    for name in catalog.names("layouts"):
        layout = Layout.load(name)
        mesh = " x ".join(f"{d} {size}" for d, size in layout.mesh.items())
        result.add_row(name, mesh or "-", ", ".join(layout.attend), layout.about)
    return result


def models() -> Table:
    """Every shipped model with its axes."""
    result = table("models", "name", "axes", "about")
    for name in catalog.names("models"):
        data, _ = catalog.read_declaration("models", name)
        result.add_row(name, ", ".join(data.get("axes", ())), data.get("about", ""))
    return result


def masks() -> Table:
    """Every mask that commands take, by its name."""
    result = table("masks, as --mask takes them", "name", "who sees whom")
    for name, about in MASKS.items():
        result.add_row(name, about)
    return result


def hardware() -> Table:
    """Every shipped hardware file with its levels."""
    result = table("hardware, as --hardware takes it", "name", "levels", "about")
    for name in catalog.names("hardware"):
        machine = Hardware.load(name)
        result.add_row(name, ", ".join(level.name for level in machine.level), machine.about)
    return result


def _first_sentence(text: str) -> str:
    return text.split("; ")[0].split(": ")[0].rstrip(".")


# -- weft explain ---------------------------------------------------------------------------------


def mesh(layout: Layout, axes: Sequence[str]) -> Table:
    """Every mesh dim: its size, what it splits at rest, its strategy and its rule."""
    result = table("mesh, outermost dim first", "mesh dim", "ranks", "at rest", "strategy", "rule")
    bound = {
        mesh_dim: f"{binding.strategy.name}.{rule}"
        for binding in layout._bindings(tuple(axes))
        for rule, mesh_dim in binding.on.items()
    }
    for mesh_dim, rule in layout.rules(axes).items():
        result.add_row(
            mesh_dim,
            str(layout.mesh[mesh_dim]),
            _rests(layout, mesh_dim),
            bound.get(mesh_dim, "-"),
            rule.describe(),
        )
    return result


def _rests(layout: Layout, mesh_dim: str) -> str:
    for axis, dims in layout.sharding.items():
        if mesh_dim in dims:
            order = layout.order.get(axis)
            return f"splits {axis}" + (f" ({order})" if order not in (None, "contiguous") else "")
    return "replicated"


def rules_in_words(
    layout: Layout, axes: Sequence[str], transports: Mapping[str, str]
) -> list[Text]:
    """One paragraph per mesh dim; `transports` has those that a plan chose for "auto"."""
    lines = []
    for mesh_dim, rule in layout.rules(axes).items():
        rule = replace(rule, transport=transports.get(mesh_dim, rule.transport))
        line = Text.assemble((mesh_dim, "bold cyan"), "  ", words.rule_in_words(rule))
        if mesh_dim in layout.shard_dims(HEADS):
            line.append(" Its heads are those of tensor-parallel projections.")
        if any(mesh_dim in layout.list_dims(axis) for axis in axes):
            line.append(" " + words.LISTS)
        lines.append(line)
    return lines


def traffic_table(forecasts: Sequence[Forecast], backward: bool, unit: float) -> Table:
    """Bytes that ranks receive in a pass, per mesh dim and tensor.

    The column u has rank 0's bytes in units of `unit` bytes: one rank's queries, the u of the
    strategies' volume formulas; the last one how many messages rank 0 sends.
    """
    name = "backward" if backward else "forward"
    numbers = ("rank 0", "min", "max", "u", "sends")
    result = table(
        f"{name}: bytes that each rank receives",
        *("mesh dim", "what", *numbers),
        right=numbers,
        caption="u: rank 0's bytes, where a rank's queries are 1. sends: messages of rank 0.",
    )
    passes = [getattr(forecast, name).traffic for forecast in forecasts]
    rows = {key: [t.received[key] for t in passes] for t in passes for key in t.received}
    calls = {key: passes[0].calls[key] for key in rows}

    def row(
        mesh_dim: str, subject: str, received: list[int], messages: int, style: str | None = None
    ) -> None:
        ends = (words.nbytes(n) for n in (received[0], min(received), max(received)))
        units = f"{received[0] / unit:.2f}" if unit else "-"
        result.add_row(mesh_dim, subject, *ends, units, str(messages), style=style)

    for (mesh_dim, label), received in rows.items():
        if any(received):
            subject = words.PAYLOAD.get((label, backward), label)
            row(mesh_dim, subject, received, calls[mesh_dim, label])
    result.add_section()
    row("all", "", [t.bytes for t in passes], sum(calls.values()), "bold")
    return result


def per_rank(forecasts: Sequence[Forecast]) -> Table:
    """Memory and work: rank 0, least, most, and how far the busiest is above the mean."""
    numbers = ("rank 0", "min", "max", "busiest / mean")
    result = table("memory and work per rank", "", *numbers, right=numbers)
    rows = {
        "q, k, v, out, logsumexp at rest": ([f.rest_bytes for f in forecasts], words.nbytes),
        "others' chunks, forward": ([f.forward.live_bytes for f in forecasts], words.nbytes),
        "others' chunks, backward": ([f.backward.live_bytes for f in forecasts], words.nbytes),
        "scores, forward": ([f.forward.entries for f in forecasts], words.amount),
        "scores, backward": ([f.backward.entries for f in forecasts], words.amount),
    }
    for name, (values, show) in rows.items():
        mean = sum(values) / len(values)
        balance = f"{max(values) / mean:.2f}" if mean else "-"
        result.add_row(name, *(show(v) for v in (values[0], min(values), max(values))), balance)
    return result


# -- weft check -----------------------------------------------------------------------------------


def claims_table(title: str, claims: Sequence[Claim]) -> Table:
    """Proven properties of a layout, the ranks that they were proven for, and violations."""
    result = table(title, "claim", "looked at", "")
    for claim in claims:
        verdict = Text("proven", "green") if claim.ok else Text("WRONG", "bold red")
        result.add_row(claim.what, "\n".join([claim.how, *claim.defects]), verdict)
    return result


def states(layout: Layout, axis: str, problem: LocalProblem, taps: int = 4) -> Table | None:
    """Bytes that a recurrent layer along the axis would receive, where it can run on the layout.

    It is a gated delta rule of the call's heads (Gated DeltaNet, KDA), whose states are fp32, after
    a convolution of `taps` over its queries, keys and values. Raises `UnsupportedError` for striped
    tokens, of which a rank has too many runs.
    """
    by_heads_dims = layout.carries_by_heads(axis)
    other = by_heads(layout, axis) if by_heads_dims else layout
    ranks, way = other.size(axis), other.state_transport(axis)
    if layout.size(axis) == 1:
        return None
    heads = problem.heads // math.prod(layout.mesh[d] for d in by_heads_dims)
    key, value = problem.head_dim, problem.value_dim
    plan = fragments(other, axis, problem.n)
    number, column = heads * key * value * 4, heads * (2 * key + value) * problem.dtype.itemsize
    state, matrix = problem.batch * number, problem.batch * heads * key * key * 4
    if way == "auto":
        way = "chain" if ranks > MOST_GATHERED else "gather"
    moved: dict[str, list[tuple[int, int]]] = {"state": [], "columns to the left": []}
    for chunk in range(ranks):
        passing: ChainExchange | StateExchange
        if way == "chain":
            passing = ChainExchange(plan, chunk, (state,))
        else:
            passing = StateExchange(plan, chunk, state + matrix)
        left = plan.around(Windows(taps, 1, 1 - taps, problem.n, taps - 1))
        halo = TakePass(left, chunk, problem.batch * column)
        for name, traffic in zip(moved, (passing.traffic, halo.traffic)):
            moved[name].append((traffic(False).bytes, traffic(True).bytes))
    if by_heads_dims:
        moved["tokens for heads, and back"] = _traded(layout, other, axis, problem)
    how = {"chain": "handed on from rank to rank"}
    runs = f"{len(plan.slots)} runs of consecutive tokens; states are as large at any length."
    result = table(
        f"a recurrent layer along {axis} (gated delta rule, {taps} taps), received; states"
        f" {how.get(way, 'of all ranks to all')}",
        *("what", "rank 0", "any rank", "any rank, backward"),
        right=("rank 0", "any rank", "any rank, backward"),
        caption=runs,
    )
    for name, rows in moved.items():
        forward, backward = zip(*rows)
        result.add_row(name, *(words.nbytes(n) for n in (forward[0], max(forward), max(backward))))
    return result


def _traded(
    layout: Layout, other: Layout, axis: str, problem: LocalProblem
) -> list[tuple[int, int]]:
    """Bytes that ranks receive, forward and backward, where tokens are traded for heads.

    Queries, keys, values and two gates go there, outputs come back; gradients the other way.
    """
    before, after = (placement(each, (axis, HEADS)) for each in (layout, other))
    lengths = problem.n, problem.heads * layout.size(HEADS)
    found = []
    for rank in range(layout.world_size):
        there = plan_redistribution(before, after, lengths, rank, before.mesh)
        back = plan_redistribution(after, before, lengths, rank, before.mesh)
        inside, outside = 2 * problem.head_dim + problem.value_dim + 2, problem.value_dim
        each = problem.batch * problem.dtype.itemsize
        sums = [
            there.traffic(before.mesh, each * n, "").bytes
            + back.traffic(before.mesh, each * m, "").bytes
            for n, m in ((inside, outside), (outside, inside))
        ]
        found.append((sums[0], sums[1]))
    return found
