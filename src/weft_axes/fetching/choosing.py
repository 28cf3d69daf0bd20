"""`weft.choose`: the keys that index queries choose, of all keys of an axis, on any layout.

score_ij = sum_h w_ih relu(q_ih . k_j)         the K keys of highest score for each query i

    rows    rank 0: k0      rank 1: k1           lists   rank 0: q0 k0     rank 1: q1 k1
            both:   [k0 | k1]                            both:   [q0 | q1] with their own keys
            own queries by all keys                      lists return to their owners, and merge

Rows of scores are whole, and `torch.topk` takes what it takes on one device, ties included. Lists
merge by highest score, then lowest position: one device's stable order, which is another choice
where scores are equal.

Shapes: index queries (b i n d), index keys (b g m d), weights (b i n), numbers (b 1 n K).
"""

from __future__ import annotations

import contextlib
import functools
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft._torch import outside_graphs
from weft.choice import ChosenKeys
from weft.comm.channel import refused_everywhere
from weft.comm.origin import origin
from weft.comm.transport import Messages
from weft.declare.placements import merge_top_k
from weft.errors import DeclarationError, ShapeError, UnsupportedError, WeftError
from weft.kernels import accumulate_dtype
from weft.layout import Layout
from weft.masks import FULL, Full, Mask, check_mask
from weft.move.gather import gather_slices, spread_flat
from weft.move.passing import Exchange
from weft.plan.call import Call
from weft.plan.choices import NUMBER
from weft.plan.lengths import Length, read_length
from weft.plan.order import count, positions
from weft.runtime.autocast import without_autocast
from weft_axes.fetching.lists import IndexSizes, ListPlan, list_plan

#: Scores, over sequences, index heads, rows and keys, that exist at one time.
AT_ONCE = 1 << 26
_CHOICE, _SUBJECT = "a choice of keys", "weft.choose"


@outside_graphs
@torch.no_grad()
@without_autocast
def choose(
    iq: Tensor,
    ik: Tensor,
    weights: Tensor,
    layout: Layout,
    axis: str,
    top_k: int,
    mask: Mask | None = None,
    length: Length | None = None,
    name: str | None = None,
) -> ChosenKeys:
    """The `top_k` keys of highest score for each query, for `weft.attention(..., choice=)`.

    score_ij = sum_h weights_ih relu(iq_ih . ik_j), in fp32 (fp64 for fp64), -inf where the mask
    hides a key. `[choose]` of the layout says what travels: index keys, so that a rank has whole
    rows of scores (default), or index queries, so that lists of the ranks' best keys merge. By rows
    the choice is that of `torch.topk`. By lists it is the beginning of a stable sort: of equal
    scores the lowest positions, on whatever layout. At most 2^26 scores exist at a time.

    Args:
        iq: index queries (b, i, n, d), as queries rest.
        ik: index keys (b, g, m, d), as keys rest; i is a multiple of g.
        weights: of the index heads (b, i, n), as queries rest.
        layout: a bound layout.
        axis: the axis along which keys are chosen.
        top_k: how many keys a query chooses; where there are fewer, all of them.
        mask: which query sees which key; default all. A mask that differs by head is that of
            head 0.
        length: global length of the axis, as in `weft.attention`.
        name: which call of the program this is, as for `weft.attention`.

    Returns:
        The choice, of numbers (b, 1, n, K) in int32; -1 where a query sees fewer than K keys. No
        gradient flows through it.

    Raises:
        ShapeError: on every rank that takes part: shapes, dtypes or calls do not fit, or a score is
            NaN, which no key is better or worse than.
        UnsupportedError: a mask that differs between sequences on a layout that splits the batch.
        DeclarationError: the layout is not bound, does not attend the axis, or merges lists where
            keys rest whole.

    >>> iq, ik = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 4)
    >>> layout = weft.Layout.single()
    >>> choice = choose(iq, ik, torch.ones(1, 2, 5), layout, "tokens", 2, weft.Causal())
    >>> choice.numbers.shape, choice.numbers[0, 0, 0].sort().values.tolist()
    (torch.Size([1, 1, 5, 2]), [-1, 0])
    """
    if not isinstance(layout, Layout):
        raise DeclarationError(
            f"layout is a bound weft.Layout, found a {type(layout).__name__}; for one device pass"
            " weft.Layout.single()"
        )
    transport, mask = layout.bound, FULL if mask is None else mask
    with refused_everywhere(functools.partial(_refuse, layout)):
        moving = _moving(layout, axis)
    where = origin() if moving and name is None else ""
    refusing = Exchange(_CHOICE, _SUBJECT, transport, moving, "", "", False, where)
    with refused_everywhere(refusing.refuse):
        check_mask(mask)
        _check(iq, ik, weights, top_k)
        if mask.per_sample and math.prod(layout.mesh[d] for d in layout.batch_dims(axis)) > 1:
            raise UnsupportedError(
                f"{layout.source} splits the batch, and sequences have masks that differ; choose by"
                " one mask for all of them there"
            )
        call = Call((axis,), mask, length=read_length((axis,), length), name=name)
        ((n, m),) = call.lengths(layout.unbound, iq.shape[2], ik.shape[2])
        mask.check(n, m, len(iq))
        kept = min(top_k, m)
        plan = list_plan(
            layout.unbound, axis, (n, m), transport.rank, _sizes(iq, ik, weights, kept)
        )
        _check_lengths(plan, iq.shape[2], ik.shape[2], (n, m), axis)
        kinds = [
            (*t.shape[:2], *t.shape[3:], str(t.dtype), t.device.type) for t in (iq, ik, weights)
        ]
        content = f"{layout.digest} {call.content} {top_k} {(n, m)} {kinds}"
    described = f"of layout {layout.name!r}, {call.text}, top_k {top_k}, lengths {(n, m)}, {kinds}"
    ahead = iq.device.type == "cuda"
    asked = _CHOICE, _SUBJECT, transport, moving, content, described, ahead, where
    channel = Exchange(*asked).forward()
    scores, places = _lists(plan, channel, iq, ik, weights, mask)
    channel.watches.note(plan, False)
    channel.finish()
    with refused_everywhere(refusing.refuse):
        if not scores.is_meta and bool(scores.isnan().any()):
            raise ShapeError(
                "weft.choose: a score is NaN, which no key is better or worse than; index queries,"
                " index keys or weights are not finite"
            )
    Exchange("the scores of a choice", *asked[1:]).forward().check()
    return ChosenKeys(places.to(NUMBER).unsqueeze(1), check=False)


