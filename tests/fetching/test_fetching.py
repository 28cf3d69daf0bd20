"""Of the keys only those travel that some query of a rank chose: exact, and no byte beside them."""

from __future__ import annotations

from dataclasses import replace

import exact
import pytest
import torch
from covering import covering
from test_bias import BATCH, DIMS, HEADS, KV_HEADS, LENGTH, close, whole_problem
from test_choice import MASKS, drawn, reference
from torch import Tensor

import weft
from weft.comm import Transport, run_threads
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.plan.problem import Problem
from weft_axes.fetching import attend
from weft_axes.fetching.bounds import chosen_bounds

#: Name -> (mesh dims with their strategies, order of tokens).
MESHES = {
    "four ranks": ({"r": (4, "chosen")}, "contiguous"),
    "zigzag": ({"r": (3, "chosen")}, "zigzag"),
    "striped": ({"r": (4, "chosen")}, "striped"),
    "two dims": ({"o": (2, "chosen"), "i": (2, "chosen")}, "zigzag"),
    "2 x 3": ({"o": (2, "chosen"), "i": (3, "chosen")}, "contiguous"),
    "ulysses outside": ({"u": (2, "ulysses"), "r": (2, "chosen")}, "zigzag"),
    "ulysses inside": ({"r": (2, "chosen"), "u": (2, "ulysses")}, "contiguous"),
    "tensor parallel": ({"tp": (2, "heads"), "r": (2, "chosen")}, "contiguous"),
    "one rank": ({"r": (1, "chosen")}, "contiguous"),
    "unequal shares": ({"r": (3, "chosen")}, "contiguous"),
}
SHARES = {"unequal shares": {"r": (3.0, 1.0, 2.0)}}


def layout_of(name: str) -> weft.Layout:
    dims, order = MESHES[name]
    split = [d for d, (_, strategy) in dims.items() if strategy != "heads"]
    heads = [d for d in dims if d not in split]
    data = {
        "mesh": {d: size for d, (size, _) in dims.items()},
        "shard": {"tokens": split} | ({"heads": heads} if heads else {}),
        "attend": {"tokens": [{"strategy": dims[d][1], "on": d} for d in split]},
        "order": {"tokens": order},
        "share": SHARES.get(name, {}),
    }
    return weft.Layout.from_dict(data)


def attended(mine: weft.Layout, tensors, numbers: Tensor, block: int, mask, **options):
    """Leaves of this rank, and what `weft.attention` makes of them."""
    local = [mine.shard(t.detach(), DIMS).clone().requires_grad_() for t in tensors]
    dims = DIMS if numbers.shape[1] > 1 else {"batch": 0, "tokens": 2}
    choice = weft.ChosenKeys(mine.shard(numbers, dims).contiguous(), block)
    out = weft.attention(*local, mine, "tokens", mask, length=LENGTH, choice=choice, **options)
    return local, out


@covering("mesh rows block mask", tuple(MESHES), (1, KV_HEADS, HEADS), (1, 3, 5), MASKS)
def test_fetched_keys_and_their_gradients(mesh, rows, block, mask) -> None:
    layout, (q, k, v, dout), numbers = layout_of(mesh), whole_problem(), drawn(rows, block)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = reference(*leaves, mask, numbers, block)
    (out * dout).sum().backward()

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        with weft.traffic() as report:
            local, found = attended(mine, leaves, numbers, block, mask)
            (found * mine.shard(dout, DIMS)).sum().backward()
        assert report.as_predicted, report.differences()
        close(found, mine.shard(out.detach(), DIMS))
        for leaf, wanted in zip(local, leaves):
            close(leaf.grad, mine.shard(wanted.grad, DIMS))

    run_threads(layout.mesh, work)


OPTIONS = {
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS, dtype=torch.float64)},
    "logsumexp": {"return_lse": True},
    "flex": {"kernel": "flex"},
    "all": {"softcap": 2.0, "return_lse": True, "sinks": torch.zeros(HEADS, dtype=torch.float64)},
}


