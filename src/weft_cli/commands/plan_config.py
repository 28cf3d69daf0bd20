"""`weft plan CONFIG`: how to train or serve a transformers model, from its config alone."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.markup import escape
from rich.table import Table

from weft.declare.hardware import Hardware
from weft.inspect import words
from weft.layout import Layout
from weft_planner.choices import OTHER
from weft_planner.groups import Groups, Row
from weft_planner.hf_config import HFModel
from weft_planner.ledger import nearest
from weft_planner.serving import Served, serving

from ..inspect import tables
from . import options
from .options import console
from .plan_model import write_layout


@dataclass(frozen=True)
class Asked:
    """Request of the command line about a transformers model."""

    tokens: int
    hardware: str
    devices: int
    losses: tuple[str, ...]
    optimizers: tuple[str, ...]
    recompute: tuple[str, ...]
    only: tuple[str, ...]
    memory: float | None
    top: int
    write: Path | None
    html: Path | None


def plan_config(path: str, asked: Asked) -> None:
    """Search groups, layouts, recomputation and sharding; print the fastest and how to run them."""
    model = HFModel.load(path)
    machine = Hardware.load(asked.hardware)
    out = console()
    label = "counting steps with the model's own code"
    with out.status(label) as status, options.still_here(label), warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def tell(text: str) -> None:
            status.update(f"{label}: {text}")

        verified = _verified(model)
        search = Groups(
            model,
            asked.tokens,
            machine,
            asked.devices,
            asked.losses,
            asked.optimizers,
            asked.recompute,
            asked.only,
            asked.memory,
        )
        rows = search.rows(tell)
        advice = _advice(rows[0], search, asked) if rows and search.fits(rows[0]) else []
    about = "~ " if model.routed or model.recurrent else ""
    out.print(
        f"[bold]{escape(model.class_name)}[/], {model.numbers:.3g} weights, {model.layers} layers:"
        f" {escape(verified)}\none row of {asked.tokens:,} tokens per group and step; AdamW, FSDP2,"
        " bf16 activations, eager kernels\n",
        highlight=False,
    )
    fit, unfit = ([r for r in rows if search.fits(r) is fits] for fits in (True, False))
    if fit:
        out.print(_table(fit[: asked.top], search, about))
        for line in advice:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        out.print("nothing fits: more devices, fewer tokens, or adapters (LoRA)\n")
    if unfit:
        out.print(f"\ndoes not fit in {search.limit / 1e9:.0f} GB, the fastest of {len(unfit)}:")
        out.print(_table(unfit[:3], search, about))
    _print_notes(model, search, asked)
    if fit and asked.write is not None:
        text = f"Planned for {model.name}, {asked.devices} devices of {asked.hardware}."
        write_layout(fit[0].layout, text, asked.write)
        out.print(f"layout: {asked.write}", markup=False)
    if fit and asked.html is not None:
        _write_page(fit, search, asked)


def serve_config(path: str, asked: Asked) -> None:
    """Print bytes that a rank holds and receives as a model generates, by the size of its group."""
    model = HFModel.load(path)
    machine = Hardware.load(asked.hardware)
    out = console()
    sizes = (n for n in range(1, asked.devices + 1) if asked.devices % n == 0)
    found = [serving(model, asked.tokens, n) for n in sizes]
    out.print(
        f"[bold]{escape(model.class_name)}[/], {model.numbers:.3g} weights in bf16 on every rank; "
        f"a cache of {asked.tokens:,} tokens, split over the ranks of a group\n",
        highlight=False,
    )
    limit = asked.memory or machine.device.memory
    out.print(_served(found, limit))
    if not (room := next((r for r in found if limit and r.nbytes + OTHER <= limit), None)):
        out.print("nothing fits: more devices, or fewer tokens", highlight=False)
        return
    line = f"tokens: ring={room.ranks}"
    if room.ranks == 1:
        texts = ["fits on one rank, without a layout; more of them share the cache"]
    else:
        texts = [
            f"fits from {room.ranks} ranks on",
            f"type:    weft.parallelize(model, weft.Layout.parse({line!r}).build())",
            "         model.generate(ids, max_new_tokens=...)        torchrun --nproc-per-node "
            f"{room.ranks} serve.py",
        ]
    for text in texts:
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def _served(found: Sequence[Served], limit: float | None) -> Table:
    columns = ("ranks", "weights", "cache", "states", "in all", "fits", "received per token")
    result = tables.table("memory of a rank", *columns, right=columns)
    for each in found:
        fits = "?" if limit is None else "yes" if each.nbytes + OTHER <= limit else "no"
        result.add_row(
            str(each.ranks),
            *map(_gb, (each.weights, each.cache, each.states, each.nbytes)),
            fits,
            words.nbytes(each.decoded),
        )
    result.caption = "received: partial outputs of every layer that attends; 4 GB to spare"
    result.caption_justify = "left"
    return result


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _verified(model: HFModel) -> str:
    """Outcome of comparing a small copy on ranks with one device, in a few words."""
    from weft_integrations.transformers import verify

    torch.manual_seed(0)
    try:
        small = model.build_small()
    except Exception as error:  # a copy of these sizes may be no model
        return f"no small copy could be made ({type(error).__name__}), so nothing was verified"
    verify(small, Layout.parse("tokens: ring=2"))
    return f"exact on ranks (a copy of {len(model.units(small))} layers was verified)"


def _table(rows: Sequence[Row], search: Groups, about: str) -> Table:
    columns = ("s/step", "tokens/s/GPU", "memory", "state", "gathered", "activations")
    names = ("groups", "layout of a group", "recompute", "FSDP", "loss", "optimizer", *columns)
    limit = f"predicted, of {search.limit / 1e9:.0f} GB"
    title = "predicted" if math.isinf(search.limit) else limit
    result = tables.table(title, *names, right=columns)
    for row in rows:
        result.add_row(
            f"{row.groups} x {row.layout.world_size}",
            escape(row.layout.name),
            row.recompute,
            "none" if row.shards == 1 else str(row.shards),
            row.loss,
            row.optimizer.removeprefix("adamw-"),
            f"{about}{row.step:.3g}",
            f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.3g}",
            about + _gb(row.nbytes),
            *(_gb(row.memory[part]) for part in ("state", "gathered", "activations")),
        )
    result.caption = (
        f"memory: with {OTHER / 1e9:.0f} GB for CUDA, NCCL and fragmentation, assumed. FSDP: ranks"
        " that shard weights"
    )
    result.caption_justify = "left"
    return result


def _advice(row: Row, search: Groups, asked: Asked) -> list[str]:
    """The time of the best row by part, the longest that fits, what to type and to check."""
    parts = ", ".join(f"{name} {words.show_time(s)}" for name, s in row.seconds.items() if s)
    hidden = "hidden" if not row.seconds["FSDP"] else "not all hidden"
    fsdp = f"; FSDP's messages {words.show_time(row.fsdp)}, {hidden}" if row.fsdp else ""
    node = search.hardware.level[0].ranks
    node = asked.devices if node < 1 else min(node, asked.devices)
    if row.layout.world_size == 1:
        layout = "no layout: every GPU has rows of its own; trainers.of is not needed"
    else:
        layout = f'layout = trainers.layout("{row.layout.name}"); trainers.of(SFTTrainer, layout)'
    lines = [
        f"best: {parts}{fsdp}; by weft's clock, on {asked.hardware}",
        _longest(row, search, asked),
        f"type:    {_started(asked.devices, node)} train.py",
        f"         {layout}",
        f"         SFTConfig({', '.join(_arguments(row, asked))})",
    ]
    if row.loss == "chunked":
        lines.append(
            "         loss: TRL's has chunks of its own; in a loop of yours"
            " weft.losses.cross_entropy(hidden, head.weight, labels, layout)"
        )
    if row.layout.world_size > 1:
        file, folder = (
            shlex.quote(str(s)) for s in (asked.write or row.layout.name, search.model.name)
        )
        lines += [
            f"check:   weft check {file} --symbolic --mask causal",
            f"         weft verify {search.model.class_name} {folder} {file} --small",
            f"measure: {_started(row.layout.world_size, node)} -m weft rates {file} --write"
            " measured.toml",
        ]
    return lines


def _arguments(row: Row, asked: Asked) -> Iterator[str]:
    """Arguments of TRL's configuration that train as a row says."""
    yield f"max_length={asked.tokens}"
    yield "per_device_train_batch_size=1"
    yield f"gradient_checkpointing={row.recompute != 'none'}"
    if row.recompute == "offload":  # of transformers 5.24
        yield 'gradient_checkpointing_kwargs={"offload": True}'
    yield "bf16=True"
    if row.shards > 1:
        yield "fsdp=True"
    if 1 < row.shards < asked.devices:
        sizes = f"dp_replicate_size={asked.devices // row.shards}, dp_shard_size={row.shards}"
        yield f"parallelism_config=ParallelismConfig({sizes})"
    dtype = {"adamw-fp32": "float32", "adamw-bf16": "bfloat16"}[row.optimizer]
    yield f'model_init_kwargs={{"dtype": "{dtype}"}}'