def _moving(layout: Layout, axis: str) -> tuple[str, ...]:
    """Mesh dims along which anything of a choice travels."""
    dims = {*layout.key_dims(axis), *layout.list_dims(axis)}
    return tuple(d for d, size in layout.mesh.items() if size > 1 and d in dims)


def _refuse(layout: Layout, error: WeftError) -> None:
    """Tell the ranks that choose along an axis which this one does not name."""
    for axis in layout.attend:
        with contextlib.suppress(WeftError):
            dims = _moving(layout, axis)
            asked = _CHOICE, _SUBJECT, layout.bound, dims, "", "", False, ""
            return Exchange(*asked).refuse(error)


def _check(iq: Tensor, ik: Tensor, weights: Tensor, top_k: int) -> None:
    named = {"iq": iq, "ik": ik, "weights": weights}
    for label, t in named.items():
        if not isinstance(t, Tensor) or isinstance(t, DTensor):
            raise ShapeError(f"{label} is a local tensor, found a {type(t).__name__}")
    shapes = ", ".join(f"{label} {tuple(t.shape)}" for label, t in named.items())
    fits = iq.dim() == ik.dim() == 4 and weights.shape == iq.shape[:3]
    fits = fits and iq.shape[0] == ik.shape[0] and iq.shape[3] == ik.shape[3]
    if not fits or 0 in (ik.shape[1], iq.shape[1], iq.shape[3]) or iq.shape[1] % ik.shape[1]:
        raise ShapeError(
            "index queries are (b, i, n, d), index keys (b, g, m, d) with i a multiple of g,"
            f" weights (b, i, n), found {shapes}"
        )
    kinds = iq.dtype, ik.dtype, weights.dtype
    if iq.dtype != ik.dtype or not all(kind.is_floating_point for kind in kinds):
        raise ShapeError(
            "index queries and keys have one floating dtype, weights any, found"
            f" {', '.join(map(str, kinds))}"
        )
    if not iq.device == ik.device == weights.device:
        raise ShapeError(
            "index queries, keys and weights are on one device, found"
            f" {iq.device}, {ik.device}, {weights.device}"
        )
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ShapeError(f"top_k is a number of keys, 1 or more, found {top_k!r:.80}")


def _check_lengths(plan: ListPlan, n: int, m: int, lengths: tuple[int, int], axis: str) -> None:
    spans = plan.own_queries(plan.coords), plan.own_keys(plan.coords)
    for label, local, held, total in zip(("queries", "keys"), (n, m), spans, lengths):
        if local != count(held):
            raise ShapeError(
                f"the rank at {plan.coords} has {local} local index {label} of axis {axis!r}, but"
                f" its chunk of a length of {total} holds {count(held)}; shard with layout.shard,"
                " and pass length= where chunks are uneven"
            )


