"""`weft.attention`: exact attention of tensors that are sharded over a mesh by a layout.

Shapes, here and everywhere below: b batch, h query heads, g key/value heads, n queries, m keys,
d head dim, e value dim. Queries (b h n d), keys (b g m d), values (b g m e), outputs (b h n e),
logsumexp (b h n).

    options -> Asked     DTensors      their local tensors, by one of these
                         graphs        the op weft::attention, by a handle of the call
                         chosen keys   fetched from their owners, each once
                         eager         one kernel call, or the executor's tile program
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ._compile import flattened, restored
from ._doors import opened
from ._torch import constant_in_graphs, in_graph, in_transform, outside_graphs
from .asked import Asked, check_given_layout
from .bias import Bias
from .choice import ChoiceKind, ChosenKeys
from .comm.channel import refused_everywhere
from .comm.once_differentiable import transformed
from .dtensors import attend_dtensors, check_dtensors
from .errors import UnsupportedError, WeftError
from .layout import Layout
from .masks import Mask
from .plan.call import reach
from .plan.lengths import Length
from .runtime import calls
from .runtime.autocast import as_autocast
from .runtime.calls import BoundCall
from .runtime.expand import Expand, Expander, Expansion, Tried, as_expansion
from .runtime.ops import attend_eagerly
from .sinks import with_sinks


class CallOptions(TypedDict, total=False):
    """The keyword options of `attention`, of which its docstring tells."""

    bias: Bias | Tensor | None
    softcap: float | None
    sinks: Tensor | None
    expand: Expand | None
    kernel: str | None
    name: str | None
    choice: ChosenKeys | None


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
    **options: Unpack[CallOptions],
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
    **options: Unpack[CallOptions],
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
    **options: Unpack[CallOptions],
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
        mask: which query sees which key; default all. A boolean tensor of all queries by all keys,
            or FlexAttention's BlockMask of the whole, is taken as it is.
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
    learned = function = None
    if isinstance(bias, Tensor):
        learned = bias
    else:
        function = bias
    asked = Asked(
        layout,
        function,
        learned is not None,
        choice,
        (axis,) if isinstance(axis, str) else (),
        mask,
        scale,
        length,
        return_lse or sinks is not None,
        softcap,
        kernel,
        name,
    )
    if not isinstance(axis, str):
        asked = asked.along(axis)
    if isinstance(q, DTensor):
        if expand is not None:
            raise UnsupportedError("expand: latents are local tensors, found DTensors")
        check_given_layout(layout)
        with contextlib.nullcontext() if in_graph(q) else refused_everywhere(asked.refuse):
            check_dtensors(q, k, v, layout, asked.axes, length)
        lengths = {asked.axes[0]: (q.shape[2], k.shape[2])}
        attend = functools.partial(_attend, asked._replace(length=lengths), learned, sinks, None)
        out, lse = attend_dtensors(attend, q, k, v, return_lse)
    else:
        out, lse = _attend(asked, learned, sinks, expand, q, k, v)
    return (out, lse) if return_lse else out


def _attend(
    asked: Asked,
    learned: Tensor | None,
    sinks: Tensor | None,
    expand: Expand | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of local tensors."""
    if in_transform():
        check_given_layout(asked.layout)
        with refused_everywhere(asked.refuse):
            raise transformed("weft.attention")
    choice, traced = asked.choice, in_graph(q)
    numbers = choice.numbers if isinstance(choice, ChosenKeys) else None
    if expand is not None and traced:
        k, v = as_expansion(expand)(k, v)  # a graph has one kind of call
        expand = None
    if isinstance(choice, ChosenKeys) and _fetches(asked.layout, asked.axes):
        out, lse = _fetched(asked, choice, sinks, expand, q, k, v)
    elif traced:
        out, lse = _in_graph(asked, learned, numbers, q, k, v)
    else:
        bound, expander = asked.bound(q, k, v, sinks), None
        q, k, v = as_autocast(q, k, v)
        if expand is not None:
            expansion = as_expansion(expand)
            tried = _latents(bound, expansion, q, k, v)
            if tried is None:
                k, v = expansion(k, v)
            else:
                bound = asked._replace(expanded=tried.sizes).bound()
                expander = Expander(expansion, tried.parameters, q)
        out, lse = attend_eagerly(bound, q, k, v, learned, numbers, expander)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def _in_graph(
    asked: Asked,
    learned: Tensor | None,
    numbers: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    q, k, v = as_autocast(q, k, v)  # a cast may leave the gradient out
    handle = _traced(
        flattened(asked.layout),
        flattened(asked.mask),
        flattened(asked.bias),
        asked.learned,
        asked.axes,
        _specialised(asked.length),
        asked.want_lse,
        asked.kernel,
        asked.name,
        _plain_kind(asked.choice),
        calls.gradients_wanted(q, k, v, learned),
    )
    op = torch.ops.weft.attention
    out, lse, *_ = op(q, k, v, learned, numbers, asked.scale, asked.softcap, handle)
    return out, lse


@constant_in_graphs
def _traced(
    layout: tuple,
    mask: tuple,
    bias: tuple,
    learned: bool,
    axes: tuple[str, ...],
    length: Length | None,
    want_lse: bool,
    kernel: str | None,
    name: str | None,
    choice: tuple[int, int, int, bool] | None,
    gradients: str,
) -> str:
    """A handle that a graph may keep; scale and soft cap are passed as it runs."""
    kind = None if choice is None else ChoiceKind(*choice)
    given = restored(layout), restored(bias), learned, kind, axes, restored(mask)
    bound = Asked(*given, None, length, want_lse, None, kernel, name).bound()
    return calls.handle_of(bound, gradients)


@functools.partial(outside_graphs, reason="ranks fetch what they chose")
def _fetched(
    asked: Asked,
    choice: ChosenKeys,
    sinks: Tensor | None,
    expand: Expand | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp where of the keys only those travel that queries of a rank chose."""
    bound = asked.bound(q, k, v, sinks)
    q, k, v = as_autocast(q, k, v)
    expansion = None if expand is None else as_expansion(expand)
    if expansion is not None and expansion.travel == "keys":
        k, v, expansion = *expansion(k, v), None
    if expansion is not None:
        with refused_everywhere(bound.refuse):
            sizes = expansion.tried(k, v).sizes
        bound = asked._replace(expanded=sizes).bound()
    out, lse = opened("attend_fetched")(bound, q, k, v, choice, expansion)
    return out, lse


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


def _plain_kind(choice: ChosenKeys | ChoiceKind | None) -> tuple[int, int, int, bool] | None:
    """The kind of a choice as plain numbers, on which a graph is specialised."""
    if not isinstance(choice, ChosenKeys):  # what is none is refused where the call is bound
        return None
    rows, count = (operator.index(size) for size in choice.numbers.shape[1::2])
    return rows, count, choice.block, choice.check