@pytest.mark.parametrize("mesh", ["four ranks", "ulysses outside"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_a_call_are_those_of_one_device(mesh, options) -> None:
    layout, tensors, numbers = layout_of(mesh), whole_problem(), drawn(1, 1)
    *tensors, dout = tensors

    def loss(mine: weft.Layout):
        local, result = attended(mine, tensors, numbers, 1, weft.Causal(), **OPTIONS[options])
        out, lse = result if isinstance(result, tuple) else (result, None)
        total = (out * mine.shard(dout, DIMS)).sum()
        if lse is not None:
            weight = mine.shard(dout[..., 0].contiguous(), DIMS)
            total = total + (lse.masked_fill(lse.isneginf(), 0.0) * weight).sum()
        total.backward()
        return [out, *(() if lse is None else (lse,)), *(t.grad for t in local)]

    whole = loss(weft.Layout.single())

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        for found, wanted in zip(loss(mine), whole):
            torch.testing.assert_close(
                found, mine.shard(wanted.detach(), DIMS), rtol=1e-11, atol=1e-11
            )

    run_threads(layout.mesh, work)


def test_rows_in_pieces_see_what_all_rows_do(monkeypatch) -> None:
    monkeypatch.setattr(attend, "AT_ONCE", 64)
    (q, k, v, _), numbers = whole_problem(), drawn(KV_HEADS, 3)
    out = reference(q, k, v, weft.Causal(), numbers, 3)

    def work(layout: weft.Layout) -> None:
        _, found = attended(layout, (q, k, v), numbers, 3, weft.Causal())
        close(found.detach(), layout.shard(out, DIMS))

    weft.on_threads(layout_of("zigzag"), work)


#: Layouts whose chosen latents are expanded, and the rows of a choice of each sequence.
OF_LATENTS = [("zigzag", 1), ("ulysses outside", 1), ("ulysses inside", 2), ("ulysses outside", 4)]


@pytest.mark.parametrize(("name", "chosen_rows"), [("chosen-4", 1), *OF_LATENTS])
def test_latents_are_fetched_and_expanded(name: str, chosen_rows: int) -> None:
    make = torch.Generator().manual_seed(3)
    up = torch.randn(5, 2 * 7, dtype=torch.float64, generator=make)
    q = torch.randn(2, 4, 13, 4, dtype=torch.float64, generator=make)
    c, r = (torch.randn(2, 1, 13, d, dtype=torch.float64, generator=make) for d in (5, 2))
    numbers, dout = (
        drawn(chosen_rows, 1)[:2],
        torch.randn(2, 4, 13, 5, dtype=torch.float64, generator=make),
    )

    def run(layout: weft.Layout, travel: str):
        weight = up.clone().requires_grad_()

        def expand(c: Tensor, r: Tensor):
            both = (c @ weight).squeeze(1).unflatten(-1, (2, 7)).transpose(1, 2)
            return torch.cat([both[..., :2], r.expand(-1, 2, -1, -1)], -1), both[..., 2:]

        local = [layout.shard(t, {"tokens": 2}).clone().requires_grad_() for t in (q, c, r)]
        choice = weft.ChosenKeys(layout.shard(numbers, {"tokens": 2}).contiguous())
        expansion = weft.Expansion(expand, [weight], travel=travel)
        with weft.traffic(layout) as report:
            out = weft.attention(
                *local, layout, "tokens", weft.Causal(), length=13, choice=choice, expand=expansion
            )
            (out * layout.shard(dout, {"tokens": 2})).sum().backward()
        layout_sum = layout.bound.all_reduce(weight.grad, layout.shard_dims("tokens"))
        return [out.detach(), *(t.grad for t in local)], layout_sum, report.by_tensor()

    whole, weight, _ = run(weft.Layout.single(), "keys")

    def work(layout: weft.Layout):
        moved = {}
        for travel in ("auto", "latents", "keys"):
            found, summed, moved[travel] = run(layout, travel)
            for part, wanted in zip(found, whole):
                close(part, layout.shard(wanted, {"tokens": 2}))
            close(summed, weight)
        assert moved["auto"] == moved["latents"]
        if name == "chosen-4":
            assert moved["keys"].get("kv", 0) * 7 == moved["latents"].get("kv", 0) * 18
        return moved["latents"].get("kv", 0)

    layout = weft.Layout.load(name) if name == "chosen-4" else layout_of(name)
    assert max(weft.on_threads(layout, work))


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [weft.Full(), weft.Causal()])
@pytest.mark.parametrize("name", ["four ranks", "2 x 3", "zigzag"])
def test_only_seen_and_chosen_keys_travel_each_once(name, mask) -> None:
    layout, (q, k, v, _), numbers = layout_of(name), whole_problem(), drawn(1, 1)
    row, hidden = KV_HEADS * (k.shape[3] + v.shape[3]) * 8, isinstance(mask, weft.Causal)

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        with weft.traffic() as report:
            attended(mine, (q, k, v), numbers, 1, mask)
        rows, at = mine.shard(numbers, {"tokens": 2}), mine.positions("tokens", LENGTH)
        rows = torch.where(rows > at[:, None], -1, rows) if hidden else rows
        foreign = [{*sample.flatten().tolist()} - {-1, *at.tolist()} for sample in rows]
        moved = [report.received.get((d, "kv"), 0) for d in layout.mesh]
        wanted = sum(map(len, foreign)) * row
        if len(moved) == 1:
            assert moved == [wanted]
        else:  # and what it passes on
            assert moved[-1] <= wanted <= sum(moved)
        size = BATCH * -(-LENGTH // 8)
        assert report.by_tensor()["wanted"] == size * (layout.world_size - 1)

    run_threads(layout.mesh, work)


def visible_choices(mask: weft.Mask, count: int, make: torch.Generator, clever: str) -> Tensor:
    """Numbers (1, 1, n, count) of visible keys: at random, or the first or the last ones."""
    at, zero = torch.arange(LENGTH), torch.tensor(0)
    seen = mask.allowed(zero, zero, at[:, None], at).expand(LENGTH, LENGTH)
    order = torch.rand(LENGTH, LENGTH, generator=make)
    order = {"random": order, "first": -at.double().expand_as(order)}[clever]
    best, numbers = order.masked_fill(~seen, -torch.inf).topk(count, -1)
    return numbers.masked_fill(best.isneginf(), -1)[None, None]


BOUNDED = ("chosen-4", "two dims", "2 x 3", "ulysses outside")


@pytest.mark.few(4)
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("mask", [weft.Full(), weft.Causal(), weft.Documents((6, 7))])
def test_bounds_hold_for_random_choices(name, mask) -> None:
    layout = layout_of(name) if name in MESHES else weft.Layout.load(name)
    make, count = torch.Generator().manual_seed(0), 3
    problem = Problem.of("tokens", LENGTH, heads=4, head_dim=4, dtype=torch.float64, mask=mask)
    problem = problem.__class__(**{**vars(problem), "choice": weft.choice.ChoiceKind(1, count)})
    bounds = [chosen_bounds(layout, problem, rank) for rank in range(layout.world_size)]
    tensors = torch.randn(3, 1, 4, LENGTH, 4, dtype=torch.float64, generator=make).unbind(0)
    every = [visible_choices(mask, count, make, kind) for kind in ["first"] + ["random"] * 16]

    def work(transport: Transport) -> None:
        mine = layout.on(transport)
        local = [mine.shard(t, {"tokens": 2}).requires_grad_() for t in tensors]
        for numbers in every:
            choice = weft.ChosenKeys(mine.shard(numbers, {"tokens": 2}).contiguous())
            passes = []
            with weft.traffic(mine) as report:
                out = weft.attention(*local, mine, "tokens", mask, length=LENGTH, choice=choice)
            passes.append(report)
            with weft.traffic(mine) as report:
                out.sum().backward()
            passes.append(report)
            known = {(b.backward, b.mesh_dim, b.what): b for b in bounds[transport.rank]}
            for backward, moved in enumerate(passes):
                for key, nbytes in moved.received.items():
                    bound = known[bool(backward), *key]
                    assert bound.least <= nbytes <= bound.most, (key, nbytes, bound)
            for (backward, *key), bound in known.items():
                assert bound.least <= passes[backward].received[tuple(key)]

    run_threads(layout.mesh, work)


def test_bounds_are_reached_by_constructed_choices() -> None:
    layout = weft.Layout.load("ring-2")
    data = {**layout.declaration, "attend": {"tokens": [{"strategy": "chosen", "on": "ring"}]}}
    layout, n, count = weft.Layout.from_dict(data), 8, 3
    problem = Problem.of("tokens", n, heads=1, head_dim=1, dtype=torch.float64)
    problem = problem.__class__(**{**vars(problem), "choice": weft.choice.ChoiceKind(1, count)})
    own = torch.arange(n) // 4 * 4
    fewest = (own[:, None] + torch.arange(3))[None, None]
    most = ((own[:, None] + 4 + (torch.arange(n)[:, None] + torch.arange(3)) % 4) % n)[None, None]
    x = torch.randn(1, 1, n, 1, dtype=torch.float64)
    for numbers, which in ((fewest, "least"), (most, "most")):

        def work(mine: weft.Layout, numbers=numbers) -> int:
            choice = weft.ChosenKeys(mine.shard(numbers, {"tokens": 2}).contiguous())
            t = mine.shard(x, {"tokens": 2})
            with weft.traffic(mine) as report:
                weft.attention(t, t, t, mine, "tokens", choice=choice)
            return report.by_tensor().get("kv", 0)

        for rank, moved in enumerate(weft.on_threads(layout, work)):
            (kv,) = (b for b in chosen_bounds(layout, problem, rank) if b.what == "kv")
            assert moved == getattr(kv, which)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "moves"), [("ring", "keys"), ("pass_q", "queries")])
