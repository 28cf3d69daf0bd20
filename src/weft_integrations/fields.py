"""Models whose layers see windows, on fields by `weft.parallelize`: VAEs, UNets, Swin, weather.

Every rank calls the model with whole tensors and gets whole tensors. In between, tensors with axes
that the layout splits are fields (`weft.Field`), on which the model runs unmodified.

    layout "height: gather=2; width: gather=2"      rank 0: x[..., :13, :11]     and so on
    vae.decode(z).sample                            convolutions exchange what is around these boxes
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft._torch import active_ddp, fsdp_groups, in_transform, is_fsdp, outside_graphs
from weft.comm.once_differentiable import transformed
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.move.collectives import invariant_to_replicate, scale_backward
from weft.plan.held import Held
from weft_axes.fields import Field, WholeReport, cut, distributed
from weft_axes.fields.exchange import is_made_whole
from weft_axes.fields.islands import PROOF, on_positions, on_rows, proven_islands
from weft_axes.gradients.sync import AVERAGED, is_averaged, is_summed_by_ddp

from . import Foreign, consistency
from .common import OF_RANKS, Parallelized, check_modules, check_not_placed, in_outputs, tensors_in
from .units import let_fields_through

#: The axes of images and fields, and the dims that they have in tensors of four dims or more.
AXES = {"time": -3, "height": -2, "width": -1}
#: Ways to call a model.
OF_TABLES = "predict_stats", "forward_with_cache", "predict_stats_with_cache"
METHODS = "forward", "encode", "decode", *OF_TABLES
_BACKWARD = "a backward pass through the outputs of a parallelized model"


def splits_fields(layout: Layout) -> bool:
    """True if a layout splits an axis of images or fields."""
    return any(axis in layout.sharding for axis in AXES)


def parallelize_fields(
    model: nn.Module,
    layout: Layout,
    *,
    dims: Mapping[str, int] | None = None,
    inputs: tuple[str, ...] | None = None,
    output: Literal["whole", "field"] = "whole",
    fallback: Literal["whole", "refuse"] = "whole",
) -> nn.Module:
    """Split the axes of a model's images or fields over a layout; returns the model.

    It is called as before, by `forward`, `encode` or `decode`, with whole tensors on every rank,
    and returns whole tensors. After `backward`, which every rank calls on the same loss, call
    `layout.sync_gradients(model)`: the gradients are those of one process. Gradients of inputs are
    whole on every rank, so that what comes before and after the model is as in one process.

    A function of torch without a rule for what is split runs whole on every rank, exactly, and
    is named in a warning, once; what is too large is refused.

    Ranks compare shapes, numbers and the model's weights: inputs in every call, all weights in
    the first, in every 64th, and where the model was put into train or eval mode.

    Every rank draws the random numbers of the whole, dropout's too, as one device does: give ranks
    one seed. Where a model drew some and generators differed, the call is refused.

    Args:
        model: any module of torch's layers, such as a VAE, UNet or ControlNet of diffusers, or an
            image model of transformers.
        layout: a bound layout that splits `height`, `width` or `time`, or the axes of `dims`.
        dims: axis -> dim of the tensors that are split; default the last ones of tensors of four
            dims or more: time -3, height -2, width -1. A video has five dims.
        inputs: the arguments that are split; default floating-point tensors of four dims or more,
            with `dims` all tensors that have these dims, such as ids of tokens.
        output: "field" leaves outputs split, as `weft.Field`.
        fallback: "refuse" refuses functions without a rule, by name, on every rank.

    Raises:
        DeclarationError: a layout that is not bound; a model that is parallelized already; an
            axis that the layout splits, and `dims` does not have.
        UnsupportedError: in calls: tiling or slicing of a VAE, which cut along split axes;
            arguments of which nothing is split; with `fallback="refuse"` a function of torch
            without a rule; torch's DDP around the model; random numbers on threads.
        ShapeError: on every rank, if ranks call with other shapes, numbers, weights or options; in
            backward, if they make another loss of the outputs.

    >>> import copy
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.GroupNorm(2, 4))
    >>> layout = Layout.parse("height: gather=2; width: gather=2")
    >>> def shape(layout):
    ...     split = parallelize_fields(copy.deepcopy(model), layout)
    ...     return split(torch.ones(1, 3, 13, 9)).shape
    >>> weft.on_threads(layout, shape)[0]
    torch.Size([1, 4, 13, 9])
    """
    if output not in ("whole", "field"):
        raise DeclarationError(f"output={output!r}: write 'whole' or 'field'")
    check_not_placed(model)
    _ = layout.bound
    placed = dict(AXES if dims is None else dims)
    split = [axis for axis in layout.sharding if layout.size(axis) > 1]
    if missing := [a for a in split if a not in placed and a not in ("batch", "heads")]:
        raise DeclarationError(
            f"{layout.source}: axis {missing[0]!r} is split; dims= says which dim of the tensors it"
            f" is, such as dims={{{missing[0]!r}: 2}}"
        )
    state = _Calls(model, layout, placed, dims is not None, inputs, output == "field")
    return state.put_on(model, fallback)


def fields_within(
    model: nn.Module,
    layout: Layout,
    axis: str,
    entries: Mapping[nn.Module, Callable[[int, str, Any], int | None]],
    fallback: str = "whole",
    check: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Split an axis of a model from some of its modules on; returns the model.

    Whole tensors that these get, at a place by a name, are split along the dim that `entries` says,
    if any; results do not depend on it. Every call runs `check`, which may refuse it.
    """
    check_not_placed(model)
    state = _Calls(model, layout, {axis: 0}, True, (), False)
    state.enters_within, state.check = True, check
    undo = []
    for module, dim_of in entries.items():
        names = [*inspect.signature(module.forward).parameters]
        hook = functools.partial(state.enter, dim_of, names)
        undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
    return state.put_on(model, fallback, undo)


