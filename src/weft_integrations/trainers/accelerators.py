"""accelerate on context groups: the same rows for the ranks of a group, metrics counted once.

Methods of the accelerator are replaced on the instance; no class is changed. They are public, and
so are the arguments by which accelerate is told how many groups there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from weft.errors import DeclarationError
from weft.layout import Layout
from weft_axes.fields import Field

from . import refused
from .groups import ContextGroup, compare_arguments

if TYPE_CHECKING:
    from accelerate import Accelerator


#: Settings of an accelerator by which ranks make other calls.
_ALIKE = (
    *("gradient_accumulation_steps", "mixed_precision", "split_batches", "even_batches"),
    *("step_scheduler_with_optimizer", "rng_types"),
)


def attach(accelerator: Accelerator, layout: Layout) -> Accelerator:
    """Let an accelerator load, count and schedule for context groups instead of ranks.

    Loaders that it prepares give the ranks of a group the same rows; `gather_for_metrics` returns
    the rows of a group once; a prepared scheduler steps once for every group, as accelerate lets it
    step for every process. Gradients are averaged over all ranks, as ever.

    Args:
        accelerator: has prepared no loader yet.
        layout: bound, of the context group alone, as `trainers.layout` makes it.

    Returns:
        The accelerator.

    Raises:
        DeclarationError: the accelerator runs on another number of processes than the world has, or
            has prepared a loader already; the group's ranks are not consecutive.
        ShapeError: on every rank, if settings of accelerators differ.
        UnsupportedError: DeepSpeed, Megatron, context or sequence parallelism of accelerate's own,
            regional compilation, `dispatch_batches=True`. On `prepare`: a model to train that is
            not parallelized, and AdaLoRA.

    Example::

        layout = trainers.layout("tokens: ring=2")
        parallelize(model, layout)
        accelerator = trainers.attach(Accelerator(), layout)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    >>> import weft
    >>> from accelerate import Accelerator
    >>> attach(Accelerator(cpu=True), weft.Layout.single()).num_processes
    1
    """
    group = ContextGroup.of(layout)
    refused.accelerator(accelerator, group)
    settings = {name: repr(getattr(accelerator, name, None)) for name in _ALIKE}
    compare_arguments(settings, accelerator.num_processes)
    # None would have a stream read by rank 0.
    accelerator.dataloader_config.dispatch_batches = False
    accelerator.prepare_data_loader = functools.partial(_load, accelerator, group)
    for name in ("gather", "pad_across_processes", "reduce"):
        setattr(accelerator, name, functools.partial(_of_whole, getattr(accelerator, name)))
    accelerator.gather_for_metrics = functools.partial(_gather_for_metrics, accelerator, group)
    accelerator.prepare_scheduler = functools.partial(
        _schedule, accelerator, group, accelerator.prepare_scheduler
    )
    accelerator.prepare_model = functools.partial(_prepare_model, layout, accelerator.prepare_model)
    return accelerator


def _load(
    accelerator: Accelerator,
    group: ContextGroup,
    data_loader: DataLoader,
    device_placement: bool | None = None,
    slice_fn_for_dispatch: Any = None,
) -> DataLoader:
    """`Accelerator.prepare_data_loader` for as many processes as there are groups."""
    from accelerate.data_loader import prepare_data_loader

    if getattr(data_loader, "_is_accelerate_prepared", False):
        return type(accelerator).prepare_data_loader(accelerator, data_loader, device_placement)
    if accelerator.dispatch_batches:
        refused.dispatch()
    _seed_workers(data_loader, accelerator.process_index, group)
    config = accelerator.dataloader_config
    prepared = prepare_data_loader(
        data_loader,
        accelerator.device,
        num_processes=group.count,
        process_index=group.index,
        split_batches=accelerator.split_batches,
        put_on_device=(
            accelerator.device_placement if device_placement is None else device_placement
        ),
        rng_types=None if accelerator.rng_types is None else [*accelerator.rng_types],
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )
    accelerator._dataloaders.append(prepared)  # as its own method does
    return prepared


def _seed_workers(data_loader: DataLoader, process: int, group: ContextGroup) -> None:
    """Workers that draw, as collators of masks do, draw the same for the ranks of a group."""
    start = data_loader.worker_init_fn
    if isinstance(start, functools.partial) and start.keywords.get("rank") == process:
        keywords = start.keywords | {"rank": group.index}
        data_loader.worker_init_fn = functools.partial(start.func, *start.args, **keywords)


def _of_whole(run: Callable, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of accelerate, which sends memory of tensors, on fields made whole."""
    from accelerate.utils import recursively_apply

    whole = recursively_apply(lambda t: t.full_tensor() if isinstance(t, Field) else t, tensor)
    return run(whole, *args, **kwargs)


def _gather_for_metrics(
    accelerator: Accelerator, group: ContextGroup, input_data: Any, use_gather_object: bool = False
) -> Any:
    """`Accelerator.gather_for_metrics` of one rank per group.

    It cuts the last batch to the rows that the dataset has, of which each may be there once only.
    """
    from accelerate.utils import gather_object, recursively_apply

    try:
        recursively_apply(lambda x: x, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    if use_gather_object:
        data = gather_object(input_data if group.leads else [])
    else:
        data = recursively_apply(
            functools.partial(once_per_group, group), accelerator.gather(input_data)
        )
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return data
    if use_gather_object:
        return data[: state.remainder]
    return recursively_apply(lambda t: t[: state.remainder], data)


def once_per_group(group: ContextGroup, gathered: Any) -> Any:
    """Rows of the groups' first ranks, from rows gathered from all ranks in their order.

    >>> import torch
    >>> group = ContextGroup(2, 0, 2, True)
    >>> once_per_group(group, torch.tensor([10, 11, 10, 11, 20, 21, 20, 21]))
    tensor([10, 11, 20, 21])
    """
    rows = len(gathered) // (group.count * group.size)
    return gathered.unflatten(0, (group.count, group.size, rows))[:, 0].flatten(0, 1)


def _schedule(accelerator: Accelerator, group: ContextGroup, prepare: Any, scheduler: Any) -> Any:
    """A prepared scheduler that steps once per group: an epoch has that many batches fewer."""
    prepared = prepare(scheduler)
    if prepared is scheduler or prepared.split_batches or not prepared.step_with_optimizer:
        return prepared
    prepared.split_batches = True  # from now on one call is one step
    step_once = prepared.step

    def step(*args: Any, **kwargs: Any) -> None:
        if not accelerator.sync_gradients:
            step_once(*args, **kwargs)
            return
        last = getattr(prepared.scheduler, "total_steps", None)
        for _ in range(group.count):
            if last is None or prepared.scheduler.last_epoch < last:
                step_once(*args, **kwargs)

    prepared.step = step
    return prepared


def _prepare_model(
    layout: Layout,
    prepare: Any,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    if not evaluation_mode:
        check_model(model, layout)
    return prepare(model, device_placement=device_placement, evaluation_mode=evaluation_mode)


def check_model(model: nn.Module, layout: Layout) -> None:
    """Raise unless a model takes full rows on ranks of a layout, by hooks that are called."""
    from ..transformers.refused import adalora

    adalora(model)
    placed = [part for part in model.modules() if hasattr(part.__dict__.get("_weft"), "axis")]
    if len(placed) != 1:
        raise DeclarationError(
            f"{type(model).__name__} is to be trained on context groups of {layout.source}, and is"
            " not parallelized: call parallelize(model, layout) first"
        )


__all__ = ["attach", "check_model", "once_per_group"]
