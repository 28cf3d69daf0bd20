"""Trainer settings that would silently train another model: refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from weft.errors import DeclarationError, UnsupportedError

from ..common import OF_RANKS
from .groups import ContextGroup

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments


def trainer_arguments(args: TrainingArguments) -> None:
    """Raise where arguments of a `Trainer` cannot be honoured on context groups."""
    _parallelism(getattr(args, "parallelism_config", None))
    if args.deepspeed:
        refuse_setting(
            "deepspeed", "it partitions and reduces gradients itself; use DDP (the default)"
        )
    if args.auto_find_batch_size:
        refuse_setting(
            "auto_find_batch_size=True",
            "one rank out of memory tries again while the others wait for it; set "
            "per_device_train_batch_size",
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        refuse_setting(
            "train_sampling_strategy='batch_rebalance'",
            "it gives every rank other rows; use 'random', 'sequential' or 'group_by_length'",
        )
    if getattr(args.accelerator_config, "dispatch_batches", None):
        dispatch()
    if args.n_gpu > 1:
        refuse_setting(
            f"{args.n_gpu} GPUs in one process",
            "nn.DataParallel splits rows over them; start one process per GPU, by torchrun",
        )
    if not args.average_tokens_across_devices:
        refuse_setting(
            "average_tokens_across_devices=False",
            "the Trainer then divides a rank's own count of tokens by the size of its group; "
            "leave it True",
        )
    liger = args.liger_kernel_config or {}
    if args.use_liger_kernel and liger.get("fused_linear_cross_entropy", True):
        refuse_setting(
            "use_liger_kernel=True with its fused cross-entropy",
            "it replaces the model's forward and makes a loss of this rank's tokens; set "
            "liger_kernel_config={'fused_linear_cross_entropy': False}",
        )


def accelerator(instance: Accelerator, group: ContextGroup) -> None:
    """Raise where an accelerator does not run as the context groups need it."""
    _parallelism(getattr(instance, "parallelism_config", None))
    kind = str(getattr(instance.distributed_type, "value", instance.distributed_type))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        refuse_setting(
            f"accelerate's {kind}", "use DDP or FSDP2, which average gradients over all ranks"
        )
    if instance.num_processes != group.size * group.count:
        raise DeclarationError(
            f"accelerate runs {instance.num_processes} process(es) ({kind}), but the world has "
            f"{group.size * group.count}: gradients would not be averaged. On CPUs pass "
            "use_cpu=True to TrainingArguments, or cpu=True to Accelerator, and start by torchrun"
        )
    if instance._dataloaders:
        raise DeclarationError(
            "the accelerator has prepared a loader already, which gives every rank other rows; "
            "call trainers.attach before accelerator.prepare"
        )
    if instance.dispatch_batches:
        dispatch()
    plugin = getattr(instance.state, "dynamo_plugin", None)
    if plugin is not None and plugin.fullgraph:
        refuse_setting("fullgraph=True of accelerate's dynamo plugin", OF_RANKS)
    if plugin is not None and plugin.use_regional_compilation:
        refuse_setting(
            "use_regional_compilation=True of accelerate's dynamo plugin",
            "it copies the model around its layers, past what calls do; compile all of it",
        )


def model_placement(model: nn.Module) -> None:
    """Raise for a model whose layers are spread over several devices of a process."""
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        refuse_setting(
            f"device_map over {sorted(map(str, devices))}",
            "one process would run several devices in turn; load the model without device_map",
        )


def dispatch() -> NoReturn:
    """Raise for `dispatch_batches=True`."""
    refuse_setting(
        "dispatch_batches=True",
        "rank 0 would read batches and split their rows over all ranks, those of a group too; "
        "leave it None or set it False",
    )


def _parallelism(config: Any) -> None:
    for name in ("cp_size", "sp_size", "tp_size"):
        if (getattr(config, name, 1) or 1) > 1:
            refuse_setting(
                f"ParallelismConfig({name}={getattr(config, name)})",
                "accelerate would split sequences or weights a second time, and drop attention "
                "masks; the layout alone says how tokens are split",
            )


def refuse_setting(label: str, why: str) -> NoReturn:
    raise UnsupportedError(f"{label} on a sequence-sharded model: {why}")
