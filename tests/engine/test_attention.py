"""Attention equals the reference on every layout: masks, orders, shapes, options, dtypes."""

import itertools
import re
from collections.abc import Iterator

import pytest
import strides
import torch
from exact import Case, assert_exact, attend, one_per_combination, problem, tokens

import weft
from weft import (
    Causal,
    Documents,
    FirstKeys,
    Full,
    KeyPadding,
    Layout,
    MaskMod,
    ShapeError,
    UnsupportedError,
    Window,
    prefix_lm,
)
from weft.comm import run_threads
from weft.plan.order import ORDERS


def _shape_mod(b, h, q, k):
    return (q + 2 * k + b + h) % 3 != 0


#: every kind of mask and every way to combine them; for 13 tokens in a batch of 3
MASKS = [
    Full(),
    Causal(),
    Causal(window=3),
    Window(2, 1),
    Window(0, 4),
    FirstKeys(7),
    FirstKeys(0),
    Documents((3, 1, 7, 2)),
    Documents((3, 1, 7, 2)) & Causal(),
    Documents((6, 7)) & Causal(4),
    prefix_lm(4),
    Window(1, 1) | FirstKeys(2),
    KeyPadding((13, 5, 0)),
    KeyPadding((0, 9, 13)) & Causal(),
    MaskMod(_shape_mod),
    (MaskMod(_shape_mod) & Causal()) | Documents((12, 1)),
]


#: One axis of a shipped layout per combination of rules, and two attended jointly. Every shipped
#: layout is run by `weft check` in `test_cli`.
GRIDS = {
    "near": weft.Near((7, 5), 3),
    "near, dilated, circular": weft.Near((7, 5), (4, 2), (1, 2), (True, True)),
    "near, even, dilated": weft.Near((7, 5), (3, 4), (2, 1)),
    "boxes": weft.Boxes((7, 5), (3, 2)),
    "boxes, shifted, circular": weft.Boxes((7, 5), (3, 2), (1, 1), (False, True)),
    "boxes & causal": weft.Boxes((7, 5), 4, 2, True) & Causal(),
}
AXES = [*one_per_combination(), ("pair-2x2", "rows+columns"), ("pair-2x2", "columns+rows")]


def layout_in(name: str, order: str) -> Layout:
    """A shipped layout with every attended axis in the given token order."""
    declaration = Layout.load(name).declaration
    split = [axis for axis in declaration.get("shard", {}) if axis not in ("heads", "batch")]
    return Layout.from_dict(declaration | {"order": dict.fromkeys(split, order)}, name)


def case_for(axis: str, n: int = 13, m: int | None = None, **changes) -> Case:
    """`n` queries and `m` keys over one axis, or over two attended jointly."""
    axes = tuple(axis.split("+"))
    lengths = tokens(n, m) if len(axes) == 1 else ((n, n if m is None else m), (1, 1))
    return Case(axes, lengths, **({"batch": 3, "heads": 8, "kv_heads": 4} | changes))


@pytest.mark.parametrize(
    "mesh", [{"y": 2, "x": 2}, {"y": 3, "x": 1}, {"y": 1, "x": 3}], ids=lambda m: f"{[*m.values()]}"
)
@pytest.mark.parametrize("mask", GRIDS)
def test_masks_of_a_grid_are_exact_wherever_it_is_cut(mask, mesh):
    rules = dict(zip(mesh, ("ring", "pass_q") if mask < "near" else ("halo", "gather")))
    layout = Layout.from_dict(
        {
            "mesh": mesh,
            "shard": {"lat": ["y"], "lon": ["x"]},
            "attend": {"lat+lon": [{"strategy": s, "on": d} for d, s in rules.items()]},
        }
    )
    case = Case(("lat", "lon"), ((7, 7), (5, 5)), mask=GRIDS[mask], lse_gradient=mask == "near")
    assert_exact(layout, case)


