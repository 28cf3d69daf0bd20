"""Gradients: summed once, in one of three ways, and everything else is refused."""

import contextlib
import copy
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weft
from weft import DeclarationError, Layout, ShapeError, UnsupportedError
from weft.checkpoint import Checkpoints
from weft.comm import Transport
from weft.layout import check_same_data_ranks
from weft_axes.gradients import sync as sums
from weft_models.models import ModelSpec, compose
from weft_models.train import clip_grad_norm_, data_parallel, stream

RING = "tokens: ring=2"
SPEC = ModelSpec.load("causal_lm")
SPEC = SPEC.model_copy(
    update={"train": SPEC.train.model_copy(update={"length": {"tokens": (13, 21)}, "batch": 4})}
)


# -- sync_gradients -------------------------------------------------------------------------------


class Three(nn.Module):
    """Parameters that all ranks, only rank 1, and no rank use."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.all, self.one, self.none = (
            nn.Parameter(torch.randn(3, generator=generator)) for _ in range(3)
        )

    def forward(self, rank):
        loss = (self.all * (rank + 1)).sum()
        return loss + self.one.sum() * 5 if rank == 1 else loss


def test_gradients_are_summed_and_none_stays_none():
    def rank(layout):
        model = Three()
        model(layout.rank).backward()
        layout.sync_gradients(model)
        return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]

    assert weft.on_threads(Layout.parse(RING), rank) == [[[3.0] * 3, [5.0] * 3, None]] * 2


@pytest.mark.parametrize("nbytes", [1, 20, 30, 1 << 27])
def test_gradients_are_summed_in_buckets_of_the_same_bytes(nbytes, monkeypatch):
    """Only a bucket is copied, not all gradients; a tensor that is one alone is summed in place."""
    monkeypatch.setattr(sums, "BUCKET", nbytes)
    sizes, reduce = [], Transport.all_reduce

    def note(transport, tensor, dims, label="sum"):
        if label == "gradients" and transport.rank == 0:
            sizes.append(tensor.numel())
        return reduce(transport, tensor, dims, label)

    monkeypatch.setattr(Transport, "all_reduce", note)

    def rank(layout):
        model = Three()
        model(layout.rank).backward()
        kept = model.all.grad
        with weft.traffic(layout) as moved:
            layout.sync_gradients(model)
        assert model.all.grad is kept
        grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        return grads, sum(n for (_, label), n in moved.sent.items() if label == "gradients")

    ranks = weft.on_threads(Layout.parse(RING), rank)
    nbytes_sent = 4 * 9
    assert ranks == [([[3.0] * 3, [5.0] * 3, None], nbytes_sent)] * 2
    buckets = {1: [3, 3, 3], 20: [3, 3, 3], 30: [6, 3], 1 << 27: [9]}
    assert sizes == buckets[nbytes]


def _other_numbers_of_gradients(layout):
    """Gradients of as many parameters as the mean rank has are on some ranks only."""
    model = nn.ParameterList(torch.ones(1) for _ in range(4))
    for p in list(model)[: (1, 3, 2, 2)[layout.rank]]:
        (p * (layout.rank + 1)).sum().backward()
    layout.sync_gradients(model)
    return [None if p.grad is None else p.grad.item() for p in model]


def _sparse(layout):
    model = nn.Embedding(4, 1, sparse=True)
    nn.init.ones_(model.weight)
    if layout.rank:
        model(torch.tensor([layout.rank, layout.rank, 3])).sum().backward()
    layout.sync_gradients(model)
    return model.weight.grad.flatten().tolist()


def _of_processes(rank, case):
    return case(Layout.parse("tokens: ring=4").build("cpu", timeout=20))


@pytest.mark.parametrize(
    ("case", "three", "four"),
    [
        (_other_numbers_of_gradients, [6.0, 5.0, 2.0, None], [10.0, 9.0, 2.0, None]),
        (_sparse, [0.0, 2.0, 2.0, 2.0], [0.0, 2.0, 2.0, 5.0]),
    ],
)
def test_ranks_have_gradients_of_other_parameters_and_rows(pool, case, three, four):
    assert weft.on_threads(Layout.parse("tokens: ring=3"), case) == [three] * 3
    assert pool.run(_of_processes, case) == [four] * 4


def test_second_sum_is_refused_and_a_next_step_is_not():
    def rank(layout):
        texts = []
        model = Three()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for to_none in (True, False, True):
            model(layout.rank).backward()
            layout.sync_gradients(model)
            clip_grad_norm_(model, 1.0, layout)
            for again in (True, False):
                if again:
                    model(layout.rank).backward()  # a micro-batch more
                with pytest.raises(UnsupportedError) as refused:
                    layout.sync_gradients(model)
                texts.append(str(refused.value))
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        return texts

    for texts in weft.on_threads(Layout.parse(RING), rank):
        assert len(texts) == 6
        for text in texts:
            assert "the gradient of 'all' holds a sum over ranks already" in text


def test_a_norm_of_gradients_that_are_not_summed_is_refused():
    def rank(layout):
        model = Three()
        model(layout.rank).backward()
        with pytest.raises(UnsupportedError, match=r"sync_gradients.model. before clip_grad_norm_"):
            clip_grad_norm_(model, 1.0, layout)

    weft.on_threads(Layout.parse(RING), rank)


def test_the_layout_that_sums_is_the_models():
    def rank(layout):
        model = nn.Sequential(compose(SPEC, layout))
        alike, other = (
            weft.on_threads(Layout.parse(line), lambda bound: bound)[layout.rank]
            for line in ("tokens: ulysses=2 x ring=2", "heads: tp=2; tokens: ring=2")
        )
        check_same_data_ranks(model, alike)
        with pytest.raises(DeclarationError, match=r"ranks \[.*is on .*call it on the layout that"):
            other.sync_gradients(model)

    weft.on_threads(Layout.parse("tokens: tile=2x2"), rank)


def test_micro_batches_add_up_before_the_sum():
    def rank(layout):
        model = Three()
        for _ in range(3):
            model(layout.rank).backward()
        layout.sync_gradients(model)
        return model.all.grad.tolist()

    assert weft.on_threads(Layout.parse(RING), rank) == [[9.0] * 3] * 2


def test_weights_that_differ_are_found_by_name_on_every_rank():
    def rank(layout):
        model = Three(seed=0)
        with torch.no_grad():
            model.one[2] += 1e-6 * layout.rank
        model(layout.rank).backward()
        with pytest.raises(ShapeError) as refused:
            layout.sync_gradients(model)
        return str(refused.value)

    for text in weft.on_threads(Layout.parse(RING), rank):
        assert "'one' differs (1 of 3 parameters do); draw them from one seed" in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_any_single_bit_changes_a_fingerprint(dtype):
    from weft.comm.consistency import fingerprint

    base = torch.randn(5, 3, dtype=dtype)
    seen = {int(fingerprint(base))}
    kind = {2: torch.int16, 8: torch.int64}[base.itemsize]
    for i in range(base.numel()):
        for bit in range(base.itemsize * 8 - 1):
            other = base.clone()
            other.view(kind).view(-1)[i] ^= 1 << bit
            seen.add(int(fingerprint(other)))
    assert len(seen) == 1 + base.numel() * (base.itemsize * 8 - 1)
    assert int(fingerprint(base.flip(0))) not in seen


# -- keys split over ranks that have queries whole -------------------------------------------------

KEYS_ONLY = ["tokens: kv_parallel=2", "batch: dp=2; tokens: kv_parallel=2", "tokens: local"]


def _attended(layout, trained):
    """A module of projections and a learned bias; those named in `trained` have gradients."""
    g = torch.Generator().manual_seed(0)
    x, far = torch.randn(2, 4, 1, 12, 8, dtype=torch.float64, generator=g)
    table = torch.randn(1, 1, 12, 12, dtype=torch.float64, generator=g)
    model = nn.ParameterDict({n: torch.randn(8, 8, generator=g).double() for n in "qkvo"})
    model["bias"] = table
    for name, p in model.items():
        p.requires_grad_(name in trained)
    dims = {"batch": 0, "tokens": 2}
    mine, seen = layout.shard(x, dims), layout.shard(far, dims, keys=["tokens"])
    tile = weft.bias_tile(model["bias"], layout, "tokens")
    q, k, v = mine @ model["q"], seen @ model["k"], seen @ model["v"]
    out = weft.attention(q, k, v, layout, "tokens", length=12, bias=tile) @ model["o"]
    layout.mean(out.square().sum(), out.numel()).backward()
    return model


def _wanted(name):
    return _attended(Layout.single(), name)[name].grad


@pytest.mark.parametrize("line", KEYS_ONLY[:2])
@pytest.mark.parametrize("name", ["k", "v", "bias"])
def test_gradients_of_own_keys_alone_are_refused_on_every_rank(line, name):
    def rank(layout):
        model = _attended(layout, ["q", name])
        before = model[name].grad.clone()
        words = rf"\('kv_parallel',\) split keys .* '{name}' differs .*\(1 of 2 do\).*pass_q"
        with pytest.raises(UnsupportedError, match=words):
            layout.sync_gradients(model)
        assert torch.equal(model[name].grad, before)
        layout.bound.all_reduce(model[name].grad, ["kv_parallel"])  # what the message names
        layout.sync_gradients(model)
        torch.testing.assert_close(model[name].grad, _wanted(name))

    weft.on_threads(Layout.parse(line), rank)


@pytest.mark.parametrize("line", KEYS_ONLY)
def test_gradients_of_whole_queries_need_no_sum(line):
    def rank(layout):
        model = _attended(layout, ["q", "o"])
        layout.sync_gradients(model)
        for name in ("q", "o"):
            torch.testing.assert_close(model[name].grad, _wanted(name))

    weft.on_threads(Layout.parse(line), rank)


@pytest.mark.parametrize("line", KEYS_ONLY[:2])
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_wrappers_warn_of_training_where_only_keys_are_split(line, way):
    layout, built = Layout.parse(line), pytest.raises(DeclarationError, match="build the layout")
    words = r"\('kv_parallel',\) split keys .*sync_gradients.*requires_grad_\(False\)"
    with pytest.warns(UserWarning, match=words) as caught, built:
        data_parallel(Three(), layout, way)
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]
    with warnings.catch_warnings(action="error"), pytest.raises(DeclarationError, match="build"):
        data_parallel(Three().requires_grad_(False), layout, way)


def _with_a_cache(rank: int, line: str) -> list[float]:
    """Gaps of scores to those of one process, and of gradients of what makes queries alone."""
    layout = Layout.parse(line).build("cpu", timeout=60)
    cells = torch.randn(2, 12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cells[..., -1] = torch.arange(12) % 3
    alone = compose("tabular", dtype=torch.float64).eval()
    whole = {"batch": 2, "rows": 8, "features": 5}
    kept = alone.fit(cells[:, :8])
    dims = {"batch": 0, "rows": 1}
    before = Layout.parse("batch: dp=2; rows: ring=2").build("cpu", timeout=60)
    maker = compose("tabular", before, dtype=torch.float64).eval()
    cache = maker.fit(before.shard(cells[:, :8], dims), lengths=whole).to(layout)
    with pytest.warns(UserWarning, match="split keys"):
        model = weft.data_parallel(compose("tabular", layout, dtype=torch.float64).eval(), layout)
    test, lengths = layout.shard(cells[:, 8:], {"batch": 0}), whole | {"rows": 4}
    found = model.predict(test, cache, lengths=lengths)
    gaps = [(found - layout.shard(alone.predict(cells[:, 8:], kept), {"batch": 0})).abs().max()]
    loss = model(test, train=0, lengths=lengths, cache=cache).square().sum()
    layout.mean(loss, 1).backward()
    alone(cells[:, 8:], train=0, cache=kept).square().sum().div(2).backward()
    for p, one in zip(model.parameters(), alone.parameters()):
        if one.grad is not None:
            gaps.append(
                (p.grad.full_tensor() - one.grad).abs().max() / (1e-9 + one.grad.abs().max())
            )
    return [gap.item() for gap in gaps]


def test_cache_predicted_from_and_tuned_for_where_only_keys_split(pool):
    for gaps in pool.run(_with_a_cache, "batch: dp=2; rows: kv_parallel=2; features: local"):
        assert len(gaps) > 10
        assert max(gaps) < 1e-9


# -- three ways, on processes ---------------------------------------------------------------------

LAYOUTS = {
    "dp x ring": {
        "mesh": {"dp": 2, "ring": 2},
        "shard": {"batch": ["dp"], "tokens": ["ring"]},
        "attend": {"tokens": [{"strategy": "ring", "on": "ring"}]},
    },
    "ring x heads": {
        "mesh": {"ring": 2, "tp": 2},
        "shard": {"tokens": ["ring"], "heads": ["tp"]},
        "attend": {"tokens": [{"strategy": "ring", "on": "ring"}]},
    },
}


#: A program's names of the mesh dims, one of which the layout has for another.
RENAMED = {
    "dp x ring": {"dp": "replica", "ring": "cp"},
    "ring x heads": {"ring": "cp", "tp": "ring"},
}


def built(declaration):
    return Layout.from_dict(declaration).build("cpu", timeout=60)


def bound(name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(RENAMED[name].values()))
    return Layout.from_dict(LAYOUTS[name]).bind(mesh, RENAMED[name], timeout=60)


def steps(layout, way, first=0, count=3, folder=None):
    """Losses and norms of a few clipped steps; goes on from, and leaves, a checkpoint."""
    model = trained = compose(SPEC, layout, seed=3, dtype=torch.float64)
    if way != "sync":
        trained = data_parallel(model, layout, way)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    data, found = stream(SPEC, layout, seed=1), []
    if folder:
        assert Checkpoints(folder, layout).load(trained, optimizer).step == first
    for number in range(first, first + count):
        batch = data.batch(number)
        scores = trained(batch.inputs, **batch.given)
        loss = nn.functional.cross_entropy(
            scores.flatten(0, 1), batch.targets.flatten(), reduction="sum"
        )
        loss = layout.mean(loss, batch.targets.numel())
        loss.backward()
        if way == "sync":
            layout.sync_gradients(model)
        else:
            for refused in (model, trained):
                with pytest.raises(UnsupportedError, match="a model takes one of: sync_gradients"):
                    layout.sync_gradients(refused)
        norm = clip_grad_norm_(trained, 0.1, layout)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), norm.item()]
    if folder:
        Checkpoints(folder, layout).save(first + count, trained, optimizer)
    return found


def _three_ways(rank, name, way, folder):
    way, *renamed = way.split()
    layout = bound(name) if renamed else built(LAYOUTS[name])
    return steps(layout, way, 0, 2, folder) + steps(layout, way, 2, 1, folder)


CASES = [
    ("dp x ring", "sync"),
    pytest.param("dp x ring", "ddp", marks=pytest.mark.sample),
    ("dp x ring", "fsdp"),
    pytest.param("ring x heads", "fsdp", marks=pytest.mark.sample),
    ("ring x heads", "sync renamed"),
    ("dp x ring", "ddp renamed"),
    ("ring x heads", "fsdp renamed"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_every_way_trains_like_one_device_and_resumes(name, way, pool, tmp_path):
    wanted = steps(Layout.single(), "sync", count=4)
    for found in pool.run(_three_ways, name, way, str(tmp_path)):
        assert found == pytest.approx(wanted[:6], rel=1e-10)
    rest = steps(Layout.single(), "sync", 3, 1, tmp_path)
    assert rest == pytest.approx(wanted[6:], rel=1e-10)


def _on_a_slice(rank):
    """Norms of a model that FSDP2 shards over (dp, cp), by layouts of all and of a part of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    whole(torch.ones(1, 3, dtype=torch.float64)).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()]
    everyone = mesh["dp", "cp"]._flatten("everyone")
    for on in (everyone, mesh):  # the second replicates over dp
        for layout in (
            Layout.parse(RING).bind(mesh["cp"], rename={"ring": "cp"}, timeout=20),
            Layout.parse("tokens: ring=4").bind(everyone, {"ring": "everyone"}, timeout=20),
            Layout.single(),
        ):
            model = copy.deepcopy(whole)
            fully_shard(model, mesh=on)
            model(torch.ones(1, 3, dtype=torch.float64)).square().sum().backward()
            norms.append(clip_grad_norm_(model, 0.5, layout).item())
            for p, one in zip(model.parameters(), whole.parameters()):
                torch.testing.assert_close(p.grad.full_tensor(), one.grad)
    return norms


