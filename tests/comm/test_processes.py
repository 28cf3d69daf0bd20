"""Attention on real gloo processes: local tensors, DTensors, compiled, and failing well."""

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from exact import Case, attend, cut, error, problem, tokens
from pool import Pool, Raised
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import Causal, Documents, FirstKeys, Full, KeyPadding, Layout, MaskMod
from weft.comm import P2PBatch, processes

FOUR = [
    "burst-4",
    "gather-4",
    "head-x-ring",
    "hierarchical-2x2",
    "kv-parallel-4",
    "pass-q-4",
    "ring-4",
    "ring-x-head",
    "ring-zigzag-4",
    "shared-context-4",
    "tile-2x2",
    "tile-striped-2x2",
    "tp-x-ring",
    "ulysses-4",
]
TABULAR = ["tabular-2x2", "tabular-axial-2x2", "pair-2x2"]

_BUILT: dict[str, Layout] = {}


def _built(name: str) -> Layout:
    """A shipped layout on this process's ranks, built once."""
    if name not in _BUILT:
        layout = Layout.load(name)
        layout = layout.build("cpu", timeout=60)
        _BUILT[name] = layout
    return _BUILT[name]


def _odd(b, h, q, k):
    return (q + 2 * k + b + h) % 3 != 0


CASES = [
    Case(lengths=tokens(13), batch=3, heads=8, kv_heads=4, mask=Causal(), sinks=True),
    Case(lengths=tokens(16, 10), batch=2, heads=8, kv_heads=4, mask=FirstKeys(7), seed=1),
    Case(
        lengths=tokens(13),
        batch=3,
        heads=8,
        kv_heads=2,
        value_dim=6,
        mask=Documents((4, 9)) & Causal(5),
        softcap=4.0,
        lse_gradient=True,
        seed=2,
    ),
    Case(lengths=tokens(13), batch=2, heads=8, kv_heads=4, mask=KeyPadding((0, 9)), seed=3),
    Case(lengths=tokens(3, 2), batch=2, heads=8, kv_heads=4, mask=MaskMod(_odd), seed=4),
    Case(lengths=tokens(13), batch=3, heads=8, kv_heads=4, bias=True, seed=5),
]
JOINT = Case(("rows", "columns"), ((6, 6), (5, 5)), batch=2, heads=8, kv_heads=4, lse_gradient=True)


def _exact(rank: int, name: str, axis: str) -> list[dict[str, float]]:
    layout, found = _built(name), []
    for case in CASES:
        whole = problem(case := case.with_(axes=(axis,)))
        pairs = attend(layout, case, whole)
        found.append({key: error(*pair, whole.wanted[key]) for key, pair in pairs.items()})
    return found


def _warmed(rank: int) -> tuple[list[int], dict]:
    """Messages of each batch of a warm-up, and all bytes that it sent along each mesh dim."""
    transport, begun = _built("tile-2x2").bound, []
    before, begin = +transport.sent, transport._start
    try:
        transport._start = lambda p2p, tag: (
            begun.append(len(p2p.sends) + len(p2p.receives)) or begin(p2p, tag)
        )
        transport._warm_up("cpu")
    finally:
        del transport._start
    return begun, dict(transport.sent - before)


def test_every_pair_of_ranks_connects_when_a_layout_is_built(pool):
    """NCCL connects pairs at their first message, which the first step would wait for."""
    assert pool.run(_warmed, timeout=60) == [([2, 2], {})] * 4  # to and from; not counted as data


@pytest.mark.parametrize("name", [*FOUR, *TABULAR])
def test_results_equal_the_reference_on_every_rank(pool, name):
    for axis in Layout.load(name).attend:
        for rank, cases in enumerate(pool.run(_exact, name, axis)):
            for case, errors in zip(CASES, cases):
                assert max(errors.values()) <= 1e-11, (rank, axis, case, errors)


def _joint(rank: int) -> dict[str, float]:
    layout, whole = _built("pair-2x2"), problem(JOINT)
    pairs = attend(layout, JOINT, whole)
    return {key: error(*pair, whole.wanted[key]) for key, pair in pairs.items()}


def test_axes_attended_jointly_equal_the_reference_on_every_rank(pool):
    for errors in pool.run(_joint):
        assert max(errors.values()) <= 1e-11, errors