def _started(ranks: int, node: int) -> str:
    """The beginning of a command that starts some ranks on nodes of a size; "..." is where."""
    if ranks <= node:
        return f"torchrun --nproc-per-node {ranks}"
    return f"torchrun --nnodes {-(-ranks // node)} --nproc-per-node {node} ..."


def _longest(row: Row, search: Groups, asked: Asked) -> str:
    tokens = search.longest(row)
    if tokens is None:
        return f"what fits is not known: {asked.hardware} has no memory of a device; pass --memory"
    return f"longest row that fits so: {tokens:,} tokens"


def _print_notes(model: HFModel, search: Groups, asked: Asked) -> None:
    out = console()
    notes = [*model.notes, *(f"not tried: {why}" for why in search.refused)]
    if model.routed:
        notes.append("~: each expert gets its mean share of the tokens")
    if model.recurrent:
        notes.append(
            "~: recurrent layers as kernels of flash-linear-attention; without it they take more"
        )
    if any(row.recompute == "offload" for row in search.tried):
        notes.append("offloading is taken to be hidden; nothing prices the host's memory or links")
    for note in notes:
        out.print(note, markup=False, highlight=False, soft_wrap=True)
    out.print()
    for label, what in (("step", "times of steps"), ("memory", "memory")):
        line = f"{what}: checked against nothing measured on {asked.hardware}"
        found = nearest(asked.hardware, asked.devices, label) or line
        out.print(str(found), markup=False, highlight=False)


def _write_page(rows: Sequence[Row], search: Groups, asked: Asked) -> None:
    from weft_cli.inspect.page import write_page

    assert asked.html is not None
    layouts = [row.layout for row in rows if row.layout.world_size > 1]
    title = f"{search.model.name}, {asked.tokens:,} tokens, {asked.hardware}"
    write_page(
        [*dict.fromkeys(layouts)][: asked.top], search.problem, search.hardware, title, asked.html
    )
    console().print(f"page: {asked.html}", markup=False)


__all__ = ["Asked", "plan_config", "serve_config"]