@pytest.mark.few(9)
@pytest.mark.parametrize(("name", "axis"), [("single", "tokens"), *AXES])
def test_all_strides_are_exact_on_every_layout(name, axis):
    """q, k, v and the output's gradient in every way: half on one layout, half on the next."""
    place = 0 if name == "single" else 1 + AXES.index((name, axis))
    layout = Layout.single() if name == "single" else Layout.load(name)
    for i in range(place % 2, len(strides.NAMES), 2):
        laid = tuple(strides.NAMES[(i + 3 * j) % len(strides.NAMES)] for j in range(4))
        assert_exact(layout, case_for(axis, mask=(Full(), Causal())[i // 2 % 2], strides=laid))


def turned(place: int) -> Iterator[str]:
    """Orders in turn, so that those next to `place` begin with others."""
    orders = [*ORDERS]
    return itertools.islice(itertools.cycle(orders), place % len(orders), None)


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "axis"), AXES)
def test_every_mask_is_exact_on_every_layout(name, axis):
    """Any two of layout, mask and order of tokens meet."""
    for seed, (mask, order) in enumerate(zip(MASKS, turned(AXES.index((name, axis))))):
        assert_exact(layout_in(name, order), case_for(axis, mask=mask, seed=seed))


#: (queries, keys, mask) where query 0 is not at key 0, for a batch of 3: decoded tokens, a chunk
#: of a prompt, aligned upper left, queries that see nothing, queries behind all keys
OFFSETS = [
    (5, 19, Causal(offset=14)),
    (13, 29, Causal(offset=7)),
    (1, 17, Causal(4, offset=16)),
    (6, 13, Causal(offset=0)),
    (13, 6, Causal(offset=-7)),
    (11, 24, Window(3, 2, offset=9)),
    (7, 20, Causal(offset=13) & Documents((4, 11, 5), offset=13)),
    (9, 18, Causal(offset=9) & KeyPadding((18, 12, 0))),
    (6, 15, prefix_lm(11, offset=9)),
    (8, 16, Documents([(16,), (3, 9, 4), (10, 6)], offset=5) & Causal(6, offset=5)),
    (12, 9, Causal(offset=4)),
    (10, 21, (MaskMod(_shape_mod) & Causal(offset=11)) | Window(0, 0, offset=2)),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "axis"), AXES)
def test_queries_at_an_offset_are_exact_on_every_layout(name, axis):
    """Half of the offsets on one layout, the others on the next."""
    place = AXES.index((name, axis))
    for i, order in zip(range(place % 2, len(OFFSETS), 2), turned(place)):
        n, m, mask = OFFSETS[i]
        case = case_for(axis, n, m, mask=mask, seed=i, lse_gradient=i % 3 == 2)
        assert_exact(layout_in(name, order), case)


SHAPES = {
    "even": {"n": 16},
    "fewer keys than queries": {"n": 17, "m": 6},
    "more keys than queries": {"n": 5, "m": 19},
    "one key/value head": {"n": 11, "heads": 4, "kv_heads": 1},
    "one query head group of three": {"n": 11, "heads": 12, "kv_heads": 4},
    "as many key/value heads as heads": {"n": 9, "heads": 4, "kv_heads": 4},
    "fewer tokens than ranks": {"n": 3, "m": 2},
    "one token": {"n": 1},
    "no keys": {"n": 5, "m": 0},
    "no queries": {"n": 0, "m": 5},
    "a batch of one": {"n": 9, "batch": 1},
    "an empty batch": {"n": 9, "batch": 0},
    "a head dim of one": {"n": 9, "dim": 1},
    "narrow values": {"n": 9, "value_dim": 3},
    "wide values": {"n": 9, "value_dim": 7},
    "a scale": {"n": 9, "scale": 0.3},
    "a soft cap": {"n": 13, "softcap": 2.0},
    "sinks": {"n": 13, "sinks": True},
    "sinks and rows that see nothing": {"n": 13, "sinks": True, "mask": FirstKeys(0)},
    "a gradient through the logsumexp": {"n": 13, "lse_gradient": True},
    "the same with rows that see nothing": {
        "n": 13,
        "lse_gradient": True,
        "mask": KeyPadding((0, 6, 13)),
    },
    "all at once": {
        "n": 13,
        "value_dim": 6,
        "softcap": 3.0,
        "sinks": True,
        "lse_gradient": True,
        "mask": Documents((4, 9)) & Causal(5),
        "scale": 0.7,
    },
}


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "axis"), AXES)
def test_every_shape_and_option_is_exact_on_every_layout(name, axis):
    """Half of the shapes on one layout, the others on the next."""
    heads, place = Layout.load(name).size("heads"), AXES.index((name, axis))
    for shape, order in zip([*SHAPES.values()][place % 2 :: 2], turned(place)):
        case = case_for(axis, **shape)
        if case.kv_heads % heads:
            case = case.with_(kv_heads=heads)
        assert_exact(layout_in(name, order), case)