def test_parameters_on_larger_mesh_than_the_layouts_have_one_norm(pool):
    for norms in pool.run(_on_a_slice):
        assert norms == pytest.approx(norms[:1] * 7, rel=1e-12)


def _refusals(rank):
    heads, data = built(LAYOUTS["ring x heads"]), built(LAYOUTS["dp x ring"])
    text = []
    for model, layout, way in (
        (compose(SPEC, heads), heads, "ddp"),
        (data_parallel(compose(SPEC, data), data), data, "fsdp"),
        (compose(SPEC, data), data, "zero"),
        (compose(SPEC), Layout.load("ring-4"), "fsdp"),
        (compose(SPEC, data, seed=rank), data, "fsdp"),
        (compose(SPEC), built({"mesh": {"tp": 4}, "shard": {"heads": ["tp"]}}), "fsdp"),
    ):
        with pytest.raises(weft.WeftError) as refused:
            data_parallel(model, layout, way)
        text.append(str(refused.value))
    plain = nn.Module()
    torch.manual_seed(rank % 2)  # tp is the last mesh dim
    plain.mine, plain.split = nn.Linear(2, 2), compose(SPEC, heads)
    with pytest.warns(UserWarning, match=r"'mine.weight' differ .* dims \('tp',\), which split"):
        data_parallel(plain, heads)
    alone = compose(SPEC)
    assert data_parallel(alone, Layout.single()) is alone
    return text


