"""`weft rates`: how fast ranks compute here, and how fast their links are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from weft.inspect import words
from weft.inspect.picture import writing
from weft.inspect.words import digits, show_time, unit_of
from weft.launch import launcher as launch
from weft.launch.environment import already_launched, number
from weft.layout import Layout
from weft.plan.problem import Problem
from weft_planner import measure
from weft_planner.measure import Measured, Sample

from ..inspect.printer import print_table, still_here, wrote
from . import options


def rates(
    layout: options.LayoutName,
    axis: options.MovingAxis = None,
    length: Annotated[
        str | None,
        options.of_call(
            "Queries of the whole axis, over all ranks; 'a=64,b=5' for two axes. Short blocks "
            "compute more slowly, so give the length that you train at.",
            show_default=", ".join(
                f"{n} on {device}" for device, n in options.RATED_LENGTHS.items()
            ),
        ),
    ] = None,
    heads: options.Heads = options.HEADS,
    head_dim: options.HeadDim = options.HEAD_DIM,
    dtype: options.RunDType = None,
    nproc: options.Nproc = None,
    device: options.Device = "auto",
    timeout: options.Timeout = None,
    by_rank: Annotated[
        bool,
        options.of_run(
            "Keep the speed of every rank, for shares of ranks that are not alike.",
            "--by-rank",
            show_default=False,
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write what was measured to a new hardware file, which --hardware takes.",
            show_default=False,
            rich_help_panel=options.FILES,
        ),
    ] = None,
) -> None:
    r"""Measure this machine or cluster: for a hardware file, and for \[rates] of a layout.

    The scheduler weighs what a block costs to compute against what a chunk costs
    to move. What it weighs by is written in the layout file; this measures it.
    Starts the ranks; all of them compute blocks of three sizes, forward and
    backward, as many at once as there are cores; merge, and call attention on a
    few rows; then along one mesh dim after another each sends messages of three
    sizes to the next while it receives from the last, and one pair alone. Run it
    where you train, as you train, when nothing else runs.

    flops is what the slowest rank computes per second in the attention kernel.
    latency and bandwidth say how long a message takes: latency + bytes /
    bandwidth. Where mesh dims differ by more than 1.5 times, each is a level of
    links, the innermost first; transfers at different levels run side by side,
    unless they share a card: then the outer one's messages are written as going
    through it.

    A layout with rates has predicted times in weft explain; --write keeps more of
    what was measured, with where each figure comes from, for --hardware.

    Examples:

        weft rates ring-2

        weft rates ring-4 --by-rank --write mixed.toml

        weft rates tile-2x2 --length 16384 --heads 16 --write machine.toml

        torchrun --nnodes 2 --nproc-per-node 8 ... -m weft rates layout.toml
    """
    chosen = options.layout_named(layout)
    ranks = options.ranks_of(chosen, nproc)
    place = options.device_for(device, ranks)
    resolved = chosen.resolve(ranks)
    problem = _problem(resolved, axis, length, heads, head_dim, dtype, place)
    measure.check_rates(resolved, problem)
    started = already_launched()
    if write is not None and (started is None or started.rank == 0):
        options.check_new_file(write)
    with still_here(f"measuring on {ranks} ranks"):
        found = launch.run(_rank, layout, problem, timeout, by_rank, ranks=ranks)
    if found is None:  # not the rank that answers
        return
    where = f"{ranks} {'processes' if ranks > 1 else 'process'} on {place}"
    _show(f"{chosen.name}: {where}, the slowest rank", found)
    if write is not None:
        with writing(write, new=True) as partial:
            partial.write_text(measure.hardware_file(found))
        wrote("\nhardware file", write)


def _rank(name: str, problem: Problem, timeout: float | None, by_rank: bool) -> Measured:
    """One rank of `weft rates`."""
    layout = options.layout_named(name)
    layout = layout.build(problem.device, timeout=timeout)
    cores = cores_of(layout.world_size, problem.device)
    return measure.measure(layout, problem, cores, by_rank)


def cores_of(ranks: int, device: str) -> dict[str, int] | None:
    """Cores of this machine and its ranks, where these are more; None on GPUs.

    `ranks` are those of all machines; of a launcher, its number on one machine counts instead.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    local = number(os.environ, "LOCAL_WORLD_SIZE", ranks)
    cores = max(1, (count or 1) // torch.get_num_threads())
    return None if device == "cuda" or local <= cores else {"count": cores, "ranks": local}


def _problem(
    layout: Layout,
    axis: str | None,
    length: str | None,
    heads: int,
    head_dim: int,
    dtype: str | None,
    device: str,
) -> Problem:
    """The call whose blocks are timed, of one sequence per rank that has sequences of its own."""
    named = options.first_attended(layout, axis)
    text = length or options.RATED_LENGTHS[device]
    return options.problem_of(
        named,
        options.lengths_of(text, named, options.known_axes(layout)),
        heads=heads,
        head_dim=head_dim,
        parts=layout.batch_parts(named.split("+")),
        dtype=dtype or options.DTYPES[device],
        device=device,
    )


def _show(title: str, found: Measured) -> None:
    """Each measurement: median, quickest to slowest repeat, and the rate that follows."""
    b, h, n, m, d = found.block.shape
    speed = f"{found.block.flops:.3g} flop/s"
    block = f"{b * h} x {n} x {m} x {d}"
    rows = [(found.block.kernel, block, *_times(found.block.sample), speed)]
    for link in found.links:
        for nbytes, sample, rate in (
            (measure.SMALL, link.small, f"{show_time(link.latency)} latency"),
            (link.nbytes, link.large, f"{link.bandwidth:.3g} B/s"),
        ):
            rows.append((link.mesh_dim, words.nbytes(nbytes), *_times(sample), rate))
    if found.together:
        moved, sample = words.nbytes(found.together.nbytes), found.together.sample
        rows.append(("at once", moved, *_times(sample), f"{found.together.slowdown:.2g} x alone"))
    print_table(title, ("what", "of", ">median", ">spread", ">rate"), rows)
    typer.echo(measure.rates_table(found))


def _times(sample: Sample) -> tuple[str, str]:
    """Its median, and the range of its repeats, in the median's unit."""
    per, unit = unit_of(sample.median)
    low, high = (digits(seconds / per) for seconds in (sample.quickest, sample.slowest))
    return show_time(sample.median), f"{low} .. {high} {unit}"
