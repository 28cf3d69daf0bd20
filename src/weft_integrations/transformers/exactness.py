"""`verify`: does a transformers model on a layout give what it gives on one device?

Nothing rests on it: functions of fields have rules, or run whole. It is for those who want to see
it of a model of their own, and finds a rule that is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from weft.errors import DeclarationError, UnsupportedError, WeftError
from weft.layout import Layout
from weft.plan.rest import head_shares
from weft.threads import on_threads
from weft_axes.fields import Field

from .. import Foreign
from ..common import tensors_of
from ..fields import splits_fields
from ..parallelize import parallelize
from .defaults import CACHES
from .hooks import check_kind, check_layout, recurrent, run_on_cpu
from .parts import by_layer
from .replicated import configurations

#: Relative, in fp64 all through; in fp32 for models that do not run in it.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
#: Options by which few tokens are attended: those of more tokens than are tried are cut down.
_WINDOWS = "sliding_window", "attention_chunk_size", "local_attention"


@dataclass(frozen=True)
class Verified:
    """What `verify` found.

    Attributes:
        model: the model's class.
        layout: the layout's name.
        outputs: the largest relative difference of an output, the loss among them.
        gradients: the largest relative difference of a weight's gradient.
        ran_whole: functions without a rule, which ran whole on every rank.

    >>> print(Verified("GPT2Model", "ring-2", 1e-16, 3e-16))
    GPT2Model on ring-2: differs by 1e-16 in outputs, 3e-16 in gradients; nothing ran whole
    """

    model: str
    layout: str
    outputs: float
    gradients: float
    ran_whole: tuple[str, ...] = ()

    def __str__(self) -> str:
        whole = f"ran whole: {', '.join(self.ran_whole)}" if self.ran_whole else "nothing ran whole"
        return (
            f"{self.model} on {self.layout}: differs by {self.outputs:.0e} in outputs,"
            f" {self.gradients:.0e} in gradients; {whole}"
        )


def verify(
    model: nn.Module, layout: Layout, axis: str = "tokens", batch: Mapping[str, Any] | None = None
) -> Verified:
    """Compare a transformers model with itself on a layout, in fp64; needs no process group.

    Runs copies on short random rows, whole and on virtual ranks, threads of this process: at most
    two along every mesh dim. Outputs, loss and the gradient of every weight must agree; the model
    is left as it is. Needs 8 bytes per weight for a copy, and as many for each run's gradients.

    Args:
        model: a transformers model, not parallelized.
        layout: built or not; any number of ranks. Of images one that splits `height` or `width`.
        axis: the layout's name for the tokens.
        batch: a call of your own to compare instead, such as one with images.

    Raises:
        DeclarationError: an axis that the layout does not attend; weights that are not there.
        ShapeError: heads that the layout cannot split.
        UnsupportedError: it differs, which names the first module or weight; or cannot be split.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=2))
    >>> verify(model, Layout.load("ring-2")).ran_whole
    ()
    """
    check_kind(model)
    for name, p in model.named_parameters():
        if p.is_meta or isinstance(p, DTensor):
            kind = "on the meta device" if p.is_meta else "a DTensor"
            raise DeclarationError(f"{name} is {kind}: verify a model whose weights are there")
    if not splits_fields(layout):
        check_layout(layout, axis)
        _check_heads(model, layout, axis)
    few = _few_ranks(layout, recurrent(model))
    with torch.random.fork_rng([]):
        try:
            return _Comparison(model, few, axis, batch, torch.float64).run(layout)
        except _NotRun:
            return _Comparison(model, few, axis, batch, torch.float32).run(layout)


@dataclass
class _Run:
    """Outputs and gradients of a run, and outputs of its modules where they were asked for."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    modules: dict[str, Tensor]
    ran_whole: tuple[str, ...] = ()


class _NotRun(UnsupportedError):
    """One device could not run the model."""


