"""`weft.attention`: exact attention of tensors that are sharded over a mesh by a layout.

Shapes, here and everywhere below: b batch, h query heads, g key/value heads, n queries, m keys,
d head dim, e value dim. Queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e),
logsumexp (b h n).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._compile import flattened, restored
from ._digest import is_plain
from ._torch import (
    constant_in_graphs,
    in_forward_mode,
    in_graph,
    in_transform,
    outside_graphs,
    with_tangent,
)
from .bias import Bias
from .choice import ChoiceKind, ChosenKeys
from .comm.channel import refused_everywhere
from .comm.once_differentiable import transformed
from .dtensors import attend_dtensors, check_dtensors
from .errors import DeclarationError, ShapeError, UnsupportedError, WeftError
from .fetching.attend import attend_fetched
from .layout import Layout
from .masks import FULL, Mask, check_mask
from .plan.call import Call, Expanded, axis_names, reach
from .plan.lengths import Length, read_length
from .plan.order import Spans, positions
from .plan.plan import score_tile
from .plan.problem import shard_batches
from .runtime import calls
from .runtime.autocast import as_autocast
from .runtime.calls import BoundCall
from .runtime.expand import Expand, Expander, Expansion, Tried, as_expansion
from .runtime.ops import attend_eagerly


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    axis: str | Sequence[str],
    mask: Mask | None = None,
    scale: float | None = None,
    length: Length | None = None,
    return_lse: Literal[False] = False,
    *,
    bias: Bias | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    expand: Expand | None = None,
    kernel: str | None = None,
    name: str | None = None,
    choice: ChosenKeys | None = None,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    axis: str | Sequence[str],
    mask: Mask | None = None,
    scale: float | None = None,
    length: Length | None = None,
    *,
    return_lse: Literal[True],
    bias: Bias | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    expand: Expand | None = None,
    kernel: str | None = None,
    name: str | None = None,
    choice: ChosenKeys | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    axis: str | Sequence[str],
    mask: Mask | None = None,
    scale: float | None = None,
    length: Length | None = None,
    return_lse: bool = False,
    *,
    bias: Bias | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    expand: Expand | None = None,
    kernel: str | None = None,
    name: str | None = None,
    choice: ChosenKeys | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    axis: str | Sequence[str],
    mask: Mask | None = None,
    scale: float | None = None,
    length: Length | None = None,
    return_lse: bool = False,
    *,
    bias: Bias | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    expand: Expand | None = None,
    kernel: str | None = None,
    name: str | None = None,
    choice: ChosenKeys | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T + mask) v over the whole axis, on any layout of its tokens.

    The batch holds everything that is not attended. There is no dropout of probabilities: kernels
    draw its random mask per tile, so the same seed would give another result on every layout.

    Args:
        q: queries, (b, h, n, d): a local tensor, or a DTensor as all three then are, as the layout
            says they rest. On an axis in zigzag or striped order make it by `layout.distribute`:
            torch's `distribute_tensor` hands out contiguous chunks, and a DTensor does not say.
        k: keys, (b, g, m, d), with h a multiple of g.
        v: values, (b, g, m, e).
        layout: a bound layout: from `layout.build()`, `layout.bind(mesh)` or `Layout.single()`.
        axis: the attended axis, or several attended jointly (flattened, the first one major).
        mask: which query sees which key; default all.
        scale: of the logits, default d ** -0.5.
        length: global length of the axis, where the ranks' chunks are not equal: an int, a pair
            (queries, keys), or a dict of these per axis. DTensors carry it.
        return_lse: whether to return the logsumexp, too.
        bias: added to the scaled logits, after `softcap`: a `weft.Bias` of positions, or a learned
            tensor of the scores that this rank computes, (b or 1, h or 1, rows, columns); see
            `weft.bias_tile`.
        softcap: scaled logits become softcap * tanh(logits / softcap).
        sinks: (h,) logits of a key that every query sees and whose value is 0 (local heads).
        expand: with latents in the place of k and v, the keys and values as a function of them, so
            that latents may travel: a `weft.Expansion`, or what makes one. Not with DTensors.
        choice: a `weft.ChosenKeys`, the keys that each query of this rank may see besides the mask:
            chosen by the model as it runs. It moves where queries move, as numbers.
        kernel: one of the kernels by name, for all tiles; `weft list --support` shows what each
            takes.
        name: which call of the program this is. By default it is told by the module within others
            that makes it, and ranks that make another's are refused; a name tells calls of one
            shape apart outside modules, and is for one call that ranks make in several.

    Returns:
        The output, (b, h, n, e), placed like q; with `return_lse` also the logsumexp of every row,
        (b, h, n). A row that sees no key gives 0 and -inf. Differentiable, also through the
        logsumexp.

    Raises:
        ShapeError: shapes, dtypes, placements or masks do not fit or differ between ranks. It is
            raised on every rank that takes part, before a result is handed out.
        UnsupportedError: no kernel computes this exactly; raised on every rank that takes part.
        DeclarationError: the layout is not bound, or cannot attend this axis.
        RankError: another rank failed, or did not answer within the layout's timeout.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
    >>> attention(q, k, v, Layout.single(), "tokens").shape
    torch.Size([1, 2, 5, 4])
    """
    axes = (axis,) if isinstance(axis, str) else _checked_axes(axis, layout, mask, bias)
    if isinstance(q, DTensor):
        options: dict[str, Any] = {"layout": layout, "axis": axes, "mask": mask, "scale": scale}
        options |= {"length": length, "bias": bias, "softcap": softcap, "sinks": sinks}
        options |= {"kernel": kernel, "name": name, "choice": choice}
        if expand is not None:
            raise UnsupportedError("expand: latents are local tensors, found DTensors")
        _check_placed(q, k, v, options)
        return attend_dtensors(attention, q, k, v, return_lse, options)
    if in_transform():
        _check_layout(layout)
        with refused_everywhere(functools.partial(_refuse, layout, axes, mask, bias)):
            raise transformed("weft.attention")
    if expand is not None and in_graph(q):
        k, v = as_expansion(expand)(k, v)  # a graph has one kind of call
        expand = None
    learned = bias if isinstance(bias, Tensor) else None
    function = None if isinstance(bias, Tensor) else bias
    want_lse, is_learned = return_lse or sinks is not None, learned is not None
    numbers = choice.numbers if isinstance(choice, ChosenKeys) else None
    if isinstance(choice, ChosenKeys) and _fetches(layout, axes):
        asked = (want_lse, kernel, name, function, is_learned, choice, scale, softcap)
        bind = functools.partial(_bound, layout, axes, mask, length, *asked)
        out, lse = _fetched(bind, q, k, v, sinks, choice, expand)
    elif in_graph(q):
        q, k, v = as_autocast(q, k, v)  # a cast may leave the gradient out
        handle = _traced(
            flattened(layout),
            flattened(mask),
            flattened(function),
            axes,
            _specialised(length),
            want_lse,
            kernel,
            name,
            is_learned,
            _plain_kind(choice),
            calls.gradients_wanted(q, k, v, learned),
        )
        op = torch.ops.weft.attention
        out, lse = op(q, k, v, learned, numbers, scale, softcap, handle)[:2]
    else:
        extra = (want_lse, kernel, name, function, is_learned, choice, scale, softcap)
        bound = _bound(layout, axes, mask, length, *extra, (q, k, v, sinks))
        q, k, v = as_autocast(q, k, v)
        expander = None
        if expand is not None:
            expansion = as_expansion(expand)
            tried = _latents(bound, expansion, q, k, v)
            if tried is None:
                k, v = expansion(k, v)
            else:
                bound = _bound(layout, axes, mask, length, *extra, (), tried.sizes)
                expander = Expander(expansion, tried.parameters, q)
        out, lse = attend_eagerly(bound, q, k, v, learned, numbers, expander)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _bound(
    layout: Layout,
    axes: tuple[str, ...],
    mask: Mask | None,
    length: Length | None,
    want_lse: bool,
    kernel: str | None,
    name: str | None,
    bias: Bias | None,
    learned: bool,
    choice: ChosenKeys | ChoiceKind | None,
    scale: float | None,
    softcap: float | None,
    tensors: tuple,
    expanded: Expanded | None = None,
) -> BoundCall:
    """The call, checked as far as it can be without its tensors' shapes."""
    key: tuple = (axes, mask, scale, length, want_lse, softcap, kernel, name)
    _check_layout(layout)
    plain = (
        bias is None
        and not learned
        and choice is None
        and layout.__class__ is Layout
        and _is_value(mask, scale, length, softcap, kernel, name)
    )
    if expanded is not None:
        key = (*key, expanded)
    bound = BoundCall.kept(layout, key) if plain else None
    if bound is not None and (not tensors or _are_usual(*tensors)):
        return bound
    with refused_everywhere(functools.partial(_refuse, layout, axes, mask, bias)):
        if bound is None:
            call = Call(
                axes,
                FULL if mask is None else _checked_mask(mask),
                None if scale is None else _number("scale", scale),
                read_length(axes, length),
                want_lse,
                None if softcap is None else _number("softcap", softcap),
                kernel,
                _checked_bias(bias),
                learned,
                name=name,
                choice=_checked_kind(choice),
                expanded=expanded,
            )
            bound = BoundCall.keep(layout, key, call) if plain else BoundCall(layout, call)
        if tensors:
            _check_kinds(*tensors)
    return bound