def test_another_role_that_moves_is_refused_by_name(strategy, moves) -> None:
    layout = weft.Layout.from_dict(
        {
            "mesh": {"x": 2, "r": 2},
            "shard": {"tokens": ["x", "r"]},
            "attend": {
                "tokens": [{"strategy": strategy, "on": "x"}, {"strategy": "chosen", "on": "r"}]
            },
        }
    )
    (q, k, v, _), numbers = whole_problem(), drawn(1, 1)
    with pytest.raises(UnsupportedError, match=f"mesh dim 'x' moves {moves} as well as those that"):
        weft.on_threads(layout, lambda mine: attended(mine, (q, k, v), numbers, 1, weft.Full()))


@pytest.mark.parametrize("mesh", ["zigzag", "two dims", "ulysses outside"])
def test_without_a_choice_all_keys_travel(mesh) -> None:
    case = exact.Case(lengths=exact.tokens(LENGTH), mask=weft.Causal(), lse_gradient=True)
    exact.assert_exact(layout_of(mesh), case)


@pytest.mark.parametrize("bias", [weft.alibi(torch.ones(HEADS)), torch.zeros(1, 1, 4, LENGTH)])
def test_a_bias_beside_fetched_keys_is_refused(bias) -> None:
    (q, k, v, _), numbers = whole_problem(), drawn(1, 1)
    with pytest.raises(UnsupportedError, match="take no bias"):
        weft.on_threads(
            weft.Layout.load("chosen-4"),
            lambda mine: attended(mine, (q, k, v), numbers, 1, weft.Full(), bias=bias),
        )


