"""Layouts: what a file may say, where tensors then lie, and sums over unequal ranks."""

import itertools
import re
import tomllib

import pytest
import torch
from torch import nn

from weft._torch import one_dim
from weft.comm import run_threads
from weft.declare import catalog
from weft.errors import DeclarationError
from weft.layout import Layout
from weft.plan.order import ORDERS
from weft.threads import on_threads

RING = {
    "mesh": {"ring": 2},
    "shard": {"tokens": ["ring"]},
    "attend": {"tokens": [{"strategy": "ring", "on": "ring"}]},
}
TILE = {
    "mesh": {"row": 2, "col": 2},
    "shard": {"tokens": ["row", "col"]},
    "attend": {"tokens": [{"strategy": "mesh_tile", "on": {"row": "row", "col": "col"}}]},
}


def _ring(**changes) -> dict:
    return RING | changes


REFUSED = [
    ({"mehs": {}}, "unknown key 'mehs'; did you mean 'mesh'"),
    ({"reproducible": True}, "the same bits on every layout, is gone; leave it out"),
    ({"mesh": {"ring": "two"}}, "mesh.ring"),
    ({"mesh": {"ring": 0}}, "mesh.ring = 0"),
    (_ring(mesh={"ring": True}), "mesh.ring = True: give a whole number"),
    ({"mesh": {"a": -1, "b": -1}, "replicate": ["a", "b"]}, "only one size may be -1"),
    ({"mesh": {"ring": 2}}, "'ring' is unused"),
    (_ring(shard={"tokens": ["rnig"]}), "no mesh dim 'rnig'; did you mean 'ring'"),
    (_ring(replicate=["ring"]), "already used by 'replicate'"),
    (_ring(shard={"tokens": ["ring"], "rows": ["ring"]}), "a mesh dim splits one axis"),
    (_ring(order={"tokens": "zigzg"}), "did you mean 'zigzag'"),
    (_ring(order={"rows": "zigzag"}), "order.rows: the axis is not split"),
    (_ring(attend={"tokens": []}), "splits the axis but no strategy claims it"),
    (_ring(attend={"tokens": [{"strategy": "rnig", "on": "ring"}]}), "did you mean 'ring'"),
    (_ring(attend={"tokens": [{"strategy": "ring", "on": "rng"}]}), "no mesh dim 'rng'"),
    (_ring(attend={"tokens": [{"strategy": "ring"}]}), "'on' binds []"),
    (_ring(attend={"tokens": [{"strategy": "mesh_tile", "on": "ring"}]}), "must map each"),
    (_ring(attend={"tokens": [{"strategy": "ring", "on": "ring", "over": 1}]}), "over"),
    (
        _ring(attend={"tokens": [{"strategy": s, "on": "ring"} for s in ("ring", "pass_q")]}),
        "'ring' is claimed twice (also by 'ring')",
    ),
    (
        _ring(attend={"tokens": [{"strategy": "head_parallel", "on": "ring"}]}),
        "has queries at rest as S(head), but there the layout has S(seq)",
    ),
    (
        _ring(attend={"rows": [{"strategy": "ring", "on": "ring"}]}),
        "has queries at rest as S(seq), but there the layout has S(batch)",
    ),
    (TILE | {"shard": {"tokens": ["col", "row"]}}, "list mesh dims in mesh order"),
    (
        TILE | {"attend": {"tokens": [{"strategy": "ring", "on": "row"}]}},
        "mesh dim 'col' splits the axis but no strategy claims it",
    ),
    (_ring(rates={"bandwith": 1e9}), "unknown key 'rates.bandwith'; did you mean 'bandwidth'"),
    (_ring(rates={"bandwidth": -1.0}), "rates.bandwidth = -1.0"),
    (_ring(rates={"latency": 2147483648}), "rates.latency = 2147483648: "),
    (_ring(share={"ring": [1e308, 1e308]}), "share.ring.0 = 1e+308: "),
    (_ring(rates={"latency": False}), "rates.latency = False: give a number"),
    (_ring(rates={"level": [{"name": "a", "rate": True}]}), "rates.level.0.rate = True: give a nu"),
    (_ring(rates={"level": [{"name": "a"}]}), "rates.level: level 'a' has no rate; give bytes per"),
    (
        _ring(rates={"latency": 0.0, "level": [{"name": "a", "rate": 1e9}]}),
        "rates: bandwidth and latency are those of one level of links; leave them out",
    ),
    (
        _ring(mesh={"ring": 4}, rates={"level": [{"name": "a", "ranks": 2, "rate": 1e9}]}),
        "rates.level: the levels join 2 ranks, but the mesh has 4; leave out ranks of the outer",
    ),
]