MESHES = {
    "3x5 tile": ({"row": 3, "col": 5}, "mesh_tile", {"row": "row", "col": "col"}),
    "5x3 tile, columns outside": ({"col": 5, "row": 3}, "mesh_tile", {"row": "row", "col": "col"}),
    "1x4 tile": ({"row": 1, "col": 4}, "mesh_tile", {"row": "row", "col": "col"}),
    "4x1 tile": ({"row": 4, "col": 1}, "mesh_tile", {"row": "row", "col": "col"}),
    "3x3 hierarchical": ({"a": 3, "b": 3}, "hierarchical", {"inter": "a", "intra": "b"}),
    "2x4 turned round": ({"b": 2, "a": 4}, "hierarchical", {"inter": "a", "intra": "b"}),
    "a ring of 7": ({"r": 7}, "ring", "r"),
    "a ring of 1": ({"r": 1}, "ring", "r"),
    "burst on 5": ({"r": 5}, "burst", "r"),
    "pass-Q on 5": ({"r": 5}, "pass_q", "r"),
}

STACKS = {
    "three rings": ({"a": 2, "b": 3, "c": 2}, [("ring", "a"), ("ring", "b"), ("ring", "c")]),
    "three pass-Q": ({"a": 2, "b": 3, "c": 2}, [("pass_q", "a"), ("pass_q", "b"), ("pass_q", "c")]),
    "two tiles": ({"a": 2, "b": 2, "c": 2, "d": 2}, ["ring a", "pass_q b", "ring c", "pass_q d"]),
    "Ulysses outside a ring": ({"a": 2, "b": 3}, [("ulysses", "a"), ("ring", "b")]),
    "Ulysses inside a ring": ({"a": 3, "b": 2}, [("ring", "a"), ("ulysses", "b")]),
    "Ulysses between": ({"a": 2, "b": 2, "c": 3}, ["ring a", "ulysses b", "pass_q c"]),
    "two Ulysses": ({"a": 2, "b": 2, "c": 2}, ["ulysses a", "ulysses b", "burst c"]),
    "axial and Ulysses": ({"a": 2, "b": 2, "c": 2}, ["axial a", "ulysses b", "ring c"]),
    "shared context and pass-Q": ({"a": 2, "b": 3}, ["shared_context a", "pass_q b"]),
    "gather and burst": ({"a": 2, "b": 3}, ["gather a", "burst b"]),
    "adaptive and a ring": ({"a": 3, "b": 2}, ["adaptive a", "ring b"]),
    "adaptive, then pass-Q": ({"a": 2, "b": 2}, ["adaptive a", "pass_q b"]),
}


def _stack(mesh: dict, entries: list, order: str) -> Layout:
    pairs = [e.split() if isinstance(e, str) else e for e in entries]
    return Layout.from_dict(
        {
            "mesh": mesh,
            "shard": {"tokens": list(mesh)},
            "order": {"tokens": order},
            "attend": {"tokens": [{"strategy": s, "on": on} for s, on in pairs]},
        }
    )


SOME = [Full(), Causal(), Causal(4), Documents((5, 12, 6)) & Causal(), Window(3, 1) | FirstKeys(2)]


@pytest.mark.few(10)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MESHES)
def test_odd_meshes_and_turned_dims_are_exact(name, order):
    mesh, strategy, on = MESHES[name]
    for seed, mask in list(enumerate(SOME))[list(ORDERS).index(order) :: 2]:
        case = Case(lengths=tokens(23), batch=1, mask=mask, seed=seed)
        assert_exact(_stack(mesh, [(strategy, on)], order), case)


@pytest.mark.few(5)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", STACKS)
def test_stacked_strategies_are_exact(name, order):
    mesh, entries = STACKS[name]
    masks = [*SOME, KeyPadding((23, 0, 11)), MaskMod(_shape_mod)]
    for seed, mask in list(enumerate(masks))[list(ORDERS).index(order) :: 3]:
        case = Case(lengths=tokens(23), batch=3, heads=12, kv_heads=3, mask=mask, seed=seed)
        assert_exact(_stack(mesh, entries, order), case)
    n, m, mask = OFFSETS[(list(STACKS).index(name) + 5 * list(ORDERS).index(order)) % len(OFFSETS)]
    case = Case(lengths=tokens(n, m), batch=3, heads=12, kv_heads=3, mask=mask)
    assert_exact(_stack(mesh, entries, order), case)