@functools.partial(outside_graphs, reason="ranks fetch what they chose")
def _fetched(
    bind: Callable[..., BoundCall],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    choice: ChosenKeys,
    expand: Expand | None,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp where of the keys only those travel that queries of a rank chose."""
    bound = bind((q, k, v, sinks))
    q, k, v = as_autocast(q, k, v)
    expansion = None if expand is None else as_expansion(expand)
    if expansion is not None and expansion.travel == "keys":
        k, v, expansion = *expansion(k, v), None
    if expansion is not None:
        with refused_everywhere(bound.refuse):
            sizes = expansion.tried(k, v).sizes
        bound = bind((), sizes)
    return attend_fetched(bound, q, k, v, choice, expansion)


@constant_in_graphs
def _fetches(layout: Layout, axes: tuple[str, ...]) -> bool:
    """True if of the keys only those travel that the model chooses."""
    if not isinstance(layout, Layout):
        return False
    try:
        found = reach(layout.unbound, axes)
    except WeftError:  # is raised again, on all ranks, where the call is bound
        return False
    return bool(found.routed) and not found.by_router


def _latents(
    bound: BoundCall, expansion: Expansion, q: Tensor, k: Tensor, v: Tensor
) -> Tried | None:
    """The sizes and parameters of an expansion whose latents travel; None: keys and values do."""
    if not bound.mesh_dims or expansion.travel == "keys":
        return None
    with refused_everywhere(bound.refuse):
        tried = expansion.tried(k, v)
        call = replace(bound.call, expanded=tried.sizes)
        travel = BoundCall(bound.layout, call).travel(q, k, v)
        if expansion.travel == "latents" and travel.why:
            raise UnsupportedError(
                f"travel='latents': {travel.why}; travel='auto' lets keys travel there"
            )
    return tried if expansion.travel == "latents" or travel.latents else None


def _check_placed(q: DTensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> None:
    """Raise if DTensors are not placed as the layout says."""
    layout, axes, mask, bias = (options[name] for name in ("layout", "axis", "mask", "bias"))
    _check_layout(layout)
    tell = functools.partial(_refuse, layout, axes, mask, bias)
    with contextlib.nullcontext() if in_graph(q) else refused_everywhere(tell):
        check_dtensors(q, k, v, layout, axes, options["length"])


def _check_layout(layout: object) -> None:
    if not isinstance(layout, Layout):
        raise DeclarationError(
            f"layout is a bound weft.Layout, found a {type(layout).__name__}; for one device pass"
            " weft.Layout.single()"
        )


def _is_value(
    mask: Mask | None,
    scale: float | None,
    length: Length | None,
    softcap: float | None,
    kernel: str | None,
    name: str | None,
) -> bool:
    """True if the options are usable as a cache key (exact types: `True` is not `1`)."""
    return (
        (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (length is None or type(length) is int or _is_pair(length))
        and (kernel is None or type(kernel) is str)
        and (name is None or type(name) is str)
        and (mask is None or is_plain(mask))
    )


def _is_pair(length: Length) -> bool:
    return type(length) is tuple and all(n is None or type(n) is int for n in length)


def _refuse(
    layout: Layout,
    axes: tuple[str, ...],
    mask: Mask | None,
    bias: Bias | Tensor | None,
    error: WeftError,
) -> None:
    """Abort the call on all participating ranks; of unknown axes, on those of any axis."""
    if not layout.is_bound:
        return
    asked: dict[str, Any] = {"bias": bias if isinstance(bias, Bias) else None}
    with contextlib.suppress(WeftError):
        asked["mask"] = _checked_mask(FULL if mask is None else mask)
    for attended in (axes, *(tuple(key.split("+")) for key in layout.attend)):
        with contextlib.suppress(WeftError):
            return BoundCall(layout, Call(attended, **asked)).refuse(error)


@constant_in_graphs
def _traced(
    layout: tuple,
    mask: tuple,
    bias: tuple,
    axes: tuple[str, ...],
    length: Length | None,
    want_lse: bool,
    kernel: str | None,
    name: str | None,
    learned: bool,
    choice: tuple[int, int, int, bool] | None,
    gradients: str,
) -> str:
    """A handle that a graph may keep."""
    options = restored(layout), axes, restored(mask), length, want_lse, kernel, name
    kind = None if choice is None else ChoiceKind(*choice)
    bound = _bound(*options, restored(bias), learned, kind, None, None, ())
    return calls.handle_of(bound, gradients)


def _specialised(length: Length | None) -> Length | None:
    """A length as plain numbers, on which a graph is specialised."""
    if isinstance(length, Mapping):
        return {axis: _plain(n) for axis, n in length.items()}
    return None if length is None else _plain(length)


def _plain(length: int | tuple[int, int]) -> int | tuple[int, int]:
    if isinstance(length, tuple | list):
        n, m = length
        return operator.index(n), operator.index(m)
    return operator.index(length)


def _checked_mask(mask: Mask) -> Mask:
    check_mask(mask)
    return mask


def _checked_bias(bias: Bias | None) -> Bias | None:
    if bias is not None and not isinstance(bias, Bias):
        raise ShapeError(f"bias is a weft.Bias or a tensor, found a {type(bias).__name__}")
    return bias


def _checked_kind(choice: ChosenKeys | ChoiceKind | None) -> ChoiceKind | None:
    if choice is None or isinstance(choice, ChoiceKind):
        return choice
    if not isinstance(choice, ChosenKeys):
        raise ShapeError(
            f"choice is a weft.ChosenKeys for this call, found a {type(choice).__name__}"
        )
    return choice.kind


def _plain_kind(choice: ChosenKeys | None) -> tuple[int, int, int, bool] | None:
    """The kind of a choice as plain numbers, on which a graph is specialised."""
    if choice is None:
        return None
    rows, count = (operator.index(size) for size in choice.numbers.shape[1::2])
    return rows, count, choice.block, choice.check


def _checked_axes(
    axis: Sequence[str], layout: Layout, mask: Mask | None, bias: Bias | Tensor | None
) -> tuple[str, ...]:
    """The names of several axes."""
    _check_layout(layout)
    attended = next((tuple(key.split("+")) for key in layout.attend), ("",))
    with refused_everywhere(functools.partial(_refuse, layout, attended, mask, bias)):
        return axis_names(axis)


def _number(label: str, value: float) -> float:
    if isinstance(value, Tensor) and value.requires_grad:
        raise UnsupportedError(
            f"{label} is a number of the call and gets no gradient, found a tensor that requires"
            " one; for a learned scale multiply q by it, or pass a number"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if isinstance(value, str | bool) or not math.isfinite(number):
        raise ShapeError(f"{label} is a finite number, found {value!r:.80}")
    return number


def _are_usual(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    """True for tensors of which `_check_kinds` has nothing to say, quickly: every call is here."""
    return type(q) is type(k) is type(v) is Tensor and sinks is None and not in_forward_mode()


def _check_kinds(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise ShapeError(f"{name} is a tensor, found a {type(t).__name__}")
        if isinstance(t, DTensor):
            raise ShapeError(f"{name} is a DTensor and q is not: pass all three as one kind")
    if carrier := with_tangent(q=q, k=k, v=v):
        raise UnsupportedError(
            f"{carrier} carries a forward-mode tangent, which weft.attention does not compute; use "
            "reverse-mode gradients"
        )
    if sinks is not None:
        _check_sinks(sinks, q)


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    if not isinstance(sinks, Tensor):
        raise ShapeError(f"sinks is a tensor of one number per head, found {sinks!r:.80}")
    if sinks.shape != q.shape[1:2]:
        raise ShapeError(
            f"sinks must be ({q.shape[1]},), one per local head, found {tuple(sinks.shape)}"
        )
    if not sinks.is_floating_point() or sinks.layout != torch.strided or sinks.device != q.device:
        raise ShapeError(
            f"sinks are dense numbers of a floating dtype on {q.device}, found {sinks.dtype},"
            f" {sinks.layout}, on {sinks.device}"
        )


def bias_tile(
    bias: Tensor,
    layout: Layout,
    axis: str | Sequence[str],
    length: Length | None = None,
) -> Tensor:
    """This rank's tile of a whole bias (B or 1, H or 1, N, M): what `attention(bias=...)` takes.

    Rows are the queries and columns the keys whose scores the rank computes, in its own order;
    batch and heads are those it computes with.

    Args:
        bias: the whole bias, the same on every rank.
        layout: a bound layout.
        axis: the attended axis, or several attended jointly.
        length: global length of the axis, as in `attention`; default the bias's own.

    Returns:
        The tile. Differentiable: each rank's gradient is what its own scores contribute, so that
        of a bias which ranks share is the sum of theirs (`layout.sync_gradients`, and
        `layout.enter(bias, "heads")` over head-parallel mesh dims). Where a mesh dim splits keys
        and has queries whole (`kv_parallel`), `sync_gradients` sums nothing and refuses the ranks'
        parts: sum them over that mesh dim yourself before.

    >>> bias_tile(torch.zeros(1, 2, 5, 5), Layout.single(), "tokens").shape
    torch.Size([1, 2, 5, 5])
    """
    axes = axis_names(axis)
    batches = shard_batches(layout, axes, bias.shape[0]) if bias.shape[0] > 1 else ()
    return tile_of_bias(bias, layout, axes, length, batches)


def tile_of_bias(
    bias: Tensor,
    layout: Layout,
    axes: tuple[str, ...],
    length: Length | None,
    batches: tuple[int, ...],
) -> Tensor:
    """`bias_tile` of a bias per sequence; `batches` is the local batch of every rank."""
    if length is None:
        length = bias.shape[2], bias.shape[3]
    for dim, spans in _tile(bias, layout, axes, length, batches):
        if dim > 1 or bias.shape[dim] > 1:
            bias = bias.index_select(dim, positions(spans, bias.device))
    return bias


def _tile(
    bias: Tensor,
    layout: Layout,
    axes: tuple[str, ...],
    length: Length,
    batches: tuple[int, ...] = (),
) -> tuple[tuple[int, Spans], ...]:
    """The dims of a bias (b, h, ...), each with the positions of this rank's scores."""
    heads = (bias.shape[1] if bias.shape[1] > 1 else layout.world_size) // layout.size("heads")
    kind = bias.dtype, bias.device.type
    return _tile_of(flattened(layout), axes, read_length(axes, length) or (), heads, batches, *kind)


@constant_in_graphs
def _tile_of(
    layout: tuple,
    axes: tuple[str, ...],
    lengths: tuple[tuple[int, int], ...],
    heads: int,
    batches: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
) -> tuple[tuple[int, Spans], ...]:
    """The dims of a bias, each with the positions of the scores that this rank computes."""
    bound = restored(layout)
    tile = score_tile(bound.unbound, axes, lengths, bound.coords, heads, batches, dtype, device)
    return (2, tile.rows), (3, tile.columns), (1, tile.heads), (0, tile.batch)


def tile_of_distances(table: Tensor, layout: Layout, axis: str) -> Tensor:
    """This rank's tile (1, h, rows, columns) of a bias of distances, without the whole bias.

    `table` (H or 1, 2 n - 1) has the bias of keys that are n - 1 before a query, ..., n - 1 behind
    it, for an axis of n tokens; gradients are as those of `bias_tile`.

    >>> tile_of_distances(torch.arange(5.0)[None], Layout.single(), "tokens")
    tensor([[[[2., 3., 4.],
              [1., 2., 3.],
              [0., 1., 2.]]]])
    """
    length = (table.shape[1] + 1) // 2
    tile = dict(_tile(table[None], layout, (axis,), length))
    heads, rows, columns = (positions(tile[dim], table.device) for dim in (1, 2, 3))
    if table.shape[0] > 1:
        table = table.index_select(0, heads)
    distances = columns[None, :] - rows[:, None] + (length - 1)
    return table.index_select(1, distances.flatten()).view(1, -1, *distances.shape)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more key per head, of logit `sinks` and value 0: out * exp(lse - logaddexp(lse, s))."""
    logit = sinks.to(lse.dtype)[None, :, None]
    none = logit.isneginf()  # a head without a sink; a row of it may see nothing either
    logit = logit.masked_fill(none, 0.0)
    share = torch.where(none, 1.0, torch.sigmoid(lse - logit)).unsqueeze(-1)
    total = torch.where(none, lse, torch.logaddexp(lse, logit))
    return (out.to(lse.dtype) * share).to(out.dtype), total