def _learned_bias(rank: int, name: str) -> float:
    layout, dims = _built(name), {"batch": 0, "heads": 1, "tokens": 2}
    make = torch.Generator().manual_seed(3)
    q, k, v, dout = torch.randn(4, 2, 8, 13, 4, dtype=torch.float64, generator=make).unbind(0)
    bias = torch.randn(1, 8, 13, 13, dtype=torch.float64, generator=make).requires_grad_()
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = (whole[0] @ whole[1].mT) / 2.0 + bias
    want = torch.softmax(scores, -1) @ whole[2]
    want.backward(dout)
    wanted = [want.detach(), *(t.grad for t in whole)]
    mine = [layout.shard(t, dims).requires_grad_() for t in (q, k, v)]
    table = bias.detach().clone().requires_grad_()
    out = weft.attention(
        *mine, layout, "tokens", length=13, bias=weft.bias_tile(table, layout, "tokens")
    )
    out.backward(layout.shard(dout, dims))
    torch.distributed.all_reduce(table.grad)
    pairs = [(f, layout.shard(w, dims)) for f, w in zip((out, *(t.grad for t in mine)), wanted)]
    pairs.append((table.grad, bias.grad))
    return max((found - wanted).abs().max().item() for found, wanted in pairs)


@pytest.mark.parametrize("name", ["ring-4", "tile-2x2", "ulysses-4", "tp-x-ring"])
def test_a_learned_bias_and_its_gradient_equal_the_reference(pool, name):
    assert max(pool.run(_learned_bias, name)) <= 1e-11


def _dtensors(rank: int, name: str) -> dict[str, float]:
    layout = _built(name)
    case = Case(lengths=tokens(13), batch=2, heads=8, kv_heads=4, mask=Causal())
    whole = problem(case)
    dims, of_keys = {"batch": 0, "heads": 1, "tokens": 2}, {"keys": ["tokens"]}
    q, k, v = (
        layout.distribute(t, dims, **where).requires_grad_()
        for t, where in ((whole.q, {}), (whole.k, of_keys), (whole.v, of_keys))
    )
    out, lse = weft.attention(q, k, v, layout, "tokens", case.mask, return_lse=True)
    out.backward(layout.distribute(whole.dout, dims))
    assert out.placements == q.placements == q.grad.placements == lse.placements
    assert k.grad.placements == k.placements
    assert out.shape == whole.q.shape
    found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    errors = {}
    for key, t in found.items():
        where = of_keys if key in ("dk", "dv") else {}
        side = "key" if key in ("dk", "dv") else "query"
        wanted = whole.wanted[key]
        local = t.to_local()
        errors[key] = error(local, cut(layout, case, wanted, side, layout.coords), wanted)
        errors[f"{key} whole"] = error(layout.gather(local, dims, **where), wanted, wanted)
    return errors


@pytest.mark.parametrize("name", FOUR)
def test_dtensors_in_dtensors_out_with_placements_and_gradients(pool, name):
    for errors in pool.run(_dtensors, name):
        assert max(errors.values()) <= 1e-11, errors


def _dtensor_refusals(rank: int) -> list[str]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    layout, other = _built("ring-4"), _built("tile-2x2")
    good = layout.distribute(torch.randn(2, 4, 8, 4), {"tokens": 2})
    whole = distribute_tensor(torch.randn(2, 4, 8, 4), layout.device_mesh, [Replicate()])
    elsewhere = other.distribute(torch.randn(2, 4, 8, 4), {"tokens": 2})
    text = []
    for q, k, options in (
        (whole, good, {}),
        (good, whole, {}),
        (good, good.to_local(), {}),
        (good, elsewhere, {}),
        (good, good, {"length": 8}),
    ):
        try:
            weft.attention(q, k, good, layout, "tokens", **options)
        except weft.ShapeError as refused:
            text.append(str(refused))
    return text


def test_dtensors_that_lie_otherwise_than_the_layout_says_are_refused(pool):
    wanted = [
        "q is placed as (R) on mesh dims ('ring',), but attention over tokens takes (S(seq))",
        "k is placed as (R)",
        "q is a DTensor and k is not",
        "k is on DeviceMesh",
        "length is for local tensors",
    ]
    for texts in pool.run(_dtensor_refusals):
        assert len(texts) == len(wanted)
        for text, start in zip(texts, wanted):
            assert text.startswith(start), text