@pytest.mark.few(4)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axes", [("rows", "columns"), ("columns", "rows")], ids="-".join)
@pytest.mark.parametrize("split", ["both", "rows", "columns"])
def test_axes_attended_jointly_are_exact_whichever_of_them_is_split(split, axes, order):
    whole = {"rows": ["r"], "columns": ["c"]}
    shard = {axis: dims for axis, dims in whole.items() if split in ("both", axis)}
    mesh = {dim: size for dim, size in (("r", 3), ("c", 2)) if [dim] in shard.values()}
    attend = {"rows": [{"strategy": "ring", "on": "r"}]} if "r" in mesh else {}
    attend |= {"columns": [{"strategy": "pass_q", "on": "c"}]} if "c" in mesh else {}
    layout = Layout.from_dict(
        {"mesh": mesh, "shard": shard, "order": dict.fromkeys(shard, order), "attend": attend}
    )
    length = {"rows": (5, 5), "columns": (4, 4)}
    lengths = tuple(length[axis] for axis in axes)
    for seed, mask in enumerate([*SOME[:3], Documents((7, 13)), MaskMod(_shape_mod)]):
        assert_exact(layout, Case(axes, lengths, mask=mask, seed=seed))
    cross = tuple({"rows": (5, 3), "columns": (4, 6)}[axis] for axis in axes)
    for mask in (FirstKeys(7), Causal(offset=3), Window(4, 1, offset=-2)):
        assert_exact(layout, Case(axes, cross, mask=mask))


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("order", ORDERS)
def test_windows_are_exact_whichever_way_chunks_travel(transport, order):
    from draw import Dim, layout_of

    for role, backward in (("query", None), ("query", "key"), ("key", None), ("key", "query")):
        dim = Dim(5, "tokens", role, transport=transport, backward=backward)
        for window in (1, 4, 9):
            case = Case(lengths=tokens(21), mask=Causal(window))
            assert_exact(layout_of([dim], {"tokens": order}), case)
        for n, m, mask in ((8, 21, Causal(4, offset=13)), (21, 9, Window(2, 3, offset=-6))):
            assert_exact(layout_of([dim], {"tokens": order}), Case(lengths=tokens(n, m), mask=mask))


def _rms(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    gap = torch.cat([(found.double() - wanted).flatten() for found, wanted in pairs])
    whole = torch.cat([wanted.flatten() for _, wanted in pairs])
    return (gap.square().mean() / whole.square().mean()).sqrt().item()


def _rms_errors(layout: Layout, case: Case, dtype: torch.dtype) -> dict[str, float]:
    """Root-mean-square error of every tensor relative to the fp64 reference on rounded inputs."""
    whole = problem(case, dtype)
    ranks = (
        run_threads(layout.mesh, lambda t: attend(layout.on(t), case, whole, dtype), timeout=20)
        if layout.mesh
        else [attend(layout, case, whole, dtype)]
    )
    return {name: _rms([rank[name] for rank in ranks]) for name in ranks[0]}


LOWER = (torch.bfloat16, torch.float32)


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("name", "axis", "dtype"),
    [(*named, LOWER[i % 2]) for i, named in enumerate(AXES)]
    + [(name, "tokens", dtype) for name in ("ring", "pass_q") for dtype in LOWER],
)
def test_lower_precision_is_within_twice_the_error_of_one_device(name, axis, dtype):
    """Also of long rings, as many parts merge there."""
    many = name in ("ring", "pass_q")
    layout = _stack({"r": 16}, [(name, "r")], "zigzag") if many else Layout.load(name)
    case = case_for(axis, n=96, dim=16, mask=Causal())
    alone = _rms_errors(Layout.single(), case, dtype)
    errors = _rms_errors(layout, case, dtype)
    for tensor, found in errors.items():
        assert found <= 2 * alone[tensor], (axis, tensor, found, alone[tensor])


def _call(layout: Layout, **changes):
    given = {"q": (2, 4, 6, 8), "k": (2, 2, 6, 8), "v": (2, 2, 6, 8)} | changes
    q, k, v = (
        shape if isinstance(shape, torch.Tensor) else torch.randn(shape)
        for shape in (given.pop(name) for name in "qkv")
    )
    return weft.attention(q, k, v, layout, "tokens", **given)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"q": (4, 6, 8)}, ShapeError, "must be (batch, heads, tokens, dim)"),
        ({"k": (2, 2, 5, 8)}, ShapeError, "do not fit together"),
        ({"v": (2, 1, 6, 8)}, ShapeError, "do not fit together"),
        ({"k": (2, 2, 6, 4)}, ShapeError, "do not fit together"),
        ({"q": (1, 4, 6, 8)}, ShapeError, "do not fit together"),
        ({"k": (2, 3, 6, 8), "v": (2, 3, 6, 8)}, ShapeError, "multiple of key/value heads"),
        ({"q": torch.randn(2, 4, 6, 8).double()}, ShapeError, "one floating dtype"),
        ({"q": torch.ones(2, 4, 6, 8, dtype=torch.int64)}, ShapeError, "one floating dtype"),
        ({"length": 7}, ShapeError, "but its chunk of a length of 7 holds 7"),
        ({"length": {"rows": 6}}, ShapeError, "length has no entry for axis 'tokens'"),
        ({"mask": Documents((3, 2))}, ShapeError, "add up to 5"),
        ({"mask": KeyPadding((3,))}, ShapeError, "1 lengths for a batch of 2"),
        ({"sinks": torch.zeros(3)}, ShapeError, "one per local head"),
        ({"kernel": "flesh"}, UnsupportedError, "no kernel 'flesh'"),
        ({"kernel": "cuda-flash"}, UnsupportedError, "runs on CUDA, not on cpu"),
        ({"kernel": "cpu-flash", "softcap": 1.0}, UnsupportedError, "soft cap"),
    ],
)
def test_calls_that_do_not_fit_are_refused(changes, error, reason):
    with pytest.raises(error, match=re.escape(reason)):
        _call(Layout.single(), **changes)