def _sizes(iq: Tensor, ik: Tensor, weights: Tensor, kept: int) -> IndexSizes:
    heads, dim = iq.shape[1], iq.shape[3]
    return IndexSizes(
        batch=len(iq),
        count=kept,
        key=ik.shape[1] * dim * ik.itemsize,
        query=heads * (dim * iq.itemsize + weights.itemsize),
        score=accumulate_dtype(iq.dtype).itemsize,
    )


def _lists(
    plan: ListPlan, transport: Messages, iq: Tensor, ik: Tensor, weights: Tensor, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Scores and positions (b, n, K) of the best keys of this rank's queries."""
    groups = ((plan.rows, plan.key_spans(), (ik,)), (plan.lists, plan.query_spans(), (iq, weights)))
    (ik,), (iq, weights) = (
        [
            gather_slices(t, 2, [*map(count, spans)], dims, transport, "index") if dims else t
            for t in tensors
        ]
        for dims, spans, tensors in groups
    )
    keys, queries = (
        positions(tuple(s for each in spans for s in each), iq.device) for _, spans, _ in groups
    )
    order = keys.argsort()  # of equal scores torch.topk takes those that it takes on one device
    keys, ik = keys[order], ik.index_select(2, order)
    found = []
    for rows in _pieces(iq, len(keys)):
        some = iq[:, :, rows], ik, weights[:, :, rows]
        found.append(_best(plan, _scores(*some, mask, queries[rows], keys), keys))
    none = iq.new_empty(len(iq), 0, plan.sizes.count, dtype=accumulate_dtype(iq.dtype))
    scores, places = (torch.cat(t, 1) for t in zip(*found or [(none, none.long())]))
    return _merged(plan, transport, scores, places) if plan.lists else (scores, places)


def _pieces(iq: Tensor, keys: int) -> list[slice]:
    """Rows whose scores by all keys are made at one time."""
    rows = max(1, AT_ONCE // max(1, len(iq) * iq.shape[1] * keys))
    return [slice(low, low + rows) for low in range(0, iq.shape[2], rows)]


def _scores(
    iq: Tensor, ik: Tensor, weights: Tensor, mask: Mask, queries: Tensor, keys: Tensor
) -> Tensor:
    """Scores (b, rows, m) of a few queries by the keys at hand."""
    dtype = accumulate_dtype(iq.dtype)
    heads = iq.to(dtype).unflatten(1, (ik.shape[1], -1)) @ ik.to(dtype).mT.unsqueeze(2)
    scores = (heads.relu() * weights.to(dtype).unflatten(1, (ik.shape[1], -1))[..., None]).sum(
        (1, 2)
    )
    if not isinstance(mask, Full):
        samples = torch.arange(len(iq) if mask.per_sample else 1, device=iq.device)
        zero = torch.zeros((), dtype=torch.int64, device=iq.device)
        where = samples[:, None, None], zero, queries[None, :, None], keys[None, None]
        scores = scores.masked_fill(~mask.allowed(*where), -torch.inf)
    return scores


def _best(plan: ListPlan, scores: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The best keys of some rows: all that is left of these."""
    if plan.lists:
        return merge_top_k(scores, keys.expand_as(scores), plan.sizes.count)
    best, places = scores.topk(plan.sizes.count, -1)  # of whole rows, in global order
    return best, places.masked_fill(best.isneginf(), -1)


def _merged(
    plan: ListPlan, transport: Messages, scores: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """The lists of this rank's queries, merged of all ranks' (b n K)."""
    kept = plan.sizes.count

    def merge(parts: list[Tensor]) -> Tensor:
        values, where = (torch.cat(side, -1) for side in zip(*map(unpacked, parts)))
        return _packed(*merge_top_k(values, where, kept))

    def unpacked(flat: Tensor) -> tuple[Tensor, Tensor]:
        entries = flat.numel() // (scores.itemsize + NUMBER.itemsize)
        values, where = flat.clone().split([entries * scores.itemsize, entries * NUMBER.itemsize])
        shape = len(scores), -1, kept
        return values.view(scores.dtype).view(shape), where.view(NUMBER).view(shape).long()

    rows = [count(spans) for spans in plan.query_spans()]
    lists = map(_packed, scores.split(rows, 1), places.split(rows, 1))
    return unpacked(spread_flat([*lists], plan.lists, transport, "lists", merge))


def _packed(scores: Tensor, places: Tensor) -> Tensor:
    """Scores and places of a list as one flat buffer of bytes."""
    return torch.cat(
        [t.contiguous().view(-1).view(torch.uint8) for t in (scores, places.to(NUMBER))]
    )


__all__ = ["choose"]
