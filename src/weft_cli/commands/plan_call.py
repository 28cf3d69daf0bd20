"""`weft plan call`: the fastest layout of an attention call on given hardware."""

from __future__ import annotations

from typing import Annotated

from weft.declare.hardware import Hardware
from weft.errors import ShapeError, shown
from weft.inspect import words
from weft_planner import reasons
from weft_planner.search import Choices, Search

from ..inspect.printer import print_table, say, working, wrote
from . import options
from .plan_model import print_refused, write_layout


def call(
    *,
    hardware: options.Machine,
    devices: options.Devices,
    tokens: Annotated[
        str, options.of_call("Of the whole sequence, over all ranks.")
    ] = options.LENGTH,
    heads: options.Heads = options.HEADS,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = options.HEAD_DIM,
    batch: options.Batch = None,
    mask: options.Mask = options.MASK,
    dtype: options.DType = options.PLANNED_DTYPE,
    only: options.Only = None,
    memory: options.Memory = None,
    forward_only: Annotated[
        bool,
        options.of_run("Rank by the forward pass alone.", "--forward-only", show_default=False),
    ] = False,
    top: options.Top = 5,
    html: options.Page = None,
    write: options.Write = None,
) -> None:
    """Find the layout of an attention call on a machine. Starts nothing.

    Searches how many ways heads, queries and keys are split at each level of the
    hardware, and over which transport they travel. Every candidate has a lower
    bound in closed form; programs of the promising ones run on the clock of `weft
    explain call --hardware` until no other can be more than 1 % faster. Says what
    bounds the best one, what is second, and what was refused.

    Times are predictions; the last line says against what they were checked.

    Examples:

        weft plan call --tokens 131072 --heads 64 --kv-heads 8 --head-dim 128 --mask causal \\
            --devices 64 --hardware h100-8

        weft plan call --tokens 65536 --devices 8 --hardware ethernet-laptops --only "ulysses, ring"

        weft plan call --tokens 32768 --devices 16 --hardware h100-8 --write plan.toml
    """
    machine = Hardware.load(hardware)
    lengths = options.lengths_of(tokens, "tokens", ("tokens",), "--tokens")
    if not min(lengths):
        raise ShapeError(f"--tokens {shown(tokens)}: a plan needs 1 token or more")
    problem = options.problem_of(
        "tokens",
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=batch,
        mask=mask,
        dtype=dtype,
        device=machine.device.kernels,
    )
    search = Search(problem, machine, devices, options.names(only), memory, forward_only)
    label = f"searching {len(search.every):,} candidates"
    with working(label) as tell:
        choices = search.run(tell=lambda replays: tell(f"{replays + 1} on the clock"))
    _print(choices, search, top)
    print_refused(choices.refused, hardware, devices)
    if write is not None:
        seconds = words.show_time(choices.best.total)
        about = f"Planned for {devices} devices of {hardware}: {seconds} predicted."
        write_layout(choices.best.layout, about, write)
    if html is not None:
        from ..inspect.page import write_page

        best = [c.layout for c in choices.choices[:top]]
        write_page(best, problem, machine, f"{problem.n:,} tokens on {hardware}", html)
        wrote("page", html)


def _print(choices: Choices, search: Search, top: int) -> None:
    p = search.problem
    say(*(f"note: {line}\n" for line in reasons.warnings(search, choices)))
    say(
        f"{search.devices:,} devices; {p.n:,} tokens, {p.heads} heads of {p.head_dim}, "
        f"{p.kv_heads} key/value heads, batch {p.batch}, {str(p.dtype)[6:]}, mask {p.mask}\n"
    )
    levels = (f">{level.name}" for level in search.hardware.level)
    best = min(map(choices.seconds, choices.choices))
    of_both = "" if choices.passes == "forward" else ", their gradients"
    print_table(
        "predicted",
        ("layout", ">forward", ">backward", ">both", ">x best", *levels, ">memory", "bounded by"),
        [
            (
                c.layout.name,
                *map(words.show_time, (c.forward, c.backward, c.total)),
                f"{choices.seconds(c) / best:.2f}",
                *map(words.nbytes, (*c.bytes_of_levels, c.memory)),
                c.bounded_by,
            )
            for c in choices.choices[:top]
        ],
        "bytes that a rank sends in both passes, by level; memory: q, k, v, out"
        f"{of_both} and what a rank holds for others",
    )
    rest = "no other is faster, by their lower bounds."
    if choices.gap:
        rest = f"by their lower bounds no other is more than {100 * choices.gap:.1f} % faster."
    number = f"{len(choices.choices)} of {choices.considered:,}"
    say(
        reasons.why_best(choices),
        reasons.why_second(choices),
        f"{number} candidates were put on the clock; {rest}",
    )