def test_numbers_of_no_key_are_refused_on_every_rank() -> None:
    (q, k, v, _), numbers = whole_problem(), drawn(1, 1)
    numbers[:, :, -1] = LENGTH

    def work(mine: weft.Layout) -> str:
        with pytest.raises((ShapeError, weft.RankError), match="number 13"):
            attended(mine, (q, k, v), numbers, 1, weft.Full())
        return "refused"

    assert weft.on_threads(weft.Layout.load("chosen-4"), work) == ["refused"] * 4


def test_unchecked_numbers_of_no_key_choose_nothing() -> None:
    (q, k, v, _), numbers = whole_problem(), drawn(1, 1)
    other = torch.where(numbers < 0, LENGTH + 5, numbers)
    wanted = reference(q, k, v, weft.Full(), numbers, 1)

    def work(mine: weft.Layout) -> None:
        local = [mine.shard(t, {"tokens": 2}) for t in (q, k, v)]
        choice = weft.ChosenKeys(mine.shard(other, {"tokens": 2}), check=False)
        out = weft.attention(*local, mine, "tokens", length=LENGTH, choice=choice)
        close(out, mine.shard(wanted, {"tokens": 2}))

    weft.on_threads(weft.Layout.load("chosen-4"), work)


def test_one_axis_has_one_who_chooses() -> None:
    layout = weft.Layout.from_dict(
        {
            "mesh": {"x": 2, "r": 2},
            "shard": {"tokens": ["x", "r"]},
            "attend": {
                "tokens": [{"strategy": "routed", "on": "x"}, {"strategy": "chosen", "on": "r"}]
            },
        }
    )
    with pytest.raises(DeclarationError, match="or without one: routed, chosen"):
        layout.routing("tokens")