def test_wrong_combinations_are_refused(pool):
    wanted = [
        "DistributedDataParallel takes no DTensors",
        "went through fully_shard or DDP already",
        "way='zero': known are 'fsdp' and 'ddp'",
        "need ranks that are processes",
        "weights must be the same on ranks that differ only along mesh dims ('dp', 'ring')",
        "no mesh dim splits data",
    ]
    for texts in pool.run(_refusals):
        for text, start in zip(texts, wanted, strict=True):
            assert re.search(re.escape(start), text), text


# -- micro-batches, and ranks that froze other parameters -----------------------------------------


def gradients(layout, way, dtype):
    """Gradients of three micro-batches, whole."""
    model = trained = compose(SPEC, layout, seed=3, dtype=dtype)
    if layout.mesh and way != "sync":
        trained = data_parallel(model, layout, way.split()[0])
    data = stream(SPEC, layout, seed=1)
    for number in range(3):
        batch = data.batch(number)
        held = way == "ddp no_sync" and layout.mesh and number < 2
        with trained.no_sync() if held else contextlib.nullcontext():
            scores = trained(batch.inputs, **batch.given)
            entropy = nn.functional.cross_entropy(
                scores.flatten(0, 1), batch.targets.flatten(), reduction="sum"
            )
            layout.mean(entropy, batch.targets.numel()).backward()
    if way == "sync":
        layout.sync_gradients(model)
    whole = (
        p.grad.full_tensor() if way == "fsdp" and layout.mesh else p.grad
        for p in model.parameters()
    )
    return [g.tolist() for g in whole]