class _Comparison:
    def __init__(
        self, model: Foreign, layout: Layout, axis: str, batch: Any, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.layout, self.name = layout, type(model).__name__
        self.options = {} if splits_fields(layout) else {"axis": axis}
        self.length = 13 * layout.size(axis) * (2 if layout.order.get(axis) == "zigzag" else 1)
        self.model = copy.deepcopy(model).to(dtype).eval()
        for config in configurations(self.model):
            config._experts_implementation = "eager"  # grouped products know no fp64
            config.use_cache = False
        for owner in (*configurations(self.model), *self.model.modules()):
            for option in _WINDOWS:
                if isinstance(n := owner.__dict__.get(option), int) and n > self.length // 3:
                    setattr(owner, option, self.length // 3)
        given = [batch] if batch is not None else _random(self.model, self.length)
        self.calls = [{n: _cast(v, dtype) for n, v in call.items()} for call in given]

    def run(self, declared: Layout) -> Verified:
        """Compare one device with ranks, and once more by module where they differ."""
        alone = self._alone()
        on_ranks = self._on_ranks(False)
        outputs = _gaps(alone.outputs, on_ranks.outputs)
        gradients = _gaps(alone.gradients, on_ranks.gradients)
        (out, which), (off, weight) = max(outputs), max(gradients, default=(0.0, ""))
        limit = TOLERANCES[self.dtype]
        if not max(out, off) <= limit:
            again = _gaps(self._alone(True).modules, self._on_ranks(True).modules)
            first = next((name for gap, name in again if not gap <= limit), None)
            wrong = f"its output {which} by {out:.1e}" if not out <= limit else ""
            wrong = wrong or f"the gradient of {weight} by {off:.1e}"
            where = f"; {first!r} is the first module whose output differs" if first else ""
            raise UnsupportedError(
                f"{self.name} on {declared.name} is not the model: {wrong} differs{where}"
            )
        return Verified(self.name, declared.name, out, off, on_ranks.ran_whole)

    def _copy(self) -> Foreign:
        """Modules of their own around the same numbers."""
        weights = {p: nn.Parameter(p.detach(), p.requires_grad) for p in self.model.parameters()}
        return copy.deepcopy(self.model, {id(p): q for p, q in weights.items()})

    def _alone(self, by_module: bool = False) -> _Run:
        while True:
            model, call = self._copy(), self.calls[0]
            run_on_cpu(model)
            try:
                return _ran(model, call, by_module)
            except Exception as error:  # labels of another shape, which the next call has
                if len(self.calls) == 1:
                    raise _NotRun(
                        f"{self.name} could not be run on a random input, so nothing was compared;"
                        f" give a call, batch=: {type(error).__name__}: {error}"
                    ) from error
                del self.calls[0]

    def _on_ranks(self, by_module: bool) -> _Run:
        def rank(layout: Layout) -> _Run:
            model: Foreign = parallelize(self._copy(), layout, **self.options)
            run = _ran(model, self.calls[0], by_module, layout)
            if self.options and model._weft.calls.warned:
                kinds = ", ".join(model._weft.calls.warned)
                raise UnsupportedError(f"every rank computes all of a call of the model: {kinds}")
            run.ran_whole = (*model._weft.ran_whole.calls,)
            return run

        try:
            return on_threads(self.layout, rank)[-1]
        except WeftError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"{self.name} is not the model on {self.layout.name}: on ranks it fails:"
                f" {type(error).__name__}: {error}"
            ) from error


def _ran(model: Foreign, call: dict, by_module: bool, layout: Layout | None = None) -> _Run:
    """Call a model in fp64, and go backward from its loss and all outputs, each weighted."""
    modules: dict[str, Tensor] = {}

    def keep(name: str) -> Callable:
        def hook(module: Any, args: Any, output: Any) -> None:
            for where, t in _floating({name: output}):
                modules[f"{where}, call {sum(k.startswith(where) for k in modules)}"] = _plain(t)

        return hook

    for name, module in model.named_modules() if by_module else ():
        module.register_forward_hook(keep(name))
    mode = InFP64() if next(model.parameters()).dtype is torch.float64 else contextlib.nullcontext()
    with mode, torch.autograd.set_multithreading_enabled(False):
        outputs = dict(_floating({k: v for k, v in model(**call).items() if k not in CACHES}))
        generator = torch.Generator().manual_seed(1)
        objective: Any = 0.0
        for t in outputs.values():
            weight = torch.randn(t.shape, generator=generator, dtype=t.dtype)
            objective = objective + (t * weight.to(t.device)).sum() / max(t.numel(), 1) ** 0.5
        if objective.requires_grad:
            objective.backward()
    if layout is not None:
        layout.sync_gradients(model)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return _Run({n: _plain(t) for n, t in outputs.items()}, gradients, modules)


def _plain(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, Field) else t).detach().clone()