@pytest.mark.parametrize(("data", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_bad_layout_is_refused_by_file_and_reason(data, reason):
    with pytest.raises(DeclarationError, match=re.escape(reason)) as caught:
        Layout.from_dict(data, source="my/layout.toml")
    assert str(caught.value).startswith("my/layout.toml")


def test_a_file_s_name_begins_no_line_of_an_error(tmp_path):
    path = tmp_path / "a\nerror: forged.toml"
    path.write_text("[mesh]\nring = 0\n")
    with pytest.raises(DeclarationError) as error:
        Layout.load(path)
    assert "error: forged" not in str(error.value).splitlines()
    assert r"a\nerror: forged.toml" in str(error.value)


@pytest.mark.parametrize("name", catalog.names("layouts"))
def test_shipped_layouts_load_and_attend_what_they_split(name):
    layout = Layout.load(name)
    assert layout.about
    assert set(layout.sharding) - {"heads", "batch"} <= {
        axis for key in layout.attend for axis in key.split("+")
    }
    for axis in layout.attend:
        assert set(layout.rules(axis)) == set(layout.mesh)


def test_ranks_must_agree_on_rates_that_programs_are_planned_by():
    rated = Layout.from_dict(_ring(rates={"bandwidth": 1e9}))
    assert rated.rates == {"bandwidth": 1e9}
    assert rated.digest != Layout.from_dict(RING).digest


def test_byte_order_mark_before_layout_is_no_part_of_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(Layout.load("ring-2").to_toml(), encoding="utf-8-sig")
    assert Layout.load(path).mesh == {"ring": 2}
    with pytest.raises(DeclarationError, match=r"is a folder; give a \.toml file in it"):
        Layout.load(tmp_path)


def test_a_file_of_ones_own_is_read_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((catalog.folder("layouts") / "tile-2x4.toml").read_text())
    assert Layout.load(path) == Layout.load("tile-2x4")
    with pytest.raises(DeclarationError, match=r"there is no file '.*none\.toml'$"):
        Layout.load(tmp_path / "none.toml")


def test_paths_of_strategies_are_relative_to_file_that_names_them(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.toml").write_text(
        (catalog.folder("strategies") / "ring.toml").read_text()
    )
    layout = tmp_path / "layout.toml"
    layout.write_text(
        '[mesh]\nr = 2\n[shard]\ntokens = ["r"]\n'
        '[attend]\ntokens = [{ strategy = "./own/mine.toml", on = "r" }]\n'
    )
    monkeypatch.chdir("/")
    assert Layout.load(layout).rules("tokens")["r"].role == "query"
    monkeypatch.chdir(tmp_path)
    assert Layout.load("layout.toml").rules("tokens")["r"].role == "query"
    layout.write_text(layout.read_text().replace("own/", "other/"))
    with pytest.raises(DeclarationError, match=r"there is no file '.*/other/mine\.toml'"):
        Layout.load(layout)


def test_one_size_may_be_what_the_world_leaves():
    layout = Layout.from_dict(TILE | {"mesh": {"row": -1, "col": 2}})
    assert layout.resolve(6).mesh == {"row": 3, "col": 2}
    with pytest.raises(DeclarationError, match="7 ranks cannot be divided by the 2"):
        layout.resolve(7)
    with pytest.raises(DeclarationError, match="has 4 ranks, but there are 3; start 4 ranks"):
        Layout.from_dict(TILE).resolve(3)


def test_axis_that_split_but_not_attended_refused_when_asked_for():
    with pytest.raises(DeclarationError, match=r"'rows' is split over .* \[attend\] does not say"):
        Layout.from_dict(RING | {"shard": {"rows": ["ring"]}, "attend": {}}).rules("rows")


def test_a_layout_must_be_built_before_it_is_used():
    with pytest.raises(DeclarationError, match="this layout is only declared"):
        Layout.from_dict(RING).positions("tokens", 4)


SPLITS = {
    "one dim": ({"a": 3}, {"x": ["a"]}),
    "two dims": ({"a": 2, "b": 3}, {"x": ["a", "b"]}),
    "two axes": ({"a": 2, "b": 3}, {"x": ["a"], "y": ["b"]}),
    "inner axis": ({"a": 2, "b": 2, "c": 2}, {"x": ["a", "c"], "y": ["b"]}),
    "more ranks than tokens": ({"a": 2, "b": 4}, {"x": ["a", "b"]}),
    "a size of one": ({"a": 1, "b": 3}, {"x": ["a", "b"]}),
}


def _split(name: str, order: str) -> Layout:
    mesh, shard = SPLITS[name]
    orders = dict.fromkeys(shard, order)
    return Layout.from_dict({"mesh": mesh, "shard": shard, "order": orders})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SPLITS)
def test_shard_and_gather_inverse_and_positions_say_where_tokens_are(name, order):
    layout = _split(name, order)
    for n, m in ((12, 6), (7, 5), (3, 1)):
        whole = torch.randn(2, n, 3, m, dtype=torch.float64)
        dims = {"x": 1, "y": -1}

        def rank(transport, whole=whole, dims=dims, n=n, m=m):
            here = layout.on(transport)
            mine = here.shard(whole, dims)
            x, y = here.positions("x", n), here.positions("y", m)
            assert torch.equal(mine, whole[:, x][..., y])
            assert mine.shape[1::2] == (here.local_length("x", n), here.local_length("y", m))
            assert torch.equal(here.gather(mine, dims), whole)
            return x.tolist()

        ranks = run_threads(layout.mesh, rank, timeout=20)
        assert sorted(set(itertools.chain(*ranks))) == list(range(n))


COUNTS = [(3, 5, 0, 1), (0, 0, 0, 4), (2, 2, 2, 2)]


@pytest.mark.parametrize("counts", COUNTS)
def test_a_mean_is_over_tokens_not_ranks_with_its_gradient(counts):
    layout = Layout.from_dict({"mesh": {"a": 2, "b": 2}, "shard": {"x": ["a"], "batch": ["b"]}})
    tokens = torch.randn(sum(counts), 3, dtype=torch.float64)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    wanted = (tokens @ weight).square().mean()
    wanted.backward()

    def rank(transport):
        here = layout.on(transport)
        module = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        module.weight.data = weight.detach().clone()[None]
        unused = nn.utils.skip_init(nn.Linear, 2, 1, dtype=torch.float64)
        nn.init.ones_(unused.weight)
        nn.init.ones_(unused.bias)
        mine = tokens.split(counts)[here.rank]
        loss = here.mean(module(mine).square().sum(), len(mine))
        loss.backward()
        here.sync_gradients(nn.ModuleList([module, unused]))
        assert all(p.grad is None for p in unused.parameters())
        return loss.item(), module.weight.grad[0]

    for loss, grad in run_threads(layout.mesh, rank, timeout=20):
        assert loss == pytest.approx(wanted.item(), rel=1e-14)
        torch.testing.assert_close(grad, weight.grad, rtol=1e-13, atol=1e-14)


def test_gradients_are_summed_over_dims_that_split_data():
    layout = Layout.from_dict(
        {
            "mesh": {"tp": 2, "dp": 2, "copy": 2},
            "shard": {"heads": ["tp"], "batch": ["dp"]},
            "replicate": ["copy"],
        }
    )

    def rank(transport):
        here = layout.on(transport)
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        module.weight.grad = torch.full((1, 1), 10.0 ** here.coords["dp"]) * (1 + here.coords["tp"])
        here.sync_gradients(module)
        return module.weight.grad.item()

    assert run_threads(layout.mesh, rank, timeout=20) == [11.0] * 4 + [22.0] * 4


def test_gradients_of_sums_over_axes_are_their_transposes():
    layout = Layout.from_dict(
        {"mesh": {"tp": 2, "s": 3}, "shard": {"heads": ["tp"], "tokens": ["s"]}}
    )

    def rank(transport):
        here = layout.on(transport)
        x = [torch.full((2,), 1.0 + here.rank, requires_grad=True) for _ in range(5)]
        outs = (
            here.enter(here.sum(x[0], "tokens"), "tokens"),
            here.enter(x[1], "heads"),
            here.sum(x[2], "heads"),
            here.once(x[3]),
            here.once(x[4], "heads"),
        )
        weight = 10.0**here.rank
        sum(out.sum() * weight for out in outs).backward()
        return [out[0].item() for out in outs], [t.grad[0].item() for t in x]

    ranks = run_threads(layout.mesh, rank, timeout=20)
    for r, (outs, grads) in enumerate(ranks):
        row, col = [3 * (r // 3) + i for i in range(3)], [r % 3, r % 3 + 3]
        own = 1.0 + r
        assert outs == [sum(1.0 + i for i in row), own, sum(1.0 + i for i in col), own, own]
        assert grads == [
            sum(10.0**i for i in row),
            sum(10.0**i for i in col),
            10.0**r,
            pytest.approx(10.0**r / 3),
            10.0**r / 2,
        ]


def _distributed(rank: int, length: int, order: str) -> list[bool]:
    data = {"mesh": {"row": 2, "col": 2}, "shard": {"tokens": ["row", "col"]}}
    layout = Layout.from_dict(data | {"order": {"tokens": order}})
    layout = layout.build("cpu", timeout=20)
    mesh = layout.device_mesh
    one_dim(mesh, ("row", "col"), "weft_data")  # as weft.data_parallel does
    whole = torch.arange(length * 3, dtype=torch.float64).view(length, 3)
    placed = layout.distribute(whole, {"tokens": 0})
    stored = placed.full_tensor()
    direct = torch.distributed.tensor.distribute_tensor(stored, mesh, placed.placements)
    return [
        torch.equal(layout.gather(placed.to_local(), {"tokens": 0}), whole),
        torch.equal(direct.to_local(), placed.to_local()),
        torch.equal(placed.to_local(), layout.shard(whole, {"tokens": 0})),
        tuple(placed.shape) == (length, 3),
        order != "contiguous" or torch.equal(stored, whole),
    ]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("length", [8, 9, 3])
def test_a_dtensor_lies_as_dtensor_itself_would_lay_it(pool, length, order):
    for checks in pool.run(_distributed, length, order):
        assert all(checks), checks


@pytest.mark.parametrize("name", ["tile-striped-2x2", "ring-zigzag-4"])
def test_gathering_is_differentiable_for_a_loss_that_all_ranks_compute(name):
    layout = Layout.load(name)
    whole = torch.arange(11.0)

    def rank(bound):
        mine = bound.shard(whole, {"tokens": 0}).requires_grad_()
        bound.gather(mine, {"tokens": 0}).square().sum().backward()
        return torch.equal(mine.grad, 2 * mine.detach())

    assert all(on_threads(layout, rank))


# -- what recurrent layers do ---------------------------------------------------------------------

USP = {
    "mesh": {"u": 2, "r": 2},
    "shard": {"tokens": ["u", "r"]},
    "attend": {"tokens": [{"strategy": "ulysses", "on": "u"}, {"strategy": "ring", "on": "r"}]},
}


def carry(*strategies: str) -> dict:
    """A [carry] table of strategies on the mesh dims u and r."""
    return {"carry": {"tokens": [{"strategy": s, "on": d} for s, d in zip(strategies, "ur")]}}


def test_layout_that_says_nothing_carries_states_on_all_mesh_dims():
    silent, explicit = Layout.from_dict(USP), Layout.from_dict(USP | carry("state", "state"))
    for layout in (silent, explicit):
        assert layout.state_transport("tokens") == "auto"
        assert layout.carries_by_heads("tokens") == ()


def test_carry_says_how_states_travel_and_what_goes_by_heads():
    layout = Layout.from_dict(USP | carry("ulysses", "state_chain"))
    assert layout.state_transport("tokens") == "chain"
    assert layout.carries_by_heads("tokens") == ("u",)
    assert layout != Layout.from_dict(USP)
    again = Layout.from_dict(tomllib.loads(layout.to_toml()))
    assert again == layout


def test_a_line_may_be_carried_only():
    layout = Layout.parse("batch: dp=2; tokens(zigzag): state_chain=4")
    assert layout.attend == {}
    assert layout.shard_dims("tokens") == ("state_chain",)
    assert layout.state_transport("tokens") == "chain"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (carry("ring", "state"), "a recurrence is carried along its tokens ('state')"),
        (carry("state"), "mesh dim 'r' splits the axis but no strategy claims it"),
        (carry("state", "state_chain"), "a state travels in one way"),
        (carry("state", "state") | {"order": {"tokens": "striped"}}, "or 'ulysses'"),
        (carry("stat", "state"), "did you mean 'state'"),
        ({"carry": {"token": [{"strategy": "state", "on": "u"}]}}, "does not split the axis"),
        ({"carry": {"tokens": [{"strategy": "state", "on": "u"}] * 2}}, "claimed twice"),
        ({"attend": {"tokens": [{"strategy": "state", "on": "u"}]}}, "name it in [carry]"),
        (
            {"carry": {"tokens": [{"strategy": "state", "on": "x"}]}},
            "carry.tokens: no mesh dim 'x'",
        ),
        ({"cary": {}}, "did you mean 'carry'"),
    ],
)
def test_what_carries_no_state_is_refused(change, reason):
    with pytest.raises(DeclarationError) as caught:
        Layout.from_dict(USP | change)
    assert reason in str(caught.value)
