"""Classes of `Trainer` on context groups: `of(SFTTrainer, layout)` is an `SFTTrainer`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from weft.errors import UnsupportedError
from weft.layout import Layout

from .. import Foreign
from . import refused
from .accelerators import attach, check_model
from .generation import generates, with_generation
from .groups import ContextGroup, compare_arguments

if TYPE_CHECKING:
    from transformers import Trainer

#: TRL's trainers that were compared with one process.
TRIED = tuple(f"{name}Trainer" for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO"))
T = TypeVar("T", bound="type[Trainer]")


def of(cls: T, layout: Layout, axis: str = "tokens") -> T:
    """A subclass, of the same name, that trains a model whose sequences are split over ranks.

    Use it in the place of the class. Loss, metrics, clipping, accumulation, logging and saving are
    the class's own code, and see full rows. A model that is not parallelized yet is parallelized,
    and so is the reference model of TRL's trainers. Under PEFT that is the base model.

    Args:
        cls: transformers' `Trainer`, TRL's SFT, DPO, KTO, reward, GRPO or RLOO trainer, or a
            subclass of them.
        layout: bound, of the context group alone, as `trainers.layout` makes it.
        axis: the layout's name for the tokens.

    Raises:
        UnsupportedError: another of TRL's trainers. When a trainer is made, before its
            first step, on every rank: settings that would train another model (see the guide).
        ShapeError: on every rank, on `train()`: arguments or numbers of rows that differ.
        DeclarationError: the group's ranks are not consecutive; a model that is parallelized on
            another layout.

    Example::

        layout = trainers.layout("tokens: ring=4")
        trainer = trainers.of(SFTTrainer, layout)(model=model, args=args, train_dataset=data)
        trainer.train()

    >>> import weft
    >>> from transformers import Trainer
    >>> of(Trainer, weft.Layout.single()).__mro__[1] is Trainer
    True
    """
    group = ContextGroup.of(layout)
    of_trl = next((base for base in cls.__mro__ if base.__module__.startswith("trl.")), None)
    if of_trl is not None and of_trl.__name__ not in TRIED:
        raise UnsupportedError(
            f"{of_trl.__module__}.{of_trl.__name__} was not tried on a sequence-sharded model; "
            f"of TRL's trainers {', '.join(TRIED)} were"
        )
    around = with_generation(cls, layout, group) if generates(cls) else cls

    class Sharded(around):  # type: ignore[misc, valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            """The first moment with a model and an accelerator, before any loader is made."""
            if group.size > 1:
                refused.trainer_arguments(self.args)
            super().create_accelerator_and_postprocess()
            attach(self.accelerator, layout)
            self.gather_function = functools.partial(
                self.accelerator.gather_for_metrics,
                use_gather_object=self.args.eval_use_gather_object,
            )
            if self.model is not None:
                _shard(self.model, layout, axis)
            prepare = self.accelerator.prepare_model

            def prepare_model(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
                if model is getattr(self, "ref_model", None):  # before TRL asks it anything
                    _shard_reference(model, self.model, layout, axis)
                return prepare(model, *args, **kwargs)

            self.accelerator.prepare_model = prepare_model

        def train(self, *args: Any, **kwargs: Any) -> Any:
            """The class's own training, once all ranks of the world have the same arguments."""
            compare_arguments(_arguments(self), self.accelerator.num_processes)
            return super().train(*args, **kwargs)

        def call_model_init(self, trial: Any = None) -> nn.Module:
            return _shard(super().call_model_init(trial), layout, axis)

        def get_tp_size(self) -> int:
            """Ranks that hold the same rows: by it the Trainer divides counts over ranks."""
            return super().get_tp_size() * group.size

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Sharded, name, getattr(cls, name))
    return Sharded  # type: ignore[return-value]


#: Arguments that ranks may have of their own: where rank 0 writes to, and what it says.
_OWN = (
    *("output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "local_rank"),
    *("log_level", "push_to_hub", "hub_", "project", "trackio"),
)


def _arguments(trainer: Foreign) -> dict[str, str]:
    """Arguments of a trainer, and rows of its data, that are the same on every rank."""
    values = {k: v for k, v in trainer.args.to_dict().items() if not k.startswith(_OWN)}
    for name in ("train_dataset", "eval_dataset"):
        data: Any = getattr(trainer, name, None)
        values[f"rows of {name}"] = len(data) if hasattr(data, "__len__") else type(data).__name__
    return {name: repr(value) for name, value in values.items()}


def _shard(model: nn.Module, layout: Layout, axis: str) -> nn.Module:
    """Parallelize a model that is not parallelized yet; returns it."""
    from ..transformers.model import parallelize_transformers

    refused.model_placement(model)
    if _is_sharded(model):
        check_model(model, layout)
        return model
    return parallelize_transformers(model, layout, axis)


def _is_sharded(model: nn.Module) -> bool:
    return any("_weft" in part.__dict__ for part in model.modules())


def _shard_reference(model: Foreign, policy: Foreign, layout: Layout, axis: str) -> None:
    """Parallelize a reference model, of the policy's class.

    TRL makes it with the attention that the policy has by then, which is weft's.
    """
    if not layout.mesh or _is_sharded(model):
        return
    before = next(p._weft.implementation for p in policy.modules() if "_weft" in p.__dict__)
    if model.config._attn_implementation == policy.config._attn_implementation:
        model.set_attn_implementation(before)
    _shard(model, layout, axis)


__all__ = ["of"]
