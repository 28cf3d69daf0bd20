"""`weft plan config`: how to train or serve a transformers model, from its config alone."""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from weft.declare.hardware import Hardware
from weft.errors import DeclarationError, ShapeError, did_you_mean, shown
from weft.inspect import words
from weft.layout import Layout
from weft_planner.choices import LOSSES, OPTIMIZERS, OTHER, RECOMPUTE
from weft_planner.groups import Groups, Row
from weft_planner.hf_config import HFModel
from weft_planner.ledger import nearest
from weft_planner.serving import serving

from ..inspect.printer import console, print_table, say, working, wrote
from . import options
from .plan_model import write_layout


@dataclass(frozen=True)
class Asked:
    """Request of the command line about a transformers model."""

    tokens: int
    hardware: str
    devices: int
    memory: float | None
    write: Path | None


def config(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A transformers model: its folder, or its config.json.",
            show_default=False,
        ),
    ],
    *,
    tokens: Annotated[str, options.of_call("Of one row: 2 or more.", show_default=False)],
    hardware: options.Machine,
    devices: options.Devices,
    only: options.Only = None,
    memory: options.Memory = None,
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
    top: options.Top = 5,
    html: options.Page = None,
    write: options.Write = None,
) -> None:
    """Find how to train, or serve, a transformers model on a machine. Starts nothing.

    Groups of devices, the layout of a group, recomputation, FSDP's sharding, loss
    and precision, with the seconds of a step and the memory of a rank by part,
    counted with the model's own code on tensors without numbers; what does not
    fit, the longest row that fits, and what to type. Nothing is downloaded.

    Times are predictions; the last lines say against what they were checked.

    Examples:

        weft plan config Meta-Llama-3-8B/config.json --tokens 131072 --devices 64 \\
            --hardware h100-8

        weft plan config Meta-Llama-3-8B/ --tokens 131072 --devices 8 --hardware h100-8 --serve
    """
    asked = Asked(_tokens_of(tokens), hardware, devices, memory, write)
    if serve:
        _serve(HFModel.load(config), asked)
        return
    tried = (
        _chosen("--loss", loss, LOSSES),
        _chosen("--optimizer", optimizer, tuple(OPTIMIZERS)),
        _chosen("--recompute", recompute, RECOMPUTE),
    )
    model = HFModel.load(config)
    machine = Hardware.load(hardware)
    label = "counting steps with the model's own code"
    with working(label) as tell, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verified = _verified(model)
        search = Groups(model, asked.tokens, machine, devices, *tried, options.names(only), memory)
        rows = search.rows(tell)
        advice = _advice(rows[0], search, asked) if rows and search.fits(rows[0]) else []
    about = "~ " if model.routed or model.recurrent else ""
    console().print(
        f"[bold]{escape(model.class_name)}[/], {model.numbers:.3g} weights, {model.layers} layers:"
        f" {escape(verified)}\none row of {asked.tokens:,} tokens per group and step; AdamW, FSDP2,"
        " bf16 activations, eager kernels\n",
        highlight=False,
    )
    fit, unfit = ([r for r in rows if search.fits(r) is fits] for fits in (True, False))
    if fit:
        _show(fit[:top], search, about)
        say(*advice)
    else:
        say("nothing fits: more devices, fewer tokens, or adapters (LoRA)\n")
    if unfit:
        say(f"\ndoes not fit in {search.limit / 1e9:.0f} GB, the fastest of {len(unfit)}:")
        _show(unfit[:3], search, about)
    _print_notes(model, search, asked)
    if fit and write is not None:
        text = f"Planned for {model.name}, {devices} devices of {hardware}."
        write_layout(fit[0].layout, text, write)
    if fit and html is not None:
        from ..inspect.page import write_page

        several = dict.fromkeys(row.layout for row in fit if row.layout.world_size > 1)
        title = f"{model.name}, {asked.tokens:,} tokens, {hardware}"
        write_page([*several][:top], search.problem, machine, title, html)
        wrote("page", html)


