"""`weft plan`: the fastest layout for a model on given hardware."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from weft.declare.hardware import Hardware
from weft.errors import ShapeError, shown
from weft.inspect import words
from weft_planner import reasons
from weft_planner.candidates import NAMES
from weft_planner.choices import LOSSES, OPTIMIZERS, RECOMPUTE
from weft_planner.search import Choices, Search, scaling

from ..inspect import tables
from . import options
from .options import console
from .plan_lengths import plan_lengths
from .plan_model import plan_model, print_refused, write_layout

#: Work of replays (see `weft.planner.bound.Bounds.work`) beyond which the search for changes of the
#: machine that would change the choice is left out; below which each change tries more layouts.
_CHANGES, _CHEAP = 1.5e5, 4e3
#: Options that a model's search does not read.
_OF_CONFIG = ("loss", "optimizer", "recompute", "serve")
_OF_OWN = ("heads", "kv_heads", "head_dim", "batch", "mask", "dtype", "device", "gradients", "png",
           "forward_only")  # fmt: skip
_OF_CALL = (
    "html",
    "heads",
    "kv_heads",
    "head_dim",
    "mask",
    "device",
    "only",
    "forward_only",
    "png",
)


def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A transformers model: its folder or config.json. Or weft's own: a name (see "
            "`weft list models`) or a .toml. Without one, an attention call of the sizes given.",
            show_default=False,
        ),
    ] = None,
    *,
    hardware: Annotated[
        str,
        options.of_run(
            "The machine: a name (see `weft list hardware`), or a path to a .toml.",
            show_default=False,
        ),
    ],
    devices: Annotated[
        int, options.of_run("How many ranks.", min=1, max=1 << 16, show_default=False)
    ],
    length: Annotated[
        str | None,
        typer.Option(
            "--length",
            "--tokens",
            help="Tokens of the whole sequence, over all ranks; several as '4096:3,32768' with how "
            "often each comes; of a model 'rows=64,features=5'.",
            show_default=f"{options.LENGTH}; {options.OF_MODEL}",
            rich_help_panel=options.CALL,
        ),
    ] = None,
    heads: options.Heads = options.HEADS,
    kv_heads: options.KvHeads = None,
    head_dim: options.HeadDim = options.HEAD_DIM,
    batch: options.Batch = None,
    mask: options.Mask = options.MASK,
    dtype: options.DType = options.PLANNED_DTYPE,
    device: options.PlannedDevice = None,
    gradients: options.Gradients = None,
    only: Annotated[
        str | None,
        options.of_run(
            f"Strategies to keep to, such as 'ulysses, ring': {', '.join(NAMES)}.",
            show_default="all",
        ),
    ] = None,
    memory: Annotated[
        float | None,
        options.of_run(
            "Bytes of a rank that the call may take.", show_default="the device's", min=1.0
        ),
    ] = None,
    forward_only: Annotated[
        bool,
        options.of_run("Rank by the forward pass alone.", "--forward-only", show_default=False),
    ] = False,
    top: Annotated[int, options.of_run("Layouts to show.", min=1, max=100)] = 5,
    loss: Annotated[
        str,
        options.of_model("Logits: chunked (some tokens at a time), full, or auto: the faster one."),
    ] = "auto",
    optimizer: Annotated[
        str,
        options.of_model(
            "adamw-fp32, adamw-bf16 (weights and states), or auto: bf16 where no fp32 fits."
        ),
    ] = "auto",
    recompute: Annotated[
        str,
        options.of_model("none, layers, offload (their inputs to the host), or auto: any."),
    ] = "auto",
    serve: Annotated[
        bool,
        options.of_model("Serving instead: weights and cache of a rank, bytes of a new token."),
    ] = False,
    html: Annotated[
        Path | None,
        options.of_file("Write a page that plays the layouts, for a browser; no network."),
    ] = None,
    write: Annotated[
        Path | None, options.of_file("Write the best layout as a layout file, a .toml.")
    ] = None,
    png: Annotated[
        Path | None,
        options.of_picture("Time against devices, by strategy."),
    ] = None,
) -> None:
    """Find the layout for the machine that you have, or may get. Starts nothing.

    Of a transformers model: groups of devices, the layout of a group,
    recomputation, FSDP's sharding, loss and precision, with the seconds of a step
    and the memory of a rank by part, counted with the model's own code on tensors
    without numbers; what does not fit, the longest row that fits, and what to
    type. Nothing is downloaded.

    Of an attention call it searches how many ways heads, queries and keys are
    split at each level of the hardware, and over which transport they travel.
    Every candidate has a lower bound in closed form; programs of the promising
    ones run on the clock of `weft explain --hardware` until no other can be more
    than 1 % faster. Says why the best one is, what would change that, and what was refused.

    Of a model of weft's, every axis may be split: a training step on each of the promising
    layouts is counted with the model's own code, resharding, sums and gradients
    with it, and its memory is that of the whole model.

    Times are predictions; the last line says against what they were checked.

    Examples:

        weft plan Meta-Llama-3-8B/config.json --tokens 131072 --devices 64 --hardware h100-8

        weft plan Meta-Llama-3-8B/ --tokens 131072 --devices 8 --hardware h100-8 --serve

        weft plan --tokens 131072 --heads 64 --kv-heads 8 --head-dim 128 --mask causal \\
            --devices 64 --hardware h100-8

        weft plan --tokens 65536 --devices 8 --hardware ethernet-laptops --only "ulysses, ring"

        weft plan --tokens 32768 --devices 16 --hardware h100-8 --write plan.toml

        weft plan --tokens 4096:8,32768:2,131072 --devices 64 --hardware h100-8

        weft plan tabular --length rows=150000,features=5 --devices 64 --hardware h100-8
    """
    machine = Hardware.load(hardware)
    kernels = options.planned_device(device, machine)
    if write is not None:
        options.check_new_file(write)
    if model is not None and options.is_config(model):
        from .plan_config import Asked, plan_config, serve_config

        why = "a transformers model has its own; it is for an attention call"
        options.refuse_given(context, _OF_OWN, why)
        asked = Asked(
            options.tokens_of(length),
            hardware,
            devices,
            options.chosen("--loss", loss, LOSSES),
            options.chosen("--optimizer", optimizer, tuple(OPTIMIZERS)),
            options.chosen("--recompute", recompute, RECOMPUTE),
            tuple(name.strip() for name in (only or "").split(",") if name.strip()),
            memory,
            top,
            write,
            html,
        )
        (serve_config if serve else plan_config)(model, asked)
        return
    options.refuse_given(context, _OF_CONFIG, "it is for a transformers model, by its config")
    if model is not None:
        why = "it is for an attention call; the search for a model does not read it"
        options.refuse_given(context, _OF_CALL, why)
        sizes = (batch, length, options.dtype_named(dtype), gradients, memory, top, write)
        plan_model(model, hardware, devices, *sizes)
        return
    options.refuse_given(context, ["gradients"], options.NO_GRADIENTS)
    names = [name.strip() for name in (only or "").split(",") if name.strip()]

    def search_of(tokens: str) -> Search:
        lengths = options.lengths_of(tokens, "tokens", ("tokens",))
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
            device=kernels,
        )
        return Search(problem, machine, devices, names, memory, forward_only)

    if length is not None and "," in length:
        options.refuse_given(context, ("write", "png", "html"), "it is for one length")
        plan_lengths(length, search_of)
        return
    search = search_of(length or options.LENGTH)
    choices = _searched(search)
    _print(choices, search, machine, hardware, top)
    if write is not None:
        seconds = words.show_time(choices.best.total)
        about = f"Planned for {devices} devices of {hardware}: {seconds} predicted."
        write_layout(choices.best.layout, about, write)
        console().print(f"layout: {write}", markup=False)
    if png is not None:
        _draw(search, png)
    if html is not None:
        from weft_cli.inspect.page import write_page

        best = [c.layout for c in choices.choices[:top]]
        title = f"{search.problem.n:,} tokens on {hardware}"
        write_page(best, search.problem, machine, title, html)
        console().print(f"page: {html}", markup=False)


def _searched(search: Search) -> Choices:
    out = console()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=out,
        transient=True,
    )
    label = f"{len(search.every):,} candidates"
    with bar, options.still_here(f"searching {label}"):
        task = bar.add_task(label, total=None)

        def tell(replays: int) -> None:
            bar.update(task, description=f"{replays + 1} of {label} on the clock")

        return search.run(tell=tell)


def _print(choices: Choices, search: Search, machine: Hardware, hardware: str, top: int) -> None:
    out = console()
    p = search.problem
    for line in reasons.warnings(search, choices):
        out.print(f"note: {line}\n", markup=False, highlight=False)
    out.print(
        f"{search.devices:,} devices; {p.n:,} tokens, {p.heads} heads of {p.head_dim}, "
        f"{p.kv_heads} key/value heads, batch {p.batch}, {str(p.dtype)[6:]}, mask {p.mask}\n",
        highlight=False,
    )
    out.print(_table(choices, machine, top))
    rest = "no other is faster, by their lower bounds."
    if choices.gap:
        rest = f"by their lower bounds no other is more than {100 * choices.gap:.1f} % faster."
    lines = [
        reasons.why_best(choices),
        reasons.why_second(choices, search.bounds),
        reasons.simplest(choices),
        f"{len(choices.choices)} of {choices.considered:,} candidates were put on the clock; "
        + rest,
    ]
    for line in filter(None, lines):
        out.print(line, markup=False, highlight=False)
    tries = 4 if search.work_each < _CHEAP else 2
    if 9 * tries * search.work_each < _CHANGES:
        out.print("\nWhat would change it:", highlight=False)
        with out.status("changing the machine"):
            changes = list(reasons.changes(search, choices, tries))
        for line in changes:
            out.print(f"  {line}", markup=False, highlight=False)
    print_refused(choices.refused, hardware, search.devices)


def _table(choices: Choices, machine: Hardware, top: int) -> Table:
    levels = [level.name for level in machine.level]
    right = ("forward", "backward", "both", "x best", *levels, "memory")
    result = tables.table("predicted", "layout", *right, "bounded by", right=right)
    best = min(map(choices.seconds, choices.choices))
    for c in choices.choices[:top]:
        result.add_row(
            escape(c.layout.name),
            *map(words.show_time, (c.forward, c.backward, c.total)),
            f"{choices.seconds(c) / best:.2f}",
            *map(words.nbytes, c.bytes_of_levels),
            words.nbytes(c.memory),
            c.bounded_by,
        )
    result.caption = (
        "bytes that a rank sends in both passes, by level; memory: q, k, v, out"
        + ("" if choices.passes == "forward" else ", their gradients")
        + " and what a rank holds for others"
    )
    result.caption_justify = "left"
    return result


def _draw(search: Search, path: Path) -> None:
    from ..inspect.scaling import draw_scaling

    with console().status("fewer devices"), options.still_here("planning for fewer devices"):
        curves = scaling(search)
    p = search.problem
    draw_scaling(curves, path, f"{p.n:,} tokens, {p.heads} heads, {p.mask}")
    console().print(f"time against devices: {path}", markup=False)