def _gradients(rank, way, dtype):
    return gradients(built(LAYOUTS["dp x ring"]), way, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", ["sync", "ddp", "ddp no_sync", "fsdp"])
def test_micro_batches_add_up_in_every_way(way, dtype, pool):
    allowed = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    )
    wanted = gradients(Layout.single(), way, torch.float64)
    for found in pool.run(_gradients, way, dtype):
        for a, b in zip(found, wanted):
            torch.testing.assert_close(
                torch.tensor(a).double(), torch.tensor(b).double(), **allowed
            )


def _frozen(rank, way):
    layout = built(LAYOUTS["dp x ring"])
    model = compose(SPEC, layout)
    other = list(model.named_parameters())[3]
    if rank == 2:
        other[1].requires_grad_(False)
    ways = {"sync": lambda: layout.sync_gradients(model)}
    with pytest.raises(ShapeError) as refused:
        ways.get(way, lambda: data_parallel(model, layout, way))()
    assert f"rank 0, 1, 3: {other[0]!r}, float32\n  rank 2: {other[0]!r}, float32, frozen" in str(
        refused.value
    )


@pytest.mark.parametrize("way", ["sync", "ddp", "fsdp"])
def test_parameters_that_one_rank_froze_are_named_on_all(way, pool):
    pool.run(_frozen, way)