def _tokens_of(text: str) -> int:
    (tokens,) = options.lengths_of(text, "tokens", ("tokens",), "--tokens")
    if tokens < 2:
        raise ShapeError(f"--tokens {shown(text)}: a row to train on has 2 tokens or more")
    return tokens


def _chosen(name: str, value: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The values that an option leaves to a search: one that it names, or all with "auto".

    >>> _chosen("--loss", "auto", ("chunked", "full"))
    ('chunked', 'full')
    """
    if value != "auto" and value not in known:
        raise DeclarationError(f"{name} {shown(value)}{did_you_mean(value, (*known, 'auto'))}")
    return known if value == "auto" else (value,)


def _serve(model: HFModel, asked: Asked) -> None:
    """Print bytes that a rank holds and receives as a model generates, by the size of its group."""
    sizes = (n for n in range(1, asked.devices + 1) if asked.devices % n == 0)
    found = [serving(model, asked.tokens, n) for n in sizes]
    limit = asked.memory or Hardware.load(asked.hardware).device.memory
    console().print(
        f"[bold]{escape(model.class_name)}[/], {model.numbers:.3g} weights in bf16 on every rank; "
        f"a cache of {asked.tokens:,} tokens, split over the ranks of a group\n",
        highlight=False,
    )
    columns = ("ranks", "weights", "cache", "states", "in all", "fits", "received per token")
    print_table(
        "memory of a rank",
        [f">{name}" for name in columns],
        [
            (
                str(each.ranks),
                *map(_gb, (each.weights, each.cache, each.states, each.nbytes)),
                "?" if limit is None else "yes" if each.nbytes + OTHER <= limit else "no",
                words.nbytes(each.decoded),
            )
            for each in found
        ],
        "received: partial outputs of every layer that attends; 4 GB to spare",
    )
    room = next((r.ranks for r in found if limit and r.nbytes + OTHER <= limit), None)
    if room is None:
        say("nothing fits: more devices, or fewer tokens")
    elif room == 1:
        say("fits on one rank, without a layout; more of them share the cache")
    else:
        line = f"tokens: ring={room}"
        say(
            f"fits from {room} ranks on",
            f"type:    weft.parallelize(model, weft.Layout.parse({line!r}).build())",
            "         model.generate(ids, max_new_tokens=...)        torchrun --nproc-per-node "
            f"{room} serve.py",
        )


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


def _show(rows: Sequence[Row], search: Groups, about: str) -> None:
    columns = ("s/step", "tokens/s/GPU", "memory", "state", "gathered", "activations")
    names = ("groups", "layout of a group", "recompute", "FSDP", "loss", "optimizer")
    print_table(
        "predicted" if math.isinf(search.limit) else f"predicted, of {search.limit / 1e9:.0f} GB",
        (*names, *(f">{name}" for name in columns)),
        [
            (
                f"{row.groups} x {row.layout.world_size}",
                row.layout.name,
                row.recompute,
                "none" if row.shards == 1 else str(row.shards),
                row.loss,
                row.optimizer.removeprefix("adamw-"),
                f"{about}{row.step:.3g}",
                f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.3g}",
                about + _gb(row.nbytes),
                *(_gb(row.memory[part]) for part in ("state", "gathered", "activations")),
            )
            for row in rows
        ],
        f"memory: with {OTHER / 1e9:.0f} GB for CUDA, NCCL and fragmentation, assumed. FSDP: ranks"
        " that shard weights",
    )


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
    notes = [*model.notes, *(f"not tried: {why}" for why in search.refused)]
    if model.routed:
        notes.append("~: each expert gets its mean share of the tokens")
    if model.recurrent:
        notes.append(
            "~: recurrent layers as kernels of flash-linear-attention; without it they take more"
        )
    if any(row.recompute == "offload" for row in search.tried):
        notes.append("offloading is taken to be hidden; nothing prices the host's memory or links")
    say(*notes, "")
    for label, what in (("step", "times of steps"), ("memory", "memory")):
        line = f"{what}: checked against nothing measured on {asked.hardware}"
        say(f"{nearest(asked.hardware, asked.devices, label) or line}")