def test_fewer_heads_than_ranks_are_refused_with_alternatives():
    layout = Layout.load("ulysses-4")

    def rank(transport):
        with pytest.raises(ShapeError, match=r"2 local heads cannot be split 4 ways .*'head': 4"):
            _call(layout.on(transport), q=(2, 2, 6, 8))

    run_threads(layout.mesh, rank, timeout=20)


def test_calls_of_other_head_dims_or_layouts_share_no_plan():
    narrow, wide = Case(dim=2, mask=Causal()), Case(dim=8, value_dim=3, mask=Causal())
    wholes = [problem(case) for case in (narrow, wide)]
    first, second = layout_in("ring-4", "contiguous"), layout_in("ring-4", "striped")

    def rank(transport):
        layouts = first.on(transport), second.on(transport)
        runs = []
        for layout in layouts:
            for whole in wholes:
                q, k, v = (
                    layout.shard(t, {"tokens": 2}).requires_grad_()
                    for t in (whole.q, whole.k, whole.v)
                )
                out = weft.attention(q, k, v, layout, "tokens", Causal(), length=13)
                runs.append((layout, whole, q, out))
        for layout, whole, q, out in runs:
            (out * layout.shard(whole.dout, {"tokens": 2})).sum().backward()
            wanted = layout.shard(whole.wanted["dq"], {"tokens": 2})
            torch.testing.assert_close(q.grad, wanted, rtol=1e-11, atol=1e-12)

    run_threads(first.mesh, rank, timeout=20)


def test_sequences_not_shared_along_a_ring_are_refused():
    layout = Layout.load("ring-4")

    def rank(transport):
        b = 1 + transport.rank // 2
        with pytest.raises(ShapeError, match=r"batch 1.*\n.*batch 2"):
            _call(layout.on(transport), q=(b, 4, 6, 8), k=(b, 2, 6, 8), v=(b, 2, 6, 8))

    run_threads(layout.mesh, rank, timeout=20)


def test_view_or_transposed_input_is_as_good_as_contiguous_one():
    q, k, v = (torch.randn(2, 6, 4, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3))
    for layout in (Layout.single(),):
        found = weft.attention(q, k, v, layout, "tokens", Causal())
        wanted = weft.attention(*(t.contiguous() for t in (q, k, v)), layout, "tokens", Causal())
        assert torch.equal(found, wanted)


WHOLE_QUERIES = [
    "tokens: kv_parallel=2 x pass_q=2",
    "tokens(zigzag): ring=2 x kv_parallel=3",
    "tokens: kv_parallel=2 x ulysses=2; heads: tp=2",
    "tokens: shared_context=2 x kv_parallel=2",
]


@pytest.mark.few(6)
@pytest.mark.parametrize("line", WHOLE_QUERIES)
@pytest.mark.parametrize(("n", "m"), [(13, 13), (1, 17), (0, 4), (3, 2)])
def test_queries_may_lie_whole_where_keys_are_split(line, n, m):
    for mask in (Causal() if n == m else Full(), Causal(offset=m - n), Window(3, 0, offset=m - n)):
        assert_exact(Layout.parse(line), case_for("tokens", n, m, mask=mask, lse_gradient=True))


def test_of_axes_attended_jointly_the_first_ones_keys_are_split():
    layout = Layout.parse("rows+columns: kv_parallel=3")
    assert (layout.key_dims("rows", ("rows", "columns")), layout.shard_dims("rows")) == (
        ("kv_parallel",),
        (),
    )
    assert_exact(layout, Case(("rows", "columns"), ((5, 7), (3, 2)), heads=8, kv_heads=4))
