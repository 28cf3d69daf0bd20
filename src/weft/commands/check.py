"""`weft check`: is a layout exact?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..comm import run_threads
from ..errors import UnsupportedError
from ..inspect import tables
from ..inspect.recording import record
from ..inspect.timeline import Timeline
from ..launch import launcher as launch
from ..layout import Layout
from ..plan.predict import plan_for
from ..proof.state import prove_states
from ..proof.symbolic import prove
from ..routing.check import attend_routed_once, check_routed_rank, is_routed
from ..routing.check import refuse_early as refuse_routed_early
from ..testing.check import Case, Finding, attend_once, check_rank
from . import options
from .options import console

#: What is compared with dense attention of the whole, on every rank.
MOST_RANKS, MOST_BYTES = 256, 8 << 30


def check(
    layout: options.LayoutName,
    axis: options.Axis = None,
    length: options.Length = options.CHECKED_LENGTH,
    keys: options.Keys = None,
    heads: options.Heads = options.HEADS,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = options.HEAD_DIM,
    batch: options.Batch = None,
    mask: options.Mask = options.MASK,
    order: options.Order = None,
    dtype: options.DType = options.CHECKED_DTYPE,
    backward: Annotated[bool, options.of_call("Check gradients too.")] = True,
    seed: Annotated[
        int, options.of_call("Of the random tensors.", min=0, max=options.MOST_SEED)
    ] = 0,
    spread: Annotated[
        float,
        options.of_call(
            "Standard deviation of queries and keys; scores grow with its square, and a rounding "
            "of them with the scores.",
            min=0.0,
            max=1e6,
        ),
    ] = 1.0,
    threads: Annotated[
        bool,
        options.of_run(
            "Ranks as threads of this process, instead of processes: quick to start, and one GPU "
            "is enough.",
            "--threads",
            show_default=False,
        ),
    ] = False,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
    timeout: options.Timeout = options.TIMEOUT,
    symbolic: Annotated[
        bool,
        options.of_run(
            "Start nothing: prove it for all ranks from their plans, without tensors.",
            "--symbolic",
            show_default=False,
        ),
    ] = False,
    timeline: Annotated[
        Path | None, options.of_picture("Record one more run and draw it: who did what when.")
    ] = None,
    trace: Annotated[
        Path | None, options.of_file("Write that recording as a Chrome trace (JSON).")
    ] = None,
) -> None:
    """Run a layout, and compare it with softmax attention on one device.

    Starts the ranks, attends random tensors on them, by default of an uneven
    length, and compares output, logsumexp and the gradients of query, key and
    value with plain softmax attention in fp64. A routed layout gets a router with
    random weights, and is compared with routing by its definition, on dense scores.

    Exit code 1 if anything is off: in fp64 by more than 1e-11 of the largest
    entry, in other dtypes by more than twice what one device's kernel is, plus
    roundings. Scores of thousands (--spread 30) are known to fewer digits.

    Examples:

        weft check tile-2x2

        weft check ring-zigzag-4 --mask causal --length 1000

        weft check tp-x-ring --dtype bfloat16 --threads --kv-heads 4 --batch 3

        weft check pass-q-4 --dtype float32 --spread 30

        weft check tile-2x2 --length 4096 --timeline run.png

        weft check "tokens: ring=4096" --symbolic --length 65536 --mask causal

        torchrun --nproc-per-node 4 -m weft check ring-4
    """
    chosen = options.layout_named(layout, order, axis)
    ranks = options.ranks_of(chosen, nproc)
    axes = options.attended(chosen, axis)
    batch = options.batch_of(batch, mask, _parts(chosen.resolve(ranks), axes))
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    same = {"keys": keys, "mask": mask, "dtype": dtype, "backward": backward, "seed": seed, **sizes}
    same["spread"] = spread
    for one in axes:
        options.refuse_joint_keys(keys, one)
    known = options.known_axes(chosen)
    cases = [Case(axis=a, length=options.lengths_of(length, a, known), **same) for a in axes]
    if symbolic:
        _prove(chosen.resolve(ranks), cases)
        return
    _refuse_early(chosen.resolve(ranks), cases)
    place = options.device_for(device, 1 if threads else ranks)  # threads share one GPU
    recorded = cases[0] if timeline or trace else None
    with options.still_here(f"checking on {ranks} ranks"):
        if threads:
            result = _threads(chosen.resolve(ranks), cases, place, timeout, recorded)
        else:
            job = (layout, order, axis, cases, place, timeout, recorded)
            result = launch.run(_processes, *job, ranks=ranks)
    if result is None:  # not the rank that answers
        return
    found, run = result
    if timeline:
        run.draw(timeline, f"{chosen.name}, {recorded.axis}, {mask}, recorded")
        console().print(f"timeline: {timeline}", markup=False, soft_wrap=True)
    if trace:
        run.chrome(trace)
        console().print(f"trace: {trace}", markup=False, soft_wrap=True)
    where = f"{ranks} {'threads' if threads else 'processes'} on {place}"
    if not _show(chosen, cases, found, where):
        raise typer.Exit(1)


def _parts(layout: Layout, axes: Sequence[str]) -> int:
    """A number of sequences that every mesh dim divides over which an attended axis has them."""
    return math.lcm(*(layout.batch_parts(axis.split("+")) for axis in axes))


def _prove(layout: Layout, cases: list[Case]) -> None:
    """Show what is proven of every case; exit code 1 if anything is not."""
    out, good = console(), True
    for case in cases:
        options.refuse_routed_axis(layout, case.axis)
        start = time.perf_counter()
        with options.still_here(f"proving {case.axis}, {case.mask}"):
            claims = prove(layout, case.problem)
            if len(case.length) == 1:  # of one axis
                claims += prove_states(layout, case.axis, case.length[0])
        seconds = time.perf_counter() - start
        size = "x".join(map(str, case.length))
        title = f"{case.axis}: {size}, {case.mask}, {layout.world_size} ranks, {seconds:.1f} s"
        out.print(tables.claims_table(title, claims))
        good = good and all(claim.ok for claim in claims)
    out.print("[green]proven[/]" if good else "[bold red]not proven[/]")
    if not good:
        raise typer.Exit(1)


def _refuse_early(layout: Layout, cases: list[Case]) -> None:
    """Raise for what cannot be planned, before anything is started."""
    if layout.world_size > MOST_RANKS:
        raise UnsupportedError(
            f"{layout.source}: {layout.world_size} ranks are more than the {MOST_RANKS} that are "
            "started to be checked; --symbolic proves any number from their plans"
        )
    for case in cases:
        tokens = (case.n + case.m) * case.head_dim
        nbytes = case.batch * case.heads * (case.n * case.m + tokens) * 8
        if nbytes > MOST_BYTES:
            raise UnsupportedError(
                f"scores and tensors of all heads take {nbytes / 2**30:,.0f} GiB in fp64 on every "
                f"rank, and at most {MOST_BYTES >> 30} are compared; take a smaller --length, "
                "--batch or --heads, or --symbolic, which needs no tensors"
            )
        plan_for(layout, case.problem, rank=0)
        if is_routed(layout, case.axes):
            refuse_routed_early(layout, case)


Result = tuple[list[list[Finding]], Timeline | None]


def _threads(
    layout: Layout, cases: list[Case], device: str, timeout: float, recorded: Case | None
) -> Result:
    def on_ranks(work: Callable[[Layout], Any]) -> Any:
        if not layout.mesh:
            return work(layout)
        return run_threads(layout.mesh, lambda transport: work(layout.on(transport)), timeout)[0]

    found = on_ranks(lambda bound: [_findings(bound, case, device) for case in cases])
    if recorded is None:
        return found, None
    with record() as run:
        on_ranks(lambda bound: _attend(bound, recorded, device))
    return found, run.timeline


def _processes(
    name: str,
    order: str | None,
    axis: str | None,
    cases: list[Case],
    device: str,
    timeout: float,
    recorded: Case | None,
) -> Result:
    """One rank of `weft check`."""
    layout = options.layout_named(name, order, axis)
    layout = layout.build(device, timeout=timeout)
    found = [_findings(layout, case, device) for case in cases]
    if recorded is None:
        return found, None
    with record(layout) as run:
        _attend(layout, recorded, device)
    return found, run.timeline


def _findings(layout: Layout, case: Case, device: str) -> list[Finding]:
    routed = is_routed(layout, case.axes)
    return (check_routed_rank if routed else check_rank)(layout, case, device)


def _attend(layout: Layout, case: Case, device: str) -> None:
    routed = is_routed(layout, case.axes)
    return (attend_routed_once if routed else attend_once)(layout, case, device)


def _show(layout: Layout, cases: list[Case], found: list[list[Finding]], where: str) -> bool:
    out = console()
    routed = any(is_routed(layout, case.axes) for case in cases)
    beside = "routing by its definition" if routed else "softmax attention"
    out.print(f"[bold]{escape(layout.name)}[/]: {where}, against {beside} in fp64 on one")
    for case, findings in zip(cases, found):
        keys = f" x {case.m} keys" if case.keys is not None else ""
        title = (
            f"{case.axis}: {'x'.join(map(str, case.length))}{keys}, batch {case.batch}, heads "
            f"{case.heads}/{case.kv_heads} of {case.head_dim}, {case.mask}, {case.dtype}"
            f"{'' if case.spread == 1 else f', spread {case.spread:g}'}"
        )
        out.print(tables.findings(title, findings))
    good = all(f.ok for findings in found for f in findings)
    out.print("[green]exact[/]" if good else "[bold red]not exact[/]")
    return good