def is_experts(module: nn.Module) -> bool:
    """True of routed experts of transformers, which take tokens and the experts of each."""
    return hasattr(module, "_is_expert_parallel") and "forward" not in vars(module)


def by_positions(self: Foreign, *args: Any, **kwargs: Any) -> Any:
    """`forward` of experts, which treat tokens one by one, on this rank's."""
    name, stock = type(self).__name__, functools.partial(type(self).forward, self)
    return on_positions(f"{name}.forward", stock, args, kwargs)


class _Calls:
    """The calls of a model: whole tensors become fields, and outputs whole tensors again."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        dims: dict[str, int],
        named: bool,
        inputs: tuple[str, ...] | None,
        keeps_fields: bool,
    ) -> None:
        self.model, self.layout, self.dims, self.named = model, layout, dims, named
        self.inputs, self.keeps_fields, self.inside = inputs, keeps_fields, False
        self.axis = next(iter(dims))
        self.mesh_dims = tuple(d for axis in dims for d in layout.shard_dims(axis))
        self.ranks = math.prod(layout.mesh[d] for d in self.mesh_dims)
        self.report: WholeReport | None = None
        self.enters_within = False
        self.all_weights = consistency.AllWeights(buffers=True)
        self.gradients = consistency.Entered(self._compare_gradients, lambda: self.inside)
        self.check: Callable[[], None] = lambda: None

    def put_on(
        self, model: nn.Module, fallback: str, undo: Iterable[Callable[[], object]] = ()
    ) -> nn.Module:
        """Have the model run on fields; returns it."""
        if fallback not in ("whole", "refuse"):
            raise DeclarationError(f"fallback={fallback!r}: write 'whole' or 'refuse'")
        self.report = WholeReport() if fallback == "whole" else None
        placed = Parallelized([*undo], self.report, self.layout.rank > 0)
        promised = ((m, by_positions) for m in filter(is_experts, model.modules()))
        for module, forward in (*promised, *((m, on_rows) for m in proven_islands(model))):
            vars(module)["forward"] = types.MethodType(forward, module)
            for name in ("forward", PROOF):
                placed.steps.append(functools.partial(vars(module).pop, name, None))
        placed.leave_graphs(model)
        for name in METHODS:
            if callable(getattr(model, name, None)):
                self.wrap(name, placed)
        placed.put_on(model)
        setattr(model, AVERAGED, False)
        placed.steps.append(lambda: delattr(model, AVERAGED))
        return model

    def enter(
        self, dim_of: Callable, names: list[str], module: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        """Before a module: whole tensors that it gets become fields."""
        if not self.inside and consistency.backward_pass() < 0:  # no layer that is recomputed
            raise UnsupportedError(
                f"a {type(module).__name__} of a {type(self.model).__name__} is called by itself:"
                f" ranks compare calls of {', '.join(METHODS)} only; weft.restore(model) first"
            )

        def split(place: int, name: str, x: Any) -> Any:
            dim = None if isinstance(x, Field) else dim_of(place, name, x)
            self.entered |= dim is not None or isinstance(x, Field)
            if dim is not None:
                x = cut(x, self.layout, {self.axis: dim}, self.report, beside=beside)
                beside.extend(f.chunks for f in x._dims[dim] if f.chunks is not None)
            return x

        beside: list[Held] = []
        places = {name: place for place, name in enumerate(names)}
        padded = (*names, *("" for _ in args))  # of *args
        given = tuple(split(i, name, x) for i, (name, x) in enumerate(zip(padded, args)))
        return given, {name: split(places.get(name, -1), name, x) for name, x in kwargs.items()}

    def wrap(self, name: str, placed: Parallelized) -> None:
        """Have a method of the model take and return whole tensors."""
        run = getattr(self.model, name)
        signature, held = inspect.signature(run), name in self.model.__dict__

        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return run(*args, **kwargs)
            self.inside = True
            try:
                return self.run(name, run, signature, args, kwargs)
            finally:
                self.inside = False

        self.model.__dict__[name] = call

        def take_back() -> None:
            if held:
                self.model.__dict__[name] = run
            else:
                self.model.__dict__.pop(name, None)

        placed.steps.append(take_back)

    @functools.partial(outside_graphs, reason=OF_RANKS)
    def run(
        self, name: str, run: Callable, signature: inspect.Signature, args: tuple, kwargs: dict
    ) -> Any:
        """One call, on all ranks alike."""
        bound, failure = signature.bind(*args, **kwargs), ""
        given = dict(bound.arguments)
        vars(self.model)["_weft"].leave_graphs(self.model)
        try:
            self._refuse_state()
            self._prepare_reduction()
            for key, value in bound.arguments.items():
                bound.arguments[key] = self._split(key, value)
            self._refuse_unsplit(name, bound.arguments)
        except (UnsupportedError, ShapeError) as error:
            failure = f"refused: {error}"
        compared = consistency.of_call(self.model, given, self.all_weights, _is_made)
        label, dims = f"a call of {type(self.model).__name__}.{name}", self.mesh_dims
        described = failure or f"{compared.mode}; {compared.described}"
        self.layout.bound.agree(label, described, dims)
        if failure:
            raise UnsupportedError(failure.removeprefix("refused: "))
        before = generators()
        self.entered = not self.enters_within or self.ranks == 1
        result = run(*bound.args, **bound.kwargs)
        if not self.entered:
            raise UnsupportedError(
                f"{type(self.model).__name__}.{name}: none of its blocks got tokens that could be"
                " split, so that every rank computed all of it"
            )
        result = in_outputs(result, self._handed_out)
        drawn = "" if before == generators() else f"generators {before}"
        what, state = f"weights, arguments or random generators of {label}", compared.arrive()
        consistency.agree(self.layout.bound, dims, what, f"{state.text} {drawn}", state)
        self.all_weights.count(self.model)
        return result

    def _handed_out(self, x: Tensor) -> Tensor:
        """An output: whole, for a loss that all ranks compute, unless fields are asked for.

        Of plain tensors, such as penalties of weights, every rank has the whole gradient: its share
        is one of as many as there are ranks.
        """
        if not isinstance(x, Field):
            if self.keeps_fields or self.ranks == 1:
                return x
            if x.requires_grad and torch.is_grad_enabled() and not is_made_whole(x):
                x = scale_backward(x, 1 / self.ranks)
        elif self.ranks == 1:
            return x if self.keeps_fields else x.full_tensor()
        return self.gradients.hand_out(x, self.keeps_fields)

    def _compare_gradients(self, arrive: Callable[[], consistency.GroupState]) -> None:
        """At the end of a backward pass, before an optimizer uses its gradients."""
        state = arrive()
        consistency.agree(self.layout.bound, self.mesh_dims, _BACKWARD, state.text, state)

    def _refuse_unsplit(self, name: str, arguments: Mapping[str, Any]) -> None:
        split = any(self.layout.size(axis) > 1 for axis in self.dims) and not self.enters_within
        fields = [t for t in tensors_in(arguments) if isinstance(t, Field)]
        # Of one position every rank computes all: it is whole.
        alone = self.named and any(1 in [*map(f.size, self.dims.values())] for f in fields)
        if split and not alone and not any(f._place.is_split for f in fields):
            raise UnsupportedError(
                f"{type(self.model).__name__}.{name} gets no tensor that is split, so that every"
                f" rank would compute all of it: name those that are by inputs=, of"
                f" {sorted(arguments)}, or say which dims they have by dims="
            )

    def _split(self, name: str, value: Any) -> Any:
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._split(name, v) for v in value)
        if isinstance(value, Field) and value._region.averaged:
            value = value.full_tensor()  # of a transformers model: its gradients have another sum
        if not isinstance(value, Tensor) or isinstance(value, Field):
            return value
        least = max((-d if d < 0 else d + 1) for d in self.dims.values()) if self.named else 4
        chosen = value.dim() >= least and (self.named or value.is_floating_point())
        if self.inputs is not None:
            chosen = name in self.inputs
        if not chosen:  # whole on every rank, each of which makes its part of the model's positions
            return invariant_to_replicate(value, self.mesh_dims, self.layout.bound)
        at = {a: d for a, d in self.dims.items() if self.named or -d <= value.dim() - 2}
        return distributed(value, self.layout, at, self.report)

    def _prepare_reduction(self) -> None:
        """Have FSDP2's units pass fields on, and add up what the ranks of fields have.

        Over other ranks FSDP2 averages, as it does without fields.
        """
        bound = self.layout.bound
        mine = {bound.world_ranks[r] for r in bound.ranks_along(self.mesh_dims)}
        averages = not is_averaged(self.model)
        for unit in filter(is_fsdp, self.model.modules()):
            let_fields_through(unit)
            for ranks, factor in fsdp_groups(unit):
                if not mine <= {*ranks}:
                    raise self._other_sum("fully_shard over ranks without some")
                if averages and factor is None:
                    unit.set_gradient_divide_factor(len(ranks) / len(mine))
                    unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if averages and active_ddp() is not None and not is_summed_by_ddp(self.model):
            raise self._other_sum("DistributedDataParallel over those")

    def _other_sum(self, way: str) -> UnsupportedError:
        return UnsupportedError(
            f"{way} of mesh dims {self.mesh_dims}, each of which has a share of the gradients,"
            " would make other ones than their sum: give weft.data_parallel(model, layout, 'ddp'"
            " or 'fsdp') the model, or call layout.sync_gradients(model) after backward"
        )

    def _refuse_state(self) -> None:
        self.check()
        if in_transform():
            raise transformed(type(self.model).__name__)
        check_modules(self.model, self.layout, *self.dims)
        for flag in ("use_tiling", "use_slicing"):
            if getattr(self.model, flag, False):
                raise UnsupportedError(
                    f"{type(self.model).__name__} with {flag}: tiles and slices are cut along axes"
                    f" that the layout splits; vae.disable_{flag.removeprefix('use_')}()"
                )


def _is_made(t: Tensor) -> bool:
    """True of what layers before made, which may differ between ranks by rounding."""
    return t.grad_fn is not None and t.is_floating_point()


def generators() -> str:
    """The state of torch's generators on this rank, as a short text."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    digests = (hashlib.blake2b(state.numpy().tobytes(), digest_size=8) for state in states)
    return " ".join(digest.hexdigest() for digest in digests)


__all__ = ["fields_within", "generators", "parallelize_fields"]
