"""Options that several commands share, and the values they are parsed to."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.models import OptionInfo

from weft.errors import (
    DeclarationError,
    ShapeError,
    UnsupportedError,
    WeftError,
    did_you_mean,
    shown,
)
from weft.inspect.call_plan import device_type
from weft.inspect.picture import writable, writable_file
from weft.launch.environment import already_launched, ranks_here, shown_one_gpu_each
from weft.layout import Layout
from weft.plan.call import Expanded
from weft.plan.problem import Problem
from weft_axes.testing.cases import Case
from weft_cli.mask_names import MASKS, mask_named, sequences_named

#: The largest seed that torch takes on every device.
MOST_SEED = 2**63 - 1
#: Heads, sequences, head dims: nobody has more, and sizes stay within 64 bits.
MOST = 1 << 20
#: Tokens of an axis: an index of them still fits into a machine's memory.
MOST_TOKENS = 1 << 30

#: The sizes of an attention call where the user names none, the same in every command.
LENGTH, HEADS, HEAD_DIM, MASK = "4096", 16, 64, "full"
#: The dtype of commands that start nothing; of those that compute, by device.
PLANNED_DTYPE, DTYPES = "bfloat16", {"cpu": "float32", "cuda": "bfloat16"}
#: `weft check` differs in two sizes: every rank computes dense scores of the full length, which is
#: uneven on purpose, and compares in fp64, where a wrong layout cannot hide in rounding.
CHECKED_LENGTH, CHECKED_DTYPE = "37", "float64"
#: `weft rates` differs in one on GPUs, whose kernels reach their rates in long blocks only.
RATED_LENGTHS = {"cpu": LENGTH, "cuda": "65536"}

#: Headings in `--help`.
CALL, RUN, FILES = "The attention call", "Where it runs", "What is written"
MODEL = "The model"

LayoutName = Annotated[
    str,
    typer.Argument(
        metavar="LAYOUT",
        help="Name of a shipped layout (see `weft list layouts`), a path to a .toml, or a layout "
        "on one line such as 'tokens: ulysses=2 x ring=2'.",
        show_default=False,
    ),
]


def of_call(label: str, **options: Any) -> OptionInfo:
    """An option about the attention call."""
    return typer.Option(help=label, rich_help_panel=CALL, **options)


def of_run(label: str, *names: str, **options: Any) -> OptionInfo:
    """An option about where and how it runs."""
    return typer.Option(*names, help=label, rich_help_panel=RUN, **options)


def of_model(label: str, **options: Any) -> OptionInfo:
    """An option about a model."""
    return typer.Option(help=label, rich_help_panel=MODEL, **options)


def of_picture(label: str) -> OptionInfo:
    """An option that names a picture to write; refused before anything runs."""
    return typer.Option(
        help=f"{label} A .png, .pdf or .svg.",
        show_default=False,
        callback=lambda path: None if path is None else writable(path),
        rich_help_panel=FILES,
    )


def of_file(label: str) -> OptionInfo:
    """An option that names a file to write; refused before anything runs."""
    return typer.Option(
        help=label,
        show_default=False,
        callback=lambda path: None if path is None else writable_file(path),
        rich_help_panel=FILES,
    )


def check_new_file(path: Path) -> Path:
    """The path, if `--write` can make a new declaration there; else raise `WeftError`."""
    if path.suffix != ".toml":
        raise WeftError(f"--write {path}: the name of such a file ends in .toml")
    if not path.parent.is_dir():
        raise WeftError(f"--write {path}: there is no folder {str(path.parent)!r}")
    if os.path.lexists(path):
        raise WeftError(f"--write {path}: the file exists, and is not overwritten; name a new one")
    return path


def names(text: str | None) -> list[str]:
    """The names that an option lists.

    >>> names("ulysses, ring")
    ['ulysses', 'ring']
    """
    return [name.strip() for name in (text or "").split(",") if name.strip()]


Axis = Annotated[
    str | None,
    of_call(
        "The attended axis; 'a+b' attends two axes jointly.",
        show_default="all that the layout attends",
    ),
]
Length = Annotated[
    str, of_call("Queries of the whole axis, over all ranks; 'a=64,b=5' for two axes.")
]
MovingAxis = Annotated[
    str | None,
    of_call(
        "The attended axis; 'a+b' attends two axes jointly.",
        show_default="the first that communicates",
    ),
]
Keys = Annotated[
    int | None,
    of_call("Keys of the whole axis.", show_default="as many as queries", min=0, max=MOST_TOKENS),
]
Heads = Annotated[int, of_call("Query heads, over all ranks.", min=1, max=MOST)]
KvHeads = Annotated[
    int | None,
    of_call("Key/value heads, over all ranks.", show_default="as many as heads", min=1, max=MOST),
]
HeadDim = Annotated[int, of_call("Size of a head.", min=1, max=MOST)]
ValueDim = Annotated[
    int | None, of_call("Size of a head of values.", show_default="that of keys", min=1, max=MOST)
]
LatentDims = Annotated[
    str | None,
    of_call(
        "Keys and values are made of latents: numbers per token, and those of the part of keys "
        "that all heads share, '512+64'.",
        show_default="none",
    ),
]
Batch = Annotated[
    int | None,
    of_call(
        "Sequences, over all ranks.",
        show_default="as many as --mask padding:5:7 names, else 1 for each part of the batch",
        min=1,
        max=MOST,
    ),
]
Choose = Annotated[
    int | None,
    of_call(
        "Keys that a model chooses for each query: their numbers travel where queries do.",
        show_default="all",
        min=1,
        max=MOST_TOKENS,
    ),
]
Mask = Annotated[str, of_call(f"Who sees whom: {', '.join(MASKS)}. See `weft list masks`.")]
DType = Annotated[str, of_call("bfloat16, float16, float32 or float64.")]
CheckedDType = Annotated[
    str | None,
    of_call(
        "bfloat16, float16, float32 or float64.",
        show_default="float64",
    ),
]
RunDType = Annotated[
    str | None,
    of_call(
        "bfloat16, float16, float32 or float64.",
        show_default="float32 on cpu, bfloat16 on cuda",
    ),
]
Order = Annotated[
    str | None,
    of_call(
        "Token order: contiguous, zigzag, striped; of explain call also balanced.",
        show_default="the layout's",
    ),
]
Nproc = Annotated[
    int | None,
    of_run("Number of ranks.", show_default="the size of the layout's mesh", min=1, max=MOST),
]
Device = Annotated[str, of_run("cpu, cuda, or auto: cuda where every rank here has a GPU.")]
Gradients = Annotated[
    str | None,
    of_run("What sums a model's gradients: sync, ddp or fsdp.", show_default="the model file's"),
]

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model file: its name (see `weft list models`), or a path to a .toml.",
        show_default=False,
    ),
]
ModelLength = Annotated[
    str | None,
    of_model(
        "Lengths of its axes, over all ranks: 'rows=64,features=5'.",
        show_default="its file's longest, or 16",
    ),
]
ModelBatch = Annotated[
    int | None,
    of_model("Examples, over all ranks.", show_default="its file's", min=1, max=MOST),
]
Machine = Annotated[
    str,
    of_run(
        "The machine: a name (see `weft list hardware`), or a path to a .toml.", show_default=False
    ),
]
TimedOn = Annotated[
    str | None,
    of_run(
        "Predict times on a machine: a name (see `weft list hardware`), or a path to a .toml.",
        show_default="none; of a call the layout's rates, if it has any",
    ),
]
Devices = Annotated[int, of_run("How many ranks.", min=1, max=1 << 16, show_default=False)]
Only = Annotated[
    str | None,
    of_run(
        "Strategies to keep to, such as 'ulysses, ring'.",
        show_default="all",
    ),
]
Memory = Annotated[
    float | None,
    of_run("Bytes of a rank that may be taken.", show_default="the device's", min=1.0),
]
Top = Annotated[int, of_run("Layouts to show.", min=1, max=100)]
Page = Annotated[
    Path | None, of_file("Write a page that plays the layouts, for a browser; no network.")
]
Write = Annotated[
    Path | None,
    typer.Option(
        help="Write the best layout as a new layout file, a .toml.",
        show_default=False,
        callback=lambda path: None if path is None else check_new_file(path),
        rich_help_panel=FILES,
    ),
]
Timeout = Annotated[
    float | None,
    of_run(
        "Seconds that any wait for another rank may last.",
        min=1.0,
        metavar="SECONDS",
        show_default="300, or $WEFT_TIMEOUT",
    ),
]


def problem_of(
    axis: str,
    lengths: Sequence[int],  # queries of each attended axis
    *,
    keys: int | None = None,
    heads: int = HEADS,
    kv_heads: int | None = None,
    head_dim: int = HEAD_DIM,
    value_dim: int | None = None,
    latents: str | None = None,
    batch: int | None = None,
    parts: int = 1,  # into how many the layout splits the batch
    mask: str = MASK,
    dtype: str = PLANNED_DTYPE,
    device: str = "cpu",
) -> Problem:
    """The call that the options of a command describe, over all ranks.

    With latents these have one head, and the key/value heads are those of the expansion.

    >>> problem_of("tokens", [64], mask="padding:5:7").batch
    2
    >>> problem_of("tokens", [64], heads=8, head_dim=24, value_dim=16, latents="32+8").expanded
    Expanded(heads=8, head_dim=24, value_dim=16, carried=(32, 8), work=16384)
    """
    refuse_joint_keys(keys, axis)
    n = math.prod(lengths)
    m = n if keys is None else keys
    batch = batch_of(batch, mask, parts)
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise ShapeError(f"{heads} query heads cannot share {kv_heads} key/value heads")
    length = dict(zip(axis.split("+"), lengths)) if keys is None else (n, m)
    value_dim = head_dim if value_dim is None else value_dim
    expanded = None if latents is None else expanded_of(latents, kv_heads, head_dim, value_dim)
    return Problem.of(
        axis,
        length,
        heads=heads,
        kv_heads=kv_heads if expanded is None else 1,
        head_dim=head_dim,
        value_dim=value_dim,
        expanded=expanded,
        batch=batch,
        dtype=dtype_named(dtype),
        device=device_type(device),
        mask=mask_named(mask, n, m, batch, lengths),
    )


def expanded_of(latents: str, heads: int, head_dim: int, value_dim: int) -> Expanded:
    """The expansion that `--latents` describes: of latents, and of a key part that heads share."""
    parts = latents.split("+")
    try:
        c, r = map(int, parts)
    except ValueError:
        c = r = 0
    if not (0 < c <= MOST and 0 < r < head_dim):
        raise ShapeError(
            f"--latents {shown(latents)}: two numbers per token, such as 512+64, of which heads of"
            f" {head_dim} have the second in them"
        )
    work = 2 * c * heads * (head_dim - r + value_dim)
    return Expanded(heads, head_dim, value_dim, (c, r), work)


def along(sizes: Case, axis: str, length: str, known: Collection[str]) -> Case:
    """The case of one attended axis, with its lengths and its mask."""
    keys = None if sizes.m is None else sizes.keys
    refuse_joint_keys(keys, axis)
    lengths = lengths_of(length, axis, known)
    n = math.prod(lengths)
    mask = mask_named(sizes.name, n, n if keys is None else keys, sizes.batch, lengths)
    return replace(sizes, axis=axis, n=lengths, mask=mask)


def batch_of(batch: int | None, mask: str, parts: int) -> int:
    """Number of sequences of a call: as given, as its mask names, or one per part of the batch.

    >>> batch_of(None, "padding:5:7", 1), batch_of(None, "causal", 4), batch_of(3, "full", 1)
    (2, 4, 3)
    """
    return batch or sequences_named(mask) or parts


def layout_named(text: str, order: str | None = None, axis: str | None = None) -> Layout:
    """A layout by name, path or line, with another token order for an axis if one is given."""
    layout = Layout.named(text)
    if order is None:
        return layout
    named = axis.split("+") if axis else [a for key in layout.attend for a in key.split("+")]
    axes = [a for a in named if axis or layout.size(a) != 1]
    data = {**layout.declaration, "order": {**layout.order, **dict.fromkeys(axes, order)}}
    return Layout.from_dict(data, layout.name, layout.source)


def resolved(
    text: str, nproc: int | None = None, order: str | None = None, axis: str | None = None
) -> Layout:
    """A layout by name, path or line, with the number of its ranks, see `ranks_of`."""
    layout = layout_named(text, order, axis)
    return layout.resolve(ranks_of(layout, nproc))


def ranks_of(layout: Layout, nproc: int | None) -> int:
    """Number of ranks of a layout; `nproc` fills a mesh size of -1 and must agree otherwise.

    Where a launcher has started the ranks, it has set their number.
    """
    if nproc is not None:
        return layout.resolve(nproc).world_size
    started = already_launched()
    if started is not None and -1 in layout.mesh.values():
        return layout.resolve(started.world_size).world_size
    if -1 in layout.mesh.values():
        raise DeclarationError(
            f"{layout.source}: a mesh size is -1, the rest of the ranks; say how many with --nproc"
        )
    return layout.world_size


def attended(layout: Layout, axis: str | None) -> list[str]:
    """The axes to look at: the one given, or all that the layout attends, one at least."""
    if axis is None:
        if not layout.attend:
            raise DeclarationError(
                f"{layout.source}: attends no axis, so there is no attention to look at; name one,"
                " such as 'heads: tp=2; tokens: ring=2'"
            )
        return list(layout.attend)
    known = known_axes(layout)
    for part in axis.split("+"):
        if part not in known:
            raise DeclarationError(
                f"{layout.source}: [attend] has no axis {part!r}{did_you_mean(part, known)}"
            )
    layout.rules(tuple(axis.split("+")))
    return [axis]


def first_attended(layout: Layout, axis: str | None) -> str:
    """The axis given, else the first whose attention needs communication, else the first of all."""
    axes = attended(layout, axis)
    return next((a for a in axes if layout.moves(tuple(a.split("+")))), axes[0])


def refuse_routed_axis(layout: Layout, axis: str) -> None:
    """Raise where a router or the model chooses the keys that travel: no fixed bytes."""
    routed = [d for d, rule in layout.rules(tuple(axis.split("+"))).items() if rule.top_k]
    if routed and layout.routing(tuple(axis.split("+"))) is None:
        raise UnsupportedError(
            f"{layout.source}: along mesh dim {routed[0]!r} only those keys of axis {axis!r} travel"
            " that the model chooses, R(top_k), so its traffic depends on them; `weft explain"
            " call LAYOUT --choose K` bounds it"
        )
    if routed:
        raise UnsupportedError(
            f"{layout.source}: mesh dim {routed[0]!r} routes keys of axis {axis!r} by learned "
            "weights, so its traffic and its results depend on them; see "
            "weft.routing.RoutedAttention"
        )


def lengths_of(
    text: str, axis: str, known: Collection[str] = (), option: str = "--length"
) -> tuple[int, ...]:
    """Global length per attended axis of `--length`: a number, or `axis=number` of several axes.

    A number alone is about that of several axes together.

    >>> lengths_of("37", "tokens"), lengths_of("rows=8,features=3", "rows+features")
    ((37,), (8, 3))
    >>> lengths_of("37", "lat+lon"), lengths_of("rows=8,features=3", "rows")
    ((6, 6), (8,))
    """
    axes = axis.split("+")
    each = ",".join(f"{name}=N" for name in axes)
    want = each if len(axes) > 1 else f"a number, or {each}"
    wanted = ShapeError(f"{option} {shown(text)}: axis {axis!r} needs {want}")
    try:
        if "=" in text:
            pairs = [part.split("=") for part in text.split(",")]
            named = {name.strip(): int(number) for name, number in pairs}
        else:
            pairs, whole = [], int(text)
            side = whole if len(axes) == 1 else round(max(whole, 0) ** (1 / len(axes)))
            named = dict.fromkeys(axes, min(whole, side))
    except ValueError:
        raise wanted from None
    strange = [name for name in named if known and name not in {*known, *axes}]
    if strange:
        raise ShapeError(
            f"{option} {shown(text)}: no axis {strange[0]!r}{did_you_mean(strange[0], known)}"
        )
    if len(pairs) > len(named):
        raise ShapeError(f"{option} {shown(text)} names an axis twice")
    if not named.keys() >= set(axes):
        raise wanted
    lengths = tuple(named[name] for name in axes)
    if min(lengths) < 0 or math.prod(lengths) > MOST_TOKENS:
        raise ShapeError(f"{option} {shown(text)}: lengths are 0 to {MOST_TOKENS:,} tokens in all")
    return lengths


def lengths_of_axes(text: str | None) -> dict[str, int]:
    """The axes of a model that `--length` names, and their global lengths.

    >>> lengths_of_axes("rows=8,features=3")
    {'rows': 8, 'features': 3}
    """
    try:
        pairs = [part.split("=") for part in text.split(",")] if text else []
        found = {axis.strip(): int(number) for axis, number in pairs}
    except ValueError:
        raise ShapeError(f"--length {shown(text)}: a model needs AXIS=N,AXIS=N") from None
    if min(found.values(), default=1) < 1 or math.prod(found.values()) > MOST_TOKENS:
        raise ShapeError(f"--length {shown(text)}: lengths are 1 to {MOST_TOKENS:,} tokens in all")
    return found


def dtype_named(name: str) -> torch.dtype:
    """A floating dtype by torch's name or a short one (fp64, fp32, bf16, fp16).

    >>> dtype_named("bf16")
    torch.bfloat16
    """
    short = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    known = sorted({*short, *short.values()})
    if name not in known:
        raise ShapeError(f"dtype {name!r}{did_you_mean(name, known)}")
    return getattr(torch, short.get(name, name))


def known_axes(layout: Layout) -> set[str]:
    """The axes that a layout attends, each by itself."""
    return {part for named in layout.attend for part in named.split("+")}


def refuse_joint_keys(keys: int | None, axis: str) -> None:
    """Raise where `--keys` is given for several axes: one number says nothing of each."""
    if keys is not None and "+" in axis:
        raise ShapeError(
            f"--keys {keys}: {axis!r} attends several axes jointly, each with as many keys as"
            " queries; give --keys for a single axis"
        )


def device_for(device: str, ranks: int) -> str:
    """`auto` as cuda where every one of `ranks` that runs on this machine has a GPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise ShapeError(f"--device {shown(device)}: known are auto, cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ShapeError("--device 'cuda': torch finds no GPU on this machine; use cpu, or auto")
    if device != "auto":
        return device
    here, seen = ranks_here(ranks), torch.cuda.device_count()
    each = seen == 1 and shown_one_gpu_each(here)
    return "cuda" if seen >= here or each else "cpu"
