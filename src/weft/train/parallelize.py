"""One call for what sums a model's gradients over ranks: FSDP2 or DDP, as a layout needs them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..comm.gradients import BY_DDP
from ..comm.weights import compare_names, compare_weights
from ..declare.layout_file import HEADS
from ..errors import DeclarationError, UnsupportedError
from ..layout import Layout
from ..private import one_dim

Way = Literal["fsdp", "ddp"]


def parallelize(
    model: nn.Module,
    layout: Layout,
    way: Way = "fsdp",
    *,
    blocks: Callable[[nn.Module], bool] | None = None,
    **options: object,
) -> nn.Module:
    """Has torch sum gradients during backward over the mesh dims that split data.

    Every rank computes the gradient of its own tokens, and the loss is already a mean over all of
    them (`layout.mean`), so gradients are **summed** over the data dims and divided by nothing.
    There are three ways, of which a model takes one:

        layout.sync_gradients(model)           after backward; weights whole on every rank
        parallelize(model, layout, "ddp")      DistributedDataParallel: during backward
        parallelize(model, layout, "fsdp")     fully_shard: weights, gradients, states are sharded

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
            `nn.ModuleList` and `nn.Sequential`.
        options: go to `fully_shard` or `DistributedDataParallel` as they are.

    Returns:
        The model to train.

    Raises:
        DeclarationError: ranks that are no processes, or a layout that splits no data; a model made
            for a layout that splits it over other ranks.
        UnsupportedError: a model that is wrapped already; DDP where heads are split.
        ShapeError: on every rank: ranks have different weights, or some none (device meta).

    Example::

        layout = weft.Layout.load("layout.toml").build()
        model = weft.parallelize(weft.compose("tabular", layout), layout)
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
    layout.check_lies_here(model)
    alike = [d for d in layout.mesh if d not in layout.shard_dims(HEADS)]
    if not layout.bound.fake:
        parameters = dict(model.named_parameters())
        compare_names(parameters, layout.bound)
        compare_weights(parameters, alike, layout.bound)
    mesh = one_dim(layout.device_mesh, layout.device_dims(layout.data_dims), "weft_data")
    if way == "ddp":
        return _ddp(model, mesh.get_group(), options)
    chosen = set(_children(model)) if blocks is None else {m for m in model.modules() if blocks(m)}
    for part in reversed(list(model.modules())):  # inner ones first
        if part in chosen and part is not model:
            fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
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
            "split; use weft.parallelize(model, layout, 'fsdp'), or layout.sync_gradients(model)"
        )


def _children(model: nn.Module) -> Iterator[nn.Module]:
    for part in model.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            yield from part.children()


def _ddp(model: nn.Module, group: dist.ProcessGroup, options: dict) -> DistributedDataParallel:
    """DDP whose ranks sum gradients: the mean over P ranks of P times each rank's own."""
    ranks = group.size()
    wrapper = DistributedDataParallel(model, process_group=group, **options)
    for parameter in model.parameters():
        if parameter.requires_grad:  # mean(G + P g_r) = G + sum(g_r), G summed in earlier passes
            parameter.register_hook(lambda grad: grad * ranks)
    setattr(model, BY_DDP, True)
    return wrapper