def _one_refuses_dtensors(rank: int) -> list[str]:
    """Rank 1 gives one wrong argument after the other."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    layout = Layout.load("ring-4").build("cpu", timeout=30.0)
    good = layout.distribute(torch.randn(2, 4, 8, 4), {"tokens": 2})
    whole = distribute_tensor(torch.randn(2, 4, 8, 4), layout.device_mesh, [Replicate()])
    wrong = [{"k": whole}, {"k": good.to_local()}, {"axis": ("tokens", "rows")}, {"length": 8}]
    text = []
    for changes in wrong:
        given = {"q": good, "k": good, "v": good, "axis": "tokens"}
        given |= changes if rank == 1 else {}
        try:
            weft.attention(layout=layout, **given)
        except weft.WeftError as refused:
            text.append(str(refused))
    axes = (axis for axis in ["tokens"])
    assert weft.attention(good, good, good, layout, axes).shape == good.shape
    return text


def test_dtensors_that_one_rank_refuses_are_refused_on_all(pool):
    wanted = [
        "k is placed as (R)",
        "k is not",
        "attended jointly are ambiguous",
        "is for local tensors",
    ]
    for texts in pool.run(_one_refuses_dtensors):
        assert len(texts) == len(wanted)
        for text, part in zip(texts, wanted):
            assert part in text


def _pair(strategy: str) -> Layout:
    declaration = {"mesh": {"dim": 2}, "shard": {"tokens": ["dim"]}}
    attend = {"tokens": [{"strategy": strategy, "on": "dim"}]}
    layout = Layout.from_dict(declaration | {"attend": attend})
    layout = layout.build("cpu", timeout=240.0)
    return layout


def _compiled(rank: int) -> list[float]:
    ring, heads = (_pair(strategy) for strategy in ("ring", "ulysses"))
    case = Case(lengths=tokens(13), batch=2, heads=8, kv_heads=4)
    whole, coords = problem(case), ring.coords

    def f(q, k, v):
        out, lse = weft.attention(q * 2, k, v, ring, "tokens", Causal(), length=13, return_lse=True)
        again = weft.attention(out.sin(), k, v, heads, "tokens", length=13)
        return again + lse.sigmoid().unsqueeze(-1)

    results = []
    for function in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        leaves = [
            cut(ring, case, t, side, coords).clone().requires_grad_()
            for t, side in ((whole.q, "query"), (whole.k, "key"), (whole.v, "key"))
        ]
        out = function(*leaves)
        out.backward(cut(ring, case, whole.dout, "query", coords))
        results.append([out.detach(), *(t.grad for t in leaves)])
    return [(a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(*results)]


def test_compiled_functions_give_the_same_numbers():
    """Each rank compiles in its own time, so the others wait long for it on a busy machine."""
    with Pool(2, gloo_timeout=240.0) as pair:
        for gaps in pair.run(_compiled, timeout=280.0):
            assert max(gaps) <= 1e-13, gaps


@pytest.mark.slow
def test_the_default_compiler_gives_the_same_numbers_too():
    layout = Layout.single()

    def f(q, k, v):
        return weft.attention(q * 2, k, v, layout, "tokens", Causal()).sin()

    results = []
    for function in (f, torch.compile(f, fullgraph=True)):
        q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out, *(t.grad for t in leaves)])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


# -- disagreement ---------------------------------------------------------------------------------


def _disagree(rank: int, what: str) -> str:
    layout = _built("ring-4")
    second = rank == 1
    n = 3 if what == "tokens" and second else 4
    dtype = torch.float64 if what == "dtype" and second else torch.float32
    heads = 2 if what == "heads" and second else 4
    batch = 2 if what == "batch" and second else 1
    options = {
        "length": {"length": 15 if second else 16},
        "mask": {"mask": Full() if second else Causal()},
        "scale": {"scale": 0.5 if second else 0.25},
        "lse": {"return_lse": second},
        "refused": {"sinks": None, "kernel": "cuda-flash" if second else None},
    }.get(what, {})
    q = torch.randn(batch, heads, n, 8, dtype=dtype)
    try:
        weft.attention(q, q, q, layout, "tokens", **options)
    except weft.WeftError as refused:
        return f"{type(refused).__name__}: {refused}"
    return "not refused"


DISAGREE = {
    "tokens": ("rank 0, 2, 3: ", "lengths (queries, keys) ((12, 12),)"),
    "length": ("rank 1: ", "15"),
    "dtype": ("torch.float64", "torch.float32"),
    "heads": ("heads 4 and 4", "heads 2 and 2"),
    "batch": ("rank 1: ", "batch 1,", "batch 2,"),
    "mask": ("Causal()", "Full()"),
    "scale": ("scale 0.5", "scale 0.25"),
    "lse": ("lse True", "lse False"),
    "refused": ("runs on CUDA, not on cpu",),
}


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree_are_all_told_who_differs(pool, what):
    answers = pool.run(_disagree, what)
    assert len(set(answers)) == (2 if what == "refused" else 1)  # whoever refuses says why
    for answer, part in itertools.product(answers, DISAGREE[what]):
        assert part in answer


def test_ranks_go_on_after_a_refusal(pool):
    pool.run(_disagree, "dtype")
    for cases in pool.run(_exact, "ring-4", "tokens"):
        assert max(max(errors.values()) for errors in cases) <= 1e-11


def _other_layout(rank: int) -> str:
    name = "pass-q-4" if rank == 2 else "ring-4"
    try:
        Layout.load(name).build("cpu", timeout=20)
    except weft.ShapeError as refused:
        return str(refused)
    return "not refused"


def test_layout_that_differs_between_ranks_is_refused_on_every_rank(pool):
    for text in pool.run(_other_layout):
        assert text.startswith("the layout must be the same on every rank, but:\n  rank 0, 1, 3: {")
        assert "\n  rank 2: {" in text


def _wrong_size(rank: int) -> str:
    try:
        Layout.load("ring-2").build("cpu", timeout=20)
    except weft.DeclarationError as refused:
        return str(refused)
    return "not refused"


def test_mesh_that_is_not_world_is_refused_on_every_rank(pool):
    for text in pool.run(_wrong_size):
        assert "has 2 ranks, but there are 4; start 2 ranks or set one mesh size to -1" in text


# -- death and silence ----------------------------------------------------------------------------


def _attend_until_it_fails(rank: int, victim: int, how: str, limit: float) -> tuple[str, float]:
    q = torch.randn(1, 2, 4, 8)
    for timeout in (60.0, limit):  # the first time a rank may be late
        layout = Layout.load("ring-4").build("cpu", timeout=timeout)
        weft.attention(q, q, q, layout, "tokens")
        dist.barrier()
    if rank == victim:
        if how == "killed":
            os.kill(os.getpid(), 9)
        time.sleep(8.0)
        return "slept", 0.0
    began = time.monotonic()
    try:
        weft.attention(q, q, q, layout, "tokens")
    except weft.RankError as failed:
        text, seconds = str(failed), time.monotonic() - began
        with pytest.raises(weft.RankError, match="agree on the layout"):  # in one error, too
            Layout.load("ulysses-4").build("cpu", timeout=limit)
        return text, seconds
    return "not noticed", 0.0


@pytest.mark.parametrize("how", ["killed", pytest.param("silent", marks=pytest.mark.sample)])
def test_rank_that_is_gone_is_named_by_others_within_limit(how):
    """And not after as long as the program's own groups wait, which is a minute here."""
    victim, limit = 2, 4.0
    with Pool(4) as group:
        dying = (victim,) if how == "killed" else ()
        answers = group.attempt(
            _attend_until_it_fails, victim, how, limit, timeout=90.0, dying=dying
        )
    for rank, answer in enumerate(answers):
        if rank == victim:
            continue
        assert not isinstance(answer, Raised), answer
        text, seconds = answer
        assert f"rank {victim} ended or did not answer within {limit:g} s" in text, text
        assert seconds < 30


