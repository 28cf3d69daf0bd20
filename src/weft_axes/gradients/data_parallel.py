"""One call for the gradient sum of a model over ranks: FSDP2 or DDP, as its layout needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from weft._torch import active_ddp, ignored_by_ddp, one_dim
from weft.comm import step_check
from weft.comm.consistency import compare_names, compare_weights
from weft.declare.layout_file import HEADS
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout, check_same_data_ranks

from .sync import BY_DDP, is_averaged

Way = Literal["fsdp", "ddp"]


def data_parallel(
    model: nn.Module,
    layout: Layout,
    way: Way = "fsdp",
    *,
    blocks: Callable[[nn.Module], bool] | None = None,
    **options: Any,
) -> nn.Module:
    """Has torch sum gradients during backward over the mesh dims that split data.

    Every rank computes the gradient of its own tokens, and the loss is already a mean over all of
    them (`layout.mean`), so gradients are **summed** over the data dims and divided by nothing.
    There are three ways, of which a model takes one:

        layout.sync_gradients(model)           after backward; weights whole on every rank
        data_parallel(model, layout, "ddp")      DistributedDataParallel: during backward
        data_parallel(model, layout, "fsdp")     fully_shard: weights, gradients, states are sharded

    A transformers model on a layout is **averaged** by each of them. Its
    layout is that of one context group; with data parallelism around it take torch's own DDP or
    `fully_shard` over all ranks instead.

    `layout.sync_gradients` refuses a model that went through here. Split heads stay split: FSDP2
    shards them further, over the mesh dims that are left. On `Layout.single()` there is nothing to
    sum, and the model is returned as it is, so that one script serves one process and many.

    Gradients of micro-batches add up, under DDP's `no_sync` (where `.grad` holds P times the
    rank's own until the last backward pass) and without it.

    Clip with `weft.clip_grad_norm_`. torch's own raises a `KeyError` under FSDP2 where a mesh dim
    that splits heads comes before one that splits data (`tp` before `ring`).

    Where a mesh dim splits keys and has queries whole (`kv_parallel`), parameters to train are a
    warning: those that make keys there would get one rank's part of their gradient, those of a
    model that attends to a cache get it whole. `layout.sync_gradients` looks, and this cannot.

    Args:
        model: any module on the layout, with the same weights on all ranks.
        layout: a layout built or bound on processes.
        way: `"fsdp"` (in place) or `"ddp"` (a wrapper is returned).
        blocks: which submodules FSDP2 gathers at a time; default the children of every
            `nn.ModuleList` and `nn.Sequential`. Those that share a parameter with another are
            gathered with what is around both.
        options: go to `fully_shard` or `DistributedDataParallel` as they are.

    Returns:
        The model to train.

    Raises:
        DeclarationError: ranks that are no processes, or a layout that splits no data; a model made
            for a layout that splits it over other ranks.
        UnsupportedError: a model that is wrapped already; DDP where heads are split; parts with
            full rows and parts with local ones; in calls: another DDP around the wrapper; on every
            rank: DDP with `broadcast_buffers` and buffers that differ between ranks.
        ShapeError: on every rank: ranks have different weights, or some none (device meta).

    Example::

        layout = weft.Layout.load("layout.toml").build()
        model = weft.data_parallel(weft.compose("tabular", layout), layout)
        optimizer = torch.optim.AdamW(model.parameters())       # after, not before
        for batch in data:
            loss = layout.mean(*loss_sum_and_count(model, batch))
            loss.backward()                                     # gradients are complete
            weft.clip_grad_norm_(model, 1.0, layout)
            optimizer.step()
            optimizer.zero_grad()
    """
    _check(model, layout, way)
    if not layout.mesh:
        return model
    check_same_data_ranks(model, layout)
    alike = [d for d in layout.mesh if d not in layout.shard_dims(HEADS)]
    if not layout.bound.fake:
        parameters = dict(model.named_parameters())
        compare_names(parameters, layout.bound)
        compare_weights(parameters, alike, layout.bound)
        if step_check.is_on():  # of the step before, as torch sums gradients in this one's backward

            def check(model: nn.Module, _: tuple) -> None:
                if model.training and torch.is_grad_enabled():
                    step_check.compare(dict(model.named_parameters()), alike, layout.bound)

            model.register_forward_pre_hook(check, prepend=True)
    dims = layout.device_dims(layout.data_dims)
    assert layout.device_mesh is not None
    mesh = one_dim(layout.device_mesh, dims, f"weft_{'_'.join(dims)}")
    averaged = is_averaged(model)
    if way == "ddp":
        if options.get("broadcast_buffers", True):
            _check_buffers(model, layout)
        return _ddp(model, mesh.get_group(), options, averaged)
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential))
    chosen = (
        {*filter(blocks, model.modules())} if blocks else {b for m in lists for b in _called(m)}
    )
    while apart := _sharing(model, chosen):  # FSDP2 would make a parameter that they share two
        chosen = chosen - apart
    for part in reversed(list(model.modules())):  # inner ones first
        if part in chosen and part is not model:
            fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    divisor = float(mesh.size()) if averaged else 1.0
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(divisor)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def _check(model: nn.Module, layout: Layout, way: str) -> None:
    if way not in ("fsdp", "ddp"):
        raise DeclarationError(f"way={way!r}: known are 'fsdp' and 'ddp'")
    if layout.keys_only_dims and any(p.requires_grad for p in model.parameters()):
        warnings.warn(
            f"{layout.source}: mesh dims {layout.keys_only_dims} split keys and have queries whole,"
            " so that weights that make keys there get the gradient of one rank's own, which FSDP2"
            " and DDP cannot tell from a whole one and layout.sync_gradients refuses; a model that"
            " only predicts takes model.requires_grad_(False) before",
            stacklevel=3,
        )
    if layout.mesh and layout.device_mesh is None:
        raise DeclarationError(
            f"{layout.source}: FSDP2 and DDP need ranks that are processes; build the layout first"
        )
    if layout.mesh and not layout.data_dims:
        raise DeclarationError(
            f"{layout.source}: no mesh dim splits data, so gradients are complete after backward"
        )
    wrapped = (FSDPModule, DistributedDataParallel)
    if any(isinstance(m, wrapped) or getattr(m, BY_DDP, False) for m in model.modules()):
        raise UnsupportedError(
            "the model went through fully_shard or DDP already; give it as it is"
        )
    if way == "ddp" and any(isinstance(p, DTensor) for p in model.parameters()):
        raise UnsupportedError(
            "DistributedDataParallel takes no DTensors, which parameters are where heads are "
            "split; use weft.data_parallel(model, layout, 'fsdp'), or layout.sync_gradients(model)"
        )


def _called(part: nn.Module) -> Iterator[nn.Module]:
    """The children, and of lists and dicts among them, which nobody calls, theirs."""
    for child in part.children():
        lists = isinstance(child, nn.ModuleList | nn.ModuleDict)
        bare = lists and type(child).forward is nn.Module.forward
        yield from _called(child) if bare else (child,)


def _sharing(model: nn.Module, chosen: set[nn.Module]) -> set[nn.Module]:
    """FSDP units that share a parameter with another unit, never the root."""
    units: dict[nn.Parameter, set[nn.Module]] = {}
    to_see = [(model, model)]
    while to_see:
        part, around = to_see.pop()
        unit = part if part in chosen else around
        for parameter in part.parameters(recurse=False):
            units.setdefault(parameter, set()).add(unit)
        to_see += [(child, unit) for child in part.children()]
    return {unit for found in units.values() if len(found) > 1 for unit in found} - {model}


def _check_buffers(model: nn.Module, layout: Layout) -> None:
    """Refuses, on every rank, buffers of each rank's own, which DDP would overwrite."""
    ignored = ignored_by_ddp(model)
    buffers = {name: held for name, held in model.named_buffers() if name not in ignored}
    if not buffers or layout.bound.fake:
        return
    try:
        compare_weights(buffers, layout.data_dims, layout.bound)
    except ShapeError as error:
        raise UnsupportedError(
            "DistributedDataParallel gives every rank rank 0's buffers before each forward pass,"
            " and some are each rank's own, such as positions of its tokens: pass"
            f" broadcast_buffers=False, or take way='fsdp' ({error})"
        ) from error


def _ddp(
    model: nn.Module, group: dist.ProcessGroup, options: dict, averaged: bool
) -> DistributedDataParallel:
    """DDP whose ranks sum gradients: the mean over P ranks of P times each rank's own.

    Of a model whose ranks are to be averaged it is torch's own.
    """
    ranks = group.size()
    wrapper = DistributedDataParallel(model, process_group=group, **options)
    wrapper.register_forward_pre_hook(_refuse_another)
    for parameter in model.parameters():
        if parameter.requires_grad and not averaged:
            # mean(G + P g_r) = G + sum(g_r), G summed in earlier passes
            parameter.register_hook(lambda grad: grad * ranks)
    setattr(model, BY_DDP, True)
    return wrapper


def _refuse_another(wrapper: DistributedDataParallel, args: tuple) -> None:
    """Raise where DDP is around a model that DDP is around already: both would reduce."""
    if active_ddp() not in (None, wrapper):
        raise UnsupportedError(
            "DistributedDataParallel is around a model that weft.data_parallel(..., 'ddp') gave to "
            "DDP already, so that gradients would be reduced twice, and scaled by what the order "
            "of hooks makes of it; keep one of the two (accelerate: prepare_model(model, "
            "evaluation_mode=True) adds none)"
        )
