"""Tables of a layout: its rules, traffic and cost, what is proven of it, and how exact it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from weft.declare.layout_file import HEADS
from weft.inspect import words
from weft.layout import Layout
from weft.plan.predict import Forecast
from weft_axes.testing.check import Comparison
from weft_proof.symbolic import Claim

from .printer import table, verdict
from .rule_words import LISTS, PAYLOAD, rule_in_words


def mesh(layout: Layout, axes: Sequence[str]) -> Table:
    """Every mesh dim: its size, what it splits at rest, its strategy and its rule."""
    bound = {
        mesh_dim: f"{binding.strategy.name}.{rule}"
        for binding in layout._bindings(tuple(axes))
        for rule, mesh_dim in binding.on.items()
    }
    return table(
        "mesh, outermost dim first",
        ("mesh dim", "ranks", "at rest", "strategy", "rule"),
        [
            (d, str(layout.mesh[d]), _rests(layout, d), bound.get(d, "-"), rule.describe())
            for d, rule in layout.rules(axes).items()
        ],
    )


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
        line = Text.assemble((mesh_dim, "bold cyan"), "  ", rule_in_words(rule))
        if mesh_dim in layout.shard_dims(HEADS):
            line.append(" Its heads are those of tensor-parallel projections.")
        if any(mesh_dim in layout.list_dims(axis) for axis in axes):
            line.append(" " + LISTS)
        lines.append(line)
    return lines


def traffic_table(forecasts: Sequence[Forecast], backward: bool, unit: float) -> Table | str:
    """Bytes that ranks receive in a pass, per mesh dim and tensor.

    The column u has rank 0's bytes in units of `unit` bytes: one rank's queries, the u of the
    strategies' volume formulas; the last one how many messages rank 0 sends.
    """
    name = "backward" if backward else "forward"
    passes = [getattr(forecast, name).traffic for forecast in forecasts]
    if not any(t.bytes for t in passes):
        return f"{name}: nothing travels"

    def row(mesh_dim: str, subject: str, received: list[int], messages: int) -> tuple[str, ...]:
        ends = (words.nbytes(n) for n in (received[0], min(received), max(received)))
        units = f"{received[0] / unit:.2f}" if unit else "-"
        return mesh_dim, subject, *ends, units, str(messages)

    rows = {key: [t.received[key] for t in passes] for t in passes for key in t.received}
    calls = {key: passes[0].calls[key] for key in rows}
    result = table(
        f"{name}: bytes that each rank receives",
        ("mesh dim", "what", ">rank 0", ">min", ">max", ">u", ">sends"),
        [
            row(key[0], PAYLOAD.get((key[1], backward), key[1]), received, calls[key])
            for key, received in rows.items()
            if any(received)
        ],
        "u: rank 0's bytes, where a rank's queries are 1. sends: messages of rank 0.",
    )
    result.add_section()
    result.add_row(*row("all", "", [t.bytes for t in passes], sum(calls.values())), style="bold")
    return result


def per_rank(forecasts: Sequence[Forecast]) -> Table:
    """Memory and work: rank 0, least, most, and how far the busiest is above the mean."""
    rows = {
        "q, k, v, out, logsumexp at rest": ([f.rest_bytes for f in forecasts], words.nbytes),
        "others' chunks, forward": ([f.forward.live_bytes for f in forecasts], words.nbytes),
        "others' chunks, backward": ([f.backward.live_bytes for f in forecasts], words.nbytes),
        "scores, forward": ([f.forward.entries for f in forecasts], words.amount),
        "scores, backward": ([f.backward.entries for f in forecasts], words.amount),
    }
    return table(
        "memory and work per rank",
        ("", ">rank 0", ">min", ">max", ">busiest / mean"),
        [
            (
                name,
                *map(show, (values[0], min(values), max(values))),
                f"{max(values) * len(values) / sum(values):.2f}" if any(values) else "-",
            )
            for name, (values, show) in rows.items()
        ],
    )


def claims_table(title: str, claims: Sequence[Claim]) -> Table:
    """Proven properties of a layout, the ranks that they were proven for, and violations."""
    return table(
        title,
        ("claim", "looked at", ""),
        [(c.what, "\n".join([c.how, *c.defects]), verdict(c.ok, "proven")) for c in claims],
    )


def comparisons_table(title: str, compared: Sequence[Comparison]) -> Table:
    """The error of every tensor, and the error allowed."""
    return table(
        title,
        ("tensor", ">largest error", ">allowed", ""),
        [(c.tensor, f"{c.error:.1e}", f"{c.allowed:.1e}", verdict(c.ok)) for c in compared],
    )
