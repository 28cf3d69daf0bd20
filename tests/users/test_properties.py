"""Any mesh, mix of legal rules, lengths, heads, masks and orders: equal to the reference."""

import hypothesis.strategies as st
import strides
from draw import COMPUTE, MOVING, Dim, layout_of
from exact import Case, assert_exact
from hypothesis import HealthCheck, given, settings

from weft.masks import Causal, Documents, FirstKeys, Full, KeyPadding, MaskMod, Window, prefix_lm
from weft.plan.order import ORDERS

RANKS = 24
AXES = ("tokens", "rows")


@st.composite
def dims(draw, room: int) -> Dim:
    """A mesh dim of at most `room` ranks with any legal rule of its own."""
    size = draw(st.sampled_from([s for s in (2, 3, 1, 4, 5, 7) if s <= room]))
    splits = draw(st.sampled_from(["tokens", "tokens", "tokens", "rows", "batch", "heads", ""]))
    attended = splits in AXES
    if not attended and draw(st.booleans()):
        return Dim(size, splits)
    roles = [r for r in COMPUTE if r != "none" or splits == ""]
    role = draw(st.sampled_from(["query", "key", *roles]))
    whole = splits == "" or (attended and draw(st.integers(0, 5)) == 0)
    transport = draw(st.sampled_from(["auto", "ring", "gather"])) if role in MOVING else "auto"
    backward = forward = None
    if role in MOVING and not whole:
        backward = draw(st.sampled_from([None, "query", "key", "auto"]))
        forward = draw(st.sampled_from([None, "auto"]))
    return Dim(size, splits, role, whole, transport, backward, forward)


@st.composite
def meshes(draw) -> list[Dim]:
    found, room = [], RANKS
    for _ in range(draw(st.integers(1, 4))):
        found.append(draw(dims(room)))
        room //= found[-1].size
    return found


def _parts(draw, n: int) -> list[int]:
    ends = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return [b - a for a, b in zip([0, *ends], [*ends, n])]


@st.composite
def masks(draw, n: int, m: int, batch: int):
    """Any mask that fits, or two of them joined."""

    def padding():
        lengths = st.lists(st.integers(0, m), min_size=batch, max_size=batch)
        return KeyPadding(draw(lengths))

    def documents():
        return Documents(_parts(draw, n))

    def mod():
        p, r = draw(st.integers(2, 4)), draw(st.integers(0, 1))
        return MaskMod(lambda b, h, q, k: (q + 2 * k + b * h) % p != r)

    anywhere = [Full, lambda: FirstKeys(draw(st.integers(0, m))), padding, mod]
    square = [
        Causal,
        lambda: Causal(draw(st.integers(1, n))),
        lambda: Window(draw(st.integers(0, n)), draw(st.integers(0, n))),
        lambda: prefix_lm(draw(st.integers(0, n))),
        documents,
    ]
    o = draw(st.sampled_from([m - n, 0, draw(st.integers(-n - 1, m + 1))]))
    placed = [
        lambda: Causal(offset=o),
        lambda: Causal(draw(st.integers(1, m)), offset=o),
        lambda: Window(draw(st.integers(0, m)), draw(st.integers(0, m)), offset=o),
        lambda: prefix_lm(draw(st.integers(0, m)), offset=o),
    ]
    if n <= m:
        start = draw(st.integers(0, m - n))
        placed.append(lambda: Documents(_parts(draw, m), offset=start))
    kinds = anywhere + placed + (square if n == m else [])
    mask = draw(st.sampled_from(kinds))()
    if draw(st.integers(0, 2)) == 0:
        other = draw(st.sampled_from(kinds))()
        mask = mask & other if draw(st.booleans()) else mask | other
    return mask


def _ways(mesh: list[Dim], **wanted) -> int:
    ways = 1
    for dim in mesh:
        if any(getattr(dim, name) == value for name, value in wanted.items()):
            ways *= dim.size
    return ways


@st.composite
def calls(draw):
    """A layout and a call on it."""
    mesh = draw(meshes())
    axes = tuple(axis for axis in AXES if any(dim.splits == axis for dim in mesh)) or AXES[:1]
    orders = {axis: draw(st.sampled_from(list(ORDERS))) for axis in axes}
    most = 24 if len(axes) == 1 else 6
    lengths = []
    for _ in axes:
        n = draw(st.integers(1, most))
        lengths.append((n, n if draw(st.booleans()) else draw(st.integers(1, most))))
    n = m = 1
    for queries, keys in lengths:
        n, m = n * queries, m * keys
    split, cut = _ways(mesh, splits="heads"), _ways(mesh, splits="heads", role="head")
    kv_heads = split * draw(st.integers(1, 2))
    batch = draw(st.integers(1, 4))
    if draw(st.booleans()):
        axes, lengths = axes[::-1], lengths[::-1]
    case = Case(
        axes,
        tuple(lengths),
        batch,
        kv_heads * (cut // split) * draw(st.integers(1, 2)),
        kv_heads,
        dim=3,
        value_dim=draw(st.sampled_from([None, None, 5])),
        mask=draw(masks(n, m, batch)),
        scale=draw(st.sampled_from([None, 0.4, -0.4, 0.0])),
        softcap=draw(st.sampled_from([None, None, None, 3.0])),
        bias=draw(st.integers(0, 3)) == 0,
        sinks=draw(st.integers(0, 4)) == 0,
        lse_gradient=draw(st.integers(0, 3)) == 0,
        strides=tuple(draw(st.sampled_from(strides.NAMES)) for _ in range(4)),
        seed=draw(st.integers(0, 99)),
    )
    return layout_of(mesh, orders), case


@given(calls())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_layout_of_legal_rules_computes_exact_attention(call):
    layout, case = call
    assert_exact(layout, case)