def _nothing_sent(rank: int) -> float:
    """Seconds until a message that nobody sends is given up, on a layout that waits for 1 s."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))  # groups of their own
    layout = Layout.parse("tokens: ring=2").bind(mesh["cp"], {"ring": "cp"}, timeout=1)
    began = time.monotonic()
    if layout.coords["ring"] == 0:
        wait = layout.bound.start(P2PBatch("ring", "kv", [], [(1, torch.empty(4))]))
        with pytest.raises(weft.RankError, match="did not answer within 1 s"):
            wait()
    took = time.monotonic() - began
    dist.barrier()
    return took


def test_message_is_waited_for_as_long_as_the_binding_says(pool):
    """And not as long as the program's own groups wait, which is a minute here."""
    assert all(took < 15 for took in pool.run(_nothing_sent))


def _of_versions(rank: int) -> str:
    before = processes.__version__
    processes.__version__ = "0.0.9" if rank == 2 else before
    try:
        Layout.parse("tokens: ring=4").build("cpu", timeout=30)
    except weft.ShapeError as error:
        return str(error)
    finally:
        processes.__version__ = before
    return ""


def test_versions_that_differ_are_refused_on_every_rank(pool):
    for message in pool.run(_of_versions):
        assert "the version of weft must be the same on every rank" in message
        assert "rank 2: 0.0.9" in message