def _partly_on_meta(layout, way, names):
    """What all ranks are told where rank 1 has parameters without numbers."""
    model = Three()
    if layout.rank == 1:
        for name in names:
            setattr(model, name, nn.Parameter(torch.empty(3, device="meta")))
    began = time.monotonic()
    with pytest.raises(ShapeError) as refused:
        layout.sync_gradients(model) if way == "sync" else data_parallel(model, layout, way)
    assert time.monotonic() - began < 40  # nobody waited for a message
    return str(refused.value)


def _partly_on_meta_of_processes(rank, way, names):
    return _partly_on_meta(Layout.parse("tokens: ring=4").build("cpu", timeout=60), way, names)


@pytest.mark.parametrize("names", [("all", "one", "none"), ("none",)], ids=str)
@pytest.mark.parametrize("way", ["threads", "sync", "ddp", "fsdp"])
def test_weights_that_one_rank_lacks_are_named_on_all(way, names, pool):
    if way == "threads":
        layout = Layout.parse("tokens: ring=4")
        texts = weft.on_threads(layout, lambda own: _partly_on_meta(own, "sync", names))
    else:
        texts = pool.run(_partly_on_meta_of_processes, way, names)
    for text in texts:
        assert f"rank 1: {names[0]!r}, float32, on meta" in text
        assert "load or draw the weights on every rank, or on none" in text