def test_a_second_derivative_is_refused() -> None:
    (q, k, v, _), numbers = whole_problem(), drawn(1, 1)

    def work(mine: weft.Layout) -> None:
        local, out = attended(mine, (q, k, v), numbers, 1, weft.Full())
        (grad,) = torch.autograd.grad(out.square().sum(), local[1], create_graph=True)
        with pytest.raises(UnsupportedError, match="no second derivative"):
            grad.sum().backward()

    weft.on_threads(layout_of("one rank"), work)


def _on_processes(rank: int, name: str) -> float:
    layout = weft.Layout.load(name).build("cpu")
    (q, k, v, dout), numbers = whole_problem(), drawn(1, 1)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = reference(*leaves, weft.Causal(), numbers, 1)
    (out * dout).sum().backward()
    local, found = attended(layout, leaves, numbers, 1, weft.Causal())
    (found * layout.shard(dout, DIMS)).sum().backward()
    pairs = [(found, out), *((a.grad, b.grad) for a, b in zip(local, leaves))]
    return max((a - layout.shard(b.detach(), DIMS)).abs().max().item() for a, b in pairs)


def test_real_processes_fetch_the_same(pool) -> None:
    assert max(pool.run(_on_processes, "chosen-4")) < 1e-12


def test_a_rank_without_sequences_fetches_nothing() -> None:
    declared = {
        "mesh": {"dp": 2, "r": 2},
        "shard": {"batch": ["dp"], "tokens": ["r"]},
        "attend": {"tokens": [{"strategy": "chosen", "on": "r"}]},
    }
    q, numbers = torch.randn(1, 2, 8, 4, dtype=torch.float64), torch.arange(8).view(1, 1, 8, 1)

    def work(layout: weft.Layout) -> None:
        dims = {"batch": 0, "tokens": 2}
        local = layout.shard(q, dims).clone().requires_grad_()
        choice = weft.ChosenKeys(layout.shard(numbers, dims).contiguous())
        out = weft.attention(local, local, local, layout, "tokens", choice=choice)
        out.sum().backward()
        close(out.detach(), layout.shard(q, dims))
        assert local.grad.shape == local.shape

    weft.on_threads(weft.Layout.from_dict(declared), work)


def test_an_axis_without_keys_gives_zeros() -> None:
    declared = {
        "mesh": {"r": 2},
        "shard": {"tokens": ["r"]},
        "attend": {"tokens": [{"strategy": "chosen", "on": "r"}]},
    }

    def work(layout: weft.Layout) -> None:
        q, k, v = (torch.randn(1, 2, n, d, requires_grad=True) for n, d in ((3, 4), (0, 4), (0, 5)))
        choice = weft.ChosenKeys(torch.full((1, 1, 3, 2), -1))
        options = {"length": (6, 0), "return_lse": True}
        out, lse = weft.attention(q, k, v, layout, "tokens", choice=choice, **options)
        out.sum().backward()
        assert out.shape == (1, 2, 3, 5)
        assert lse.isneginf().all()
        assert not out.any()
        assert not q.grad.any()
        assert (k.grad.shape, v.grad.shape) == (k.shape, v.shape)

    weft.on_threads(weft.Layout.from_dict(declared), work)


def test_bounds_of_a_choice_of_each_head_are_refused() -> None:
    layout, kind = layout_of("four ranks"), weft.ChosenKeys(drawn(HEADS, 1)).kind
    problem = Problem.of("tokens", LENGTH, heads=HEADS, kv_heads=KV_HEADS, head_dim=4)
    with pytest.raises(UnsupportedError, match="all heads of a key share"):
        chosen_bounds(layout, replace(problem, choice=kind), 0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_that_is_a_function_hides_fetched_keys(causal) -> None:
    mask = weft.MaskMod(lambda b, h, q, kv: (q + kv) % 3 != 1)
    mask = mask & weft.Causal() if causal else mask
    test_fetched_keys_and_their_gradients("four ranks", 1, 1, mask)
