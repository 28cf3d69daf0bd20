"""`weft check`: is a layout exact?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from weft.choice import ChoiceKind
from weft.comm import run_threads
from weft.errors import DeclarationError, UnsupportedError
from weft.inspect.recording import record
from weft.inspect.timeline import Timeline
from weft.launch import launcher as launch
from weft.layout import Layout
from weft.plan.predict import plan_for
from weft_axes.fetching.rules import fetches
from weft_axes.testing.cases import Case
from weft_axes.testing.check import Comparison, attend_once, check_rank
from weft_models.routing.check import attend_routed_once, check_routed_rank
from weft_models.routing.check import refuse_early as refuse_routed_early
from weft_models.routing.geometry import is_routed
from weft_proof.states import prove_states
from weft_proof.symbolic import prove

from ..inspect import tables
from ..inspect.printer import console, still_here, wrote
from . import options

#: Every rank computes the dense reference: limits of ranks, and of its bytes.
MOST_RANKS, MOST_BYTES = 256, 8 << 30
#: Ranks whose plans are proven, and queries of one of them: counted row by row.
MOST_PROVEN, MOST_ROWS = 1 << 16, 1 << 24


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
    dtype: options.CheckedDType = None,
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
    timeout: options.Timeout = None,
    symbolic: Annotated[
        bool,
        options.of_run(
            "Start nothing: prove it for all ranks from their plans, without tensors.",
            "--symbolic",
            show_default=False,
        ),
    ] = False,
    choose: Annotated[
        int | None,
        options.of_call(
            "Keys that each query chooses, at random; with --symbolic whichever they are.",
            show_default="all; a quarter where only chosen keys travel",
            min=1,
            max=options.MOST_TOKENS,
        ),
    ] = None,
    timeline: Annotated[
        Path | None, options.of_picture("Record one more run and draw it, rank by rank.")
    ] = None,
    trace: Annotated[
        Path | None, options.of_file("Write that recording as a Chrome trace (JSON).")
    ] = None,
) -> None:
    """Run a layout, and compare it with softmax attention on one device.

    Starts the ranks, attends random tensors on them, by default of an uneven
    length, and compares output, logsumexp and the gradients of query, key and
    value with plain softmax attention in fp64. A routed layout gets a router with
    random weights, and is compared with routing by its definition, on dense
    scores.

    Exit code 1 if anything is off: in fp64 by more than 1e-11 of the largest
    entry, in other dtypes by more than twice the error of one device's kernel,
    plus roundings. Scores of thousands (--spread 30) are known to fewer digits.

    Examples:

        weft check tile-2x2

        weft check ring-zigzag-4 --mask causal --length 1000

        weft check tp-x-ring --dtype bfloat16 --threads --kv-heads 4 --batch 3

        weft check pass-q-4 --dtype float32 --spread 30

        weft check tile-2x2 --length 4096 --timeline run.png

        weft check "tokens: ring=4096" --symbolic --length 65536 --mask causal

        weft check chosen-4 --mask causal --choose 16

        weft check tile-2x4 --symbolic --mask causal --choose 2048 --length 8192

        torchrun --nproc-per-node 4 -m weft check ring-4
    """
    chosen = options.layout_named(layout, order, axis)
    ranks = options.ranks_of(chosen, nproc)
    axes = options.attended(chosen, axis)
    batch = options.batch_of(batch, mask, _parts(chosen.resolve(ranks), axes))
    dtype = dtype or options.CHECKED_DTYPE
    sizes = Case(
        name=mask,
        n=0,
        m=None if keys is None else (keys,),
        batch=batch,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        dim=head_dim,
        seed=seed,
        dtype=options.dtype_named(dtype),
        spread=spread,
    )
    cases = [options.along(sizes, one, length, options.known_axes(chosen)) for one in axes]
    if symbolic:
        if ranks > MOST_PROVEN:
            raise UnsupportedError(
                f"{chosen.source}: {ranks:,} ranks are more than the {MOST_PROVEN:,} whose plans"
                " are proven; give a smaller mesh of the same kind"
            )
        _prove(chosen.resolve(ranks), cases, choose)
        return
    cases = [_choosing(chosen, case, choose) for case in cases]
    _refuse_early(chosen.resolve(ranks), cases)
    place = options.device_for(device, 1 if threads else ranks)  # threads share one GPU
    recorded = cases[0] if timeline or trace else None
    with still_here(f"checking on {ranks} ranks"):
        if threads:
            result = _threads(chosen.resolve(ranks), cases, place, timeout, recorded)
        else:
            job = (layout, order, axis, cases, place, timeout, recorded)
            result = launch.run(_processes, *job, ranks=ranks)
    if result is None:  # not the rank that answers
        return
    comparisons, run = result
    if run is not None:
        _write(run, f"{chosen.name}, {cases[0].axis}, {mask}, recorded", timeline, trace)
    where = f"{ranks} {'threads' if threads else 'processes'} on {place}"
    if not _show(chosen, cases, comparisons, where):
        raise typer.Exit(1)


def _choosing(layout: Layout, case: Case, choose: int | None) -> Case:
    """The case with a choice of keys, where one is asked for or only chosen keys travel."""
    if is_routed(layout, case.axes):
        if choose is not None:
            raise DeclarationError(
                f"--choose: {layout.source} has a router, which chooses the keys"
            )
        return case
    if choose is None and fetches(layout, case.axes):
        choose = max(1, case.keys // 4)
    return replace(case, choose=choose)


def _write(run: Timeline, title: str, timeline: Path | None, trace: Path | None) -> None:
    """Write the recorded run as a picture and as a Chrome trace, where they were asked for."""
    if timeline is not None:
        run.draw(timeline, title)
        wrote("timeline", timeline)
    if trace is not None:
        run.chrome(trace)
        wrote("trace", trace)


def _parts(layout: Layout, axes: Sequence[str]) -> int:
    """A number of sequences that every mesh dim divides over which an attended axis has them."""
    return math.lcm(*(layout.batch_parts(axis.split("+")) for axis in axes))


def _prove(layout: Layout, cases: list[Case], choose: int | None) -> None:
    """Show the claims proven of every case, with a choice of keys; exit code 1 if one is not."""
    out, good = console(), True
    for case in cases:
        options.refuse_routed_axis(layout, case.axis)
        if case.queries > MOST_ROWS * layout.world_size:
            raise UnsupportedError(
                f"--length: {case.queries:,} queries on {layout.world_size:,} ranks are more than"
                f" the {MOST_ROWS:,} of a rank that are proven; a shorter one shows the same"
            )
        start = time.perf_counter()
        with still_here(f"proving {case.axis}, {case.name}"):
            problem = case.problem
            if choose is not None:
                chosen = ChoiceKind(1, min(choose, case.keys), check=False)
                problem = replace(problem, choice=chosen)
            claims = prove(layout, problem)
            if len(case.axes) == 1 and not layout.share:  # no state is carried over shares
                claims += prove_states(layout, case.axis, case.queries)
        seconds = time.perf_counter() - start
        title = (
            f"{case.axis}: {_sizes(case)}, {case.name}, {layout.world_size} ranks, {seconds:.1f} s"
        )
        out.print(tables.claims_table(title, claims))
        good = good and all(claim.ok for claim in claims)
    out.print("[green]proven[/]" if good else "[bold red]not proven[/]")
    if not good:
        raise typer.Exit(1)


def _refuse_early(layout: Layout, cases: list[Case]) -> None:
    """Raise for a call that cannot be planned, before anything is started."""
    if layout.world_size > MOST_RANKS:
        raise UnsupportedError(
            f"{layout.source}: {layout.world_size} ranks are more than the {MOST_RANKS} that are "
            "started to be checked; --symbolic proves any number from their plans"
        )
    for case in cases:
        tokens = (case.queries + case.keys) * case.dim
        nbytes = case.batch * case.heads * (case.queries * case.keys + tokens) * 8
        if nbytes > MOST_BYTES:
            raise UnsupportedError(
                f"scores and tensors of all heads take {nbytes / 2**30:,.0f} GiB in fp64 on every "
                f"rank, and at most {MOST_BYTES >> 30} are compared; take a smaller --length, "
                "--batch or --heads, or --symbolic, which needs no tensors"
            )
        plan_for(layout, case.problem, rank=0)
        if is_routed(layout, case.axes):
            refuse_routed_early(layout, case)


Result = tuple[list[list[Comparison]], Timeline | None]


def _threads(
    layout: Layout, cases: list[Case], device: str, timeout: float | None, recorded: Case | None
) -> Result:
    def on_ranks(work: Callable[[Layout], Any]) -> Any:
        if not layout.mesh:
            return work(layout)
        return run_threads(layout.mesh, lambda transport: work(layout.on(transport)), timeout)[0]

    compared = on_ranks(lambda bound: [_comparisons(bound, case, device) for case in cases])
    if recorded is None:
        return compared, None
    with record() as run:
        on_ranks(lambda bound: _attend(bound, recorded, device))
    return compared, run.timeline


def _processes(
    name: str,
    order: str | None,
    axis: str | None,
    cases: list[Case],
    device: str,
    timeout: float | None,
    recorded: Case | None,
) -> Result:
    """One rank of `weft check`."""
    layout = options.layout_named(name, order, axis)
    layout = layout.build(device, timeout=timeout)
    compared = [_comparisons(layout, case, device) for case in cases]
    if recorded is None:
        return compared, None
    with record(layout) as run:
        _attend(layout, recorded, device)
    return compared, run.timeline


def _comparisons(layout: Layout, case: Case, device: str) -> list[Comparison]:
    routed = is_routed(layout, case.axes)
    return (check_routed_rank if routed else check_rank)(layout, case, device)


def _attend(layout: Layout, case: Case, device: str) -> None:
    routed = is_routed(layout, case.axes)
    return (attend_routed_once if routed else attend_once)(layout, case, device)


def _show(
    layout: Layout, cases: list[Case], comparisons: list[list[Comparison]], where: str
) -> bool:
    """Print a table per case and the verdict; True if every tensor is exact."""
    out = console()
    routed = any(is_routed(layout, case.axes) for case in cases)
    reference = "routing by its definition" if routed else "softmax attention"
    out.print(f"[bold]{escape(layout.name)}[/]: {where}, against {reference} in fp64 on one")
    for case, compared in zip(cases, comparisons):
        keys = f" x {case.keys} keys" if case.m is not None else ""
        title = (
            f"{case.axis}: {_sizes(case)}{keys}, batch {case.batch}, heads "
            f"{case.heads}/{case.kv_heads} of {case.dim}, {case.name}, "
            f"{str(case.dtype).removeprefix('torch.')}"
            f"{'' if case.spread == 1 else f', spread {case.spread:g}'}"
        )
        out.print(tables.comparisons_table(title, compared))
    good = all(c.ok for compared in comparisons for c in compared)
    out.print("[green]exact[/]" if good else "[bold red]not exact[/]")
    return good


def _sizes(case: Case) -> str:
    return "x".join(str(n) for n, _ in case.lengths)