def _other_shape(rank, way):
    """Shapes may differ along `tp`, which splits heads; rank 3 differs from rank 1, too."""
    layout = Layout.from_dict(LAYOUTS["ring x heads"]).build("cpu", timeout=20)
    sizes = (4, 5, 4, 6)
    model = nn.Linear(3, sizes[rank])
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ShapeError) as refused:
        layout.sync_gradients(model) if way == "sync" else data_parallel(model, layout, way)
    return str(refused.value)


@pytest.mark.parametrize("way", ["sync", "fsdp"])
def test_differing_shapes_are_named_on_all_ranks(way, pool):
    texts = pool.run(_other_shape, way)
    assert len({*texts}) == 1
    assert "parameter 0 along mesh dims ring must be the same" in texts[0]
    assert "rank 1: 'weight', float32 of (5, 3)\n  rank 3: 'weight', float32 of (6, 3)" in texts[0]


def _other_call(rank):
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=20)
    x, model = torch.randn(1, 2, 4, 8), Three()
    call = layout.sync_gradients if rank == 2 else weft.attention
    arguments = (model,) if rank == 2 else (x, x, x, layout, "tokens")
    with pytest.raises(ShapeError) as refused:
        call(*arguments)
    weft.attention(x, x, x, layout, "tokens")  # what follows is not spoiled
    return str(refused.value)


def test_sum_of_gradients_where_others_attend_is_refused_on_all(pool):
    for text in pool.run(_other_call):
        assert "rank 2: a comparison of a model's parameters (sync_gradients" in text
        assert "rank 0, 1, 3: an attention call" in text


def _in_backward(rank: int) -> list[str]:
    """An optimizer that steps within backward; and a sync before any backward pass."""
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=30)
    said = []
    for hooked in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)

        def step(p: torch.Tensor) -> None:
            p.data.sub_(p.grad)
            p.grad = None

        if hooked:  # after a step as it should be, as ranks compare their weights in the first
            model(torch.randn(2, 3) + rank).sum().backward()
            layout.sync_gradients(model)
            model.zero_grad()
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(step)
            model(torch.randn(2, 3) + rank).sum().backward()
        with pytest.raises(UnsupportedError) as refused:
            layout.sync_gradients(model)
        said.append(str(refused.value))
    return said


def test_a_sync_without_any_gradient_is_refused_on_every_rank(pool):
    for messages in pool.run(_in_backward):
        assert all("no rank has a gradient of any of the 2" in message for message in messages)


def _scaled(rank: int, unscale_first: bool) -> tuple[str, bool]:
    """Three steps with a GradScaler, in the second of which one rank's gradient is infinite."""
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=30)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    try:
        for step in range(3):
            x = torch.randn(2, 3) + rank
            scaler.scale(model(x).sum()).backward()
            if step == 1 and rank == 2:
                model.weight.grad[0, 0] = float("inf")
            if unscale_first:
                scaler.unscale_(optimizer)
            layout.sync_gradients(model)
            if not unscale_first:
                scaler.unscale_(optimizer)
            clip_grad_norm_(model, 1.0, layout)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    except ShapeError as error:
        return str(error), False
    return "", bool(model.weight.isfinite().all())


def test_scaler_that_unscales_before_sum_refused_and_after_it_right(pool):
    assert pool.run(_scaled, False) == [("", True)] * 4
    for message, _ in pool.run(_scaled, True):
        assert "call layout.sync_gradients(model) first, then unscale_" in message


def _compiled_step(rank: int) -> float:
    """How far a compiled step's weights are from those of the same step without a compiler."""
    layout = Layout.parse("tokens: ring=4").build("cpu", timeout=30)
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, model=model, optimizer=optimizer):
            model(x).square().sum().backward()
            layout.sync_gradients(model)
            norm = clip_grad_norm_(model, 1.0, layout)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        run = torch.compile(step, backend="eager") if compiled else step
        for i in range(2):
            run(torch.ones(2, 3) * (rank + i))
        ends.append(model.weight.detach().clone())
    return (ends[0] - ends[1]).abs().max().item()


def test_a_compiled_step_may_contain_the_sum_of_gradients(pool):
    assert max(pool.run(_compiled_step)) < 1e-6