def _floating(values: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Every floating tensor in nested tuples, lists and mappings, by its place."""
    return [(name, t) for name, t in tensors_of(values) if t.is_floating_point()]


def _gaps(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> list[tuple[float, str]]:
    """Relative differences by name; of small numbers, relative to a thousandth of the largest.

    Names of one side alone, and other shapes, are infinitely far: but a module's local tensors.
    """
    least = 1e-3 * max((float(t.abs().max()) for t in want.values() if t.numel()), default=0.0)
    found = []
    for name, t in want.items():
        other = got.get(name)
        if other is None or other.shape != t.shape or not t.numel():
            found.append((0.0 if other is not None or not t.numel() else float("inf"), name))
            continue
        off = (other - t).abs().nan_to_num(float("inf")) * (other != t)
        found.append((float(off.max()) / max(float(t.abs().max()), least, 1e-30), name))
    return found


class InFP64(TorchFunctionMode):
    """Casts to fp32 within a model's code are casts to fp64: in norms, softmax and scans."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and args[0].dtype is not torch.float32:
            return args[0].double() if args[0].dtype is not torch.float64 else args[0].clone()
        if func in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _random(model: Foreign, length: int) -> list[dict[str, Any]]:
    """Calls of random rows, the first with labels as most models take them, the last without."""
    names, config = inspect.signature(model.forward).parameters, model.config.get_text_config()
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    vocabulary = int(getattr(config, "vocab_size", 0) or 2)

    def ids(n: int) -> Tensor:
        drawn = torch.randint(0, vocabulary, (1, n), generator=generator)
        special = getattr(config, "pad_token_id", None)
        if special is not None:
            drawn = drawn.where(drawn != special, (special + 1) % vocabulary)
        return drawn.to(device)

    stacks = bool(getattr(config, "is_encoder_decoder", False))
    if "input_ids" in names:
        call = {"input_ids": ids(length + 9 * stacks)}
    elif "pixel_values" in names:
        vision = getattr(model.config, "vision_config", model.config)
        size: Any = getattr(vision, "image_size", 224)
        shape = (
            1,
            getattr(vision, "num_channels", 3),
            *(size if type(size) in (list, tuple) else (size, size)),
        )
        call = {"pixel_values": torch.randn(shape, generator=generator).to(device)}
    else:
        raise UnsupportedError(f"{type(model).__name__} takes no input_ids: give a call, batch=")
    labels = ids(length)
    each = labels, labels % (getattr(model.config, "num_labels", 2) or 2), torch.zeros(1).long()
    calls = [call | {"labels": t.to(device)} for t in each] if "labels" in names else []
    call = call | ({"decoder_input_ids": labels} if stacks else {})
    return [*calls, call]


def _few_ranks(layout: Layout, states: bool) -> Layout:
    """The same layout with at most two ranks along every mesh dim.

    A state that passes through a rank needs a rank on both sides: of one mesh dim four.
    """
    moving = [d for d, n in layout.mesh.items() if n != 1]
    most = 4 if states and len(moving) == 1 else 2
    few = {d: most if n < 0 else min(n, most) for d, n in layout.mesh.items()}
    return layout if not few else _with_mesh(layout, few)


def _with_mesh(layout: Layout, mesh: dict[str, int]) -> Layout:
    return Layout.from_dict({**layout.declaration, "mesh": mesh}, layout.name, layout.source)


def _check_heads(model: Foreign, layout: Layout, axis: str) -> None:
    """Raise where the declared layout, not the small one, cannot split the model's heads."""
    for config in by_layer(model.config.get_text_config()):
        heads = getattr(config, "num_attention_heads", None)
        if isinstance(heads, int) and layout.mesh:
            keys = getattr(config, "num_key_value_heads", None) or heads
            mesh = {d: max(1, n) for d, n in layout.mesh.items()}
            head_shares(_with_mesh(layout, mesh).rules(axis), mesh, heads, keys)


__all__ = ["InFP64", "Verified", "verify"]
