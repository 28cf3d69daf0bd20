"""Rows encoded once, for others to attend to: the same numbers as one pass over all of them."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import weft
from weft import Layout, on_threads
from weft.errors import DeclarationError, ShapeError
from weft_models.models import KeyValueCache, ModelSpec, compose

TABLES_APART = "batch: dp=2; rows: local; features: local"
FEATURES = 5  # the class among them
LAYOUTS = (
    "rows: ring=2",
    "rows(striped): pass_q=3",
    "rows: tile=2x2",
    "rows: ulysses=2; features: axial=2",
    "rows: gather=2; features: ulysses=2",
    "rows(zigzag): ring=2; heads: tp=2",
    "batch: dp=2; rows: pass_q=2",
    "rows: shared_context=3",
    "heads: tp=4",
    "rows: axial=4",
    "rows: kv_parallel=3",
    "rows: kv_parallel=2 x pass_q=2",
)


def _cells(rows: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Tables with gaps, a constant column, and classes in the last column."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randn(batch, rows, FEATURES, generator=generator, dtype=torch.float64)
    cells[..., 1] = 2.5
    cells[torch.rand(cells.shape, generator=generator) < 0.1] = math.nan
    cells[..., -1] = torch.randint(3, (batch, rows), generator=generator).double()
    return cells


def _model(layout: Layout):
    return compose("tabular", layout, seed=5, dtype=torch.float64)


DIMS = {"batch": 0, "rows": 1, "features": 2}


def _lengths(cells: torch.Tensor) -> dict[str, int]:
    return {name: cells.shape[dim] for name, dim in DIMS.items()}


def _fit(layout: Layout, cells: torch.Tensor, model=None) -> KeyValueCache:
    model = model or _model(layout)
    return model.fit(layout.shard(cells, DIMS), lengths=_lengths(cells))


def _predict(layout: Layout, cells: torch.Tensor, cache: KeyValueCache, model=None):
    """Scores of all test rows on every rank."""
    model = model or _model(layout)
    scores = model.predict(layout.shard(cells, DIMS), cache, lengths=_lengths(cells))
    return layout.gather(scores, {"batch": 0, "rows": 1})


def _one_pass(cells: torch.Tensor, train: int) -> torch.Tensor:
    with torch.no_grad():
        return _model(Layout.single())(cells, train=train)[:, train:]


def _assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    if wanted.numel():
        assert (found - wanted).abs().max() <= 1e-11 * wanted.abs().max()


@pytest.mark.slow
@given(
    line=st.sampled_from(LAYOUTS),
    train=st.integers(0, 17),
    batches=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@example("rows: tile=2x2", 2, [1, 0, 3], 0)  # ranks without training rows, without test rows
@example("rows(striped): pass_q=3", 0, [4], 0)
@settings(max_examples=12, deadline=None)
def test_predictions_equal_one_pass_over_all_rows(line, train, batches, seed):
    cells = _cells(train + sum(batches), seed=seed)
    wanted = _one_pass(cells, train).split(batches, dim=1)

    def rank(layout):
        model = _model(layout)
        cache = _fit(layout, cells[:, :train], model)
        assert cache.nbytes == cache.bytes_per_rank[layout.rank]
        for test, expected in zip(cells[:, train:].split(batches, dim=1), wanted):
            _assert_same(_predict(layout, test, cache, model), expected)

    on_threads(Layout.parse(line), rank)


# -- other layouts ---------------------------------------------------------------------------------

FOUR = [
    "rows(striped): tile=2x2",
    "rows: ulysses=2; features: axial=2",
    "rows(zigzag): ring=2; heads: tp=2",
    "batch: dp=2; rows: pass_q=2",
    "rows: shared_context=4",
    "rows: kv_parallel=4",
    "rows: pass_q=2 x kv_parallel=2",
    "replicate: r=4; rows: local",
]


@given(
    before=st.sampled_from(FOUR),
    after=st.sampled_from(FOUR),
    train=st.integers(0, 11),
    test=st.integers(0, 5),
)
@settings(max_examples=8, deadline=None)
def test_a_cache_moves_to_another_layout_on_the_same_ranks(before, after, train, test):
    cells = _cells(train + test, seed=1)
    wanted = _one_pass(cells, train)

    def rank(layout):
        cache = _fit(layout, cells[:, :train])
        moved = cache.to(Layout.parse(after))
        assert moved.layout.name == after
        assert moved.nbytes == moved.bytes_per_rank[layout.rank]
        _assert_same(_predict(moved.layout, cells[:, train:], moved), wanted)
        back = moved.to(layout)
        for name, kept in cache.tensors.items():
            assert torch.equal(back.tensors[name].local, kept.local), name

    on_threads(Layout.parse(before), rank)


def test_one_position_of_an_axis_comes_out_as_among_all(monkeypatch):
    spec = ModelSpec.load("tabular").model_copy(update={"head": None})
    trunk = compose(spec, seed=1, dtype=torch.float64)
    x = torch.randn(2, 20, 5, 96, dtype=torch.float64)
    cache = trunk.encode(x[:, :12], "rows")
    with torch.no_grad():
        wanted = trunk(x[:, 12:], cache=cache)
        for position in range(5):
            found = trunk(x[:, 12:], cache=cache, only={"features": position})
            torch.testing.assert_close(found, wanted[:, :, [position]], rtol=1e-11, atol=1e-11)
    ran = []
    for block in trunk.blocks:
        monkeypatch.setattr(block, "forward", lambda x, given: ran.append(x.shape[2]) or x)
    trunk(x[:, 12:], cache=cache, only={"features": 4})
    assert ran == [5, 5, 5, 5, 1, 1]  # features, rows and a perceptron, twice
    with pytest.raises(DeclarationError, match="needs a cache of another axis"):
        trunk(x, only={"features": 4}, masks={"first-keys": 12})


def test_one_position_of_an_axis_that_ranks_split_is_refused():
    spec = ModelSpec.load("tabular").model_copy(update={"head": None})
    x = torch.zeros(1, 6, 4, 96)

    def rank(layout):
        trunk = compose(spec, layout)
        lengths = {"rows": 6, "features": 4}
        cache = trunk.encode(layout.shard(x, DIMS), "rows", lengths=lengths)
        with pytest.raises(DeclarationError, match="ranks split axis 'features'"):
            trunk(layout.shard(x, DIMS), cache=cache, lengths=lengths, only={"features": 3})

    on_threads(Layout.parse("rows: local; features: ulysses=2"), rank)


def test_nothing_sent_between_layouts_that_lie_alike_under_other_names():
    def rank(layout):
        cache = _fit(layout, _cells(7))
        with weft.traffic(layout) as moved:
            there = cache.to(Layout.parse("rows: kv_parallel=2 x pass_q=2"))
        assert not moved.received
        return there.layout.name

    on_threads(Layout.parse("rows: tile=2x2"), rank)


def test_memory_per_rank_falls_with_ranks_that_split_the_rows():
    cells = _cells(64)
    held = {
        ranks: on_threads(
            Layout.parse(f"rows: ring={ranks}"),
            lambda on: [t.local.nbytes for n, t in _fit(on, cells).tensors.items() if "block" in n],
        )
        for ranks in (1, 2, 4, 8)
    }
    whole = 2 * 2 * math.prod(cells.shape) * 96 * 8  # keys and values of 2 blocks, 96 wide, fp64
    for ranks, found in held.items():
        assert [sum(mine) for mine in found] == [whole // ranks] * ranks


# -- refusals --------------------------------------------------------------------------------------


def test_cache_of_another_model_or_layout_refused_in_one_line():
    cells, model = _cells(6), _model(Layout.single())
    cache = model.fit(cells)
    other = compose("tabular", seed=6, dtype=torch.float64)
    narrow = ModelSpec.load("tabular").model_copy(update={"repeat": 1})
    refused = [
        (lambda: compose(narrow).predict(cells, cache), "made by another model than 'tabular'"),
        (lambda: other.predict(cells, cache), "other weights"),
        (lambda: cache.to(Layout.parse("rows: ring=2")), "mesh"),
    ]
    for call, text in refused:
        with pytest.raises(DeclarationError, match=text) as error:
            call()
        assert "\n" not in str(error.value)
    for wrong in (cells[:1], cells[:, :, :4]):
        with pytest.raises(ShapeError, match=r"axis '(batch|features)' is \d long, and \d in the"):
            model.predict(wrong, cache)

    def rank(layout):
        mine = _fit(layout, cells)
        _model(layout.single()).predict(cells, mine)

    with pytest.raises(DeclarationError, match=r"cache\.to\(model\.layout\) takes it there"):
        on_threads(Layout.parse("rows: ring=2"), rank)


# -- any model -------------------------------------------------------------------------------------

AXES = ("batch", "time", "lat", "lon", "embed")
SPEC = {
    "axes": list(AXES),
    "sizes": {"embed": 16, "heads": 4, "kv_heads": 2},
    "context": {"notes": {"axes": ["batch", "notes", "width"], "embed": 6}},
    "block": [
        {"attend": "time", "mask": "first-keys", "qk_norm": True, "gate": True},
        {"attend": "lat+lon", "rope": True, "bias": {"relative": 2}},
        {"attend": "notes", "context": "notes", "heads": 2},
        {"attend": "time", "mask": "first-keys", "heads": 8, "kv_heads": 4, "scale": 0.3},
        {"mlp": 24, "gated": True},
    ],
}


@pytest.mark.parametrize(
    "line", ["time: pass_q=2; lat: ring=2; lon: local", "heads: tp=2; time: ring=2"]
)
def test_any_trunk_whose_positions_meet_through_the_encoded_ones_alone(line):
    """Encoded are the first 5 of 9 time steps, over four axes with a context beside them."""
    make = torch.Generator().manual_seed(3)
    x = torch.randn(2, 9, 3, 4, 16, generator=make, dtype=torch.float64)
    notes = {"notes": torch.randn(2, 7, 6, generator=make, dtype=torch.float64)}
    alone = compose(ModelSpec.from_dict(SPEC), seed=4, dtype=torch.float64)
    wanted = alone(x, notes, masks={"first-keys": 5})[:, 5:].detach()
    dims = {name: dim for dim, name in enumerate(AXES[:-1])}

    def rank(layout):
        trunk = compose(ModelSpec.from_dict(SPEC), layout, seed=4, dtype=torch.float64)

        def given(part):
            lengths = {name: part.shape[dim] for name, dim in dims.items()}
            return layout.shard(part, dims), {"lengths": lengths}

        part, options = given(x[:, :5])
        cache = trunk.encode(part, "time", notes, **options)
        part, options = given(x[:, 5:])
        found = trunk(part, notes, **options, cache=cache)
        _assert_same(found, layout.shard(wanted, dims))

    on_threads(Layout.parse(line), rank)


@pytest.mark.parametrize(
    ("block", "axis", "text"),
    [
        ({"attend": "time"}, "time", r"block 0 has mask = \[\], and not 'first-keys'"),
        ({"attend": "time", "mask": ["first-keys", "causal"]}, "time", "and not 'first-keys'"),
        ({"attend": "time", "mask": "first-keys", "rope": True}, "time", "rotary positions"),
        ({"attend": "time", "mask": "first-keys", "bias": "alibi"}, "time", "has a bias"),
        ({"attend": "time+lat", "mask": "first-keys"}, "time", r"attends time\+lat jointly"),
        ({"attend": "lat"}, "time", "no block attends 'time'"),
        ({"attend": "time", "mask": "first-keys"}, "tiem", "did you mean 'time'"),
    ],
)
def test_positions_that_meet_in_another_way_are_not_encoded(block, axis, text):
    trunk = compose(ModelSpec.from_dict({**SPEC, "context": {}, "block": [block]}))
    with pytest.raises(DeclarationError, match=text):
        trunk.encode(torch.zeros(2, 4, 3, 4, 16), axis)


# -- real processes --------------------------------------------------------------------------------


def _on_processes(rank: int, line: str, after: str) -> list[float]:
    """Gaps to one pass: of the same layout, of another, and of a model that FSDP2 shards."""
    cells, train = _cells(15, seed=7), 9
    layout = Layout.parse(line).build("cpu", timeout=60)
    wanted, model = _one_pass(cells, train), _model(layout)
    cache = _fit(layout, cells[:, :train], model)
    found = [_predict(layout, cells[:, train:], cache, model)]
    moved = cache.to(Layout.parse(after))
    found.append(_predict(moved.layout, cells[:, train:], moved))
    model = weft.data_parallel(model, layout)
    found.append(_predict(layout, cells[:, train:], cache, model))
    again = _fit(layout, cells[:, :train], model)
    assert all(torch.equal(again.tensors[n].local, k.local) for n, k in cache.tensors.items())
    return [((one - wanted).abs().max() / wanted.abs().max()).item() for one in found]


def test_rows_are_encoded_once_on_real_ranks(pool):
    lines = ("rows: tile=2x2", "heads: tp=2; rows(striped): ring=2")
    for gaps in pool.run(_on_processes, *lines):
        assert max(gaps) <= 1e-11


def _often_under_fsdp(rank: int, line: str) -> tuple[list[int], list[str]]:
    """Bytes that five predictions sum, of one cache; and what later ones say of its weights.

    Between them: an optimizer's step and a forward pass, after which FSDP holds the new weights
    where the old ones were; then a write on one rank alone.
    """
    layout = Layout.parse(line).build("cpu", timeout=60)
    model, cells = weft.data_parallel(_model(layout), layout), _cells(8, seed=rank)
    lengths = {"rows": 8 * layout.size("rows"), "batch": 2 * layout.size("batch")}
    keep = [torch.empty(n) for n in range(1, 4000, 97)] if rank else []  # addresses of its own
    cache, summed, said = model.fit(cells, lengths=lengths), [], []
    for _ in range(5):
        with weft.traffic(layout) as moved:
            model.predict(cells, cache, lengths=lengths)
        summed.append(sum(n for name, n in moved.by_tensor().items() if name == "sum"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    layout.mean(model(cells, train=4, lengths=lengths).square().sum(), 1).backward()
    optimizer.step()
    with torch.no_grad():
        model(cells, train=4, lengths=lengths)
    sharded = next(p for p in model.stack.blocks.parameters() if isinstance(p, DTensor))
    for factor in (1.0, 2.0 if layout.rank == 0 else 1.0):
        with torch.no_grad():
            sharded.to_local().mul_(factor)
        try:
            model.predict(cells, cache, lengths=lengths)
        except DeclarationError as error:
            said.append(str(error))
        cache = model.fit(cells, lengths=lengths)
        model.predict(cells, cache, lengths=lengths)
    del keep
    return summed, said


@pytest.mark.few(1)
@pytest.mark.parametrize("line", [TABLES_APART.replace("dp=2", "dp=4"), "rows: ring=4"])
def test_weights_under_fsdp_collected_once_for_any_number_of_predictions(pool, line):
    for summed, said in pool.run(_often_under_fsdp, line):
        assert summed[0] > summed[-1]
        assert summed[2:] == [summed[-1]] * 3
        assert summed[-1] < 2**20
        assert len(said) == 2
        assert all("other weights than model 'tabular' has now" in text for text in said)


def _after_a_write_to_split_heads(rank: int) -> str:
    """What is said of a cache after weights that lie in parts were written to, and nothing else."""
    layout = Layout.parse("heads: tp=4").build("cpu", timeout=60)
    model, cells = _model(layout), _cells(8)
    cache = model.fit(cells)
    model.predict(cells, cache)
    with torch.no_grad():
        next(p for p in model.parameters() if isinstance(p, DTensor)).mul_(2.0)
    with pytest.raises(DeclarationError) as error:
        model.predict(cells, cache)
    return str(error.value)


def test_a_cache_of_split_heads_that_changed_is_refused(pool):
    for text in pool.run(_after_a_write_to_split_heads):
        assert "other weights than model 'tabular' has now" in text


# -- what users bring ------------------------------------------------------------------------------


def test_a_cache_of_weights_that_changed_is_refused():
    cells, model = _cells(6), _model(Layout.single())
    cache = model.fit(cells)
    assert model.predict(cells, cache).isfinite().all()
    with torch.no_grad():
        model.hidden.weight.mul_(1.0 + 1e-12)
    with pytest.raises(DeclarationError, match="other weights than model 'tabular' has now"):
        model.predict(cells, cache)


@pytest.mark.parametrize("wrong", [10.0, -1.0, 1.5])
def test_classes_that_the_model_does_not_know_are_refused(wrong):
    cells, model = _cells(6), _model(Layout.single())
    cells[0, 0, -1] = wrong
    for call in (lambda: model.fit(cells), lambda: model(cells, train=6)):
        with pytest.raises(IndexError, match=rf"has class {wrong:g}; .* classes 0 to 9"):
            call()


@pytest.mark.parametrize("line", ["rows: ring=2", "features: ring=2", "batch: dp=2; rows: ring=2"])
def test_table_refusals_of_one_rank_are_raised_on_all(line):
    """Ranks sum over a table without a word of which table it is."""
    bad, good = _cells(8, seed=1), _cells(8, seed=2)
    bad[:, 0, -1] = 12
    want = _model(Layout.single()).fit(good).tensors["mean"].local

    def rank(layout):
        model = _model(layout)
        for call in (model.fit, functools.partial(model, train=8)):
            with pytest.raises(IndexError, match="has class 12"):
                call(layout.shard(bad, DIMS), lengths=_lengths(bad))
        mean = model.fit(layout.shard(good, DIMS), lengths=_lengths(good)).tensors["mean"].local
        assert torch.allclose(mean, layout.shard(want, {"batch": 0, "features": 1}))

    weft.on_threads(Layout.parse(line), rank, timeout=20)


def test_batches_that_ranks_do_not_divide_are_known_to_all():
    cells = _cells(9, batch=3)

    def rank(layout):
        cache = _model(layout).fit(layout.shard(cells, DIMS), lengths={"rows": 9})
        cache.to(layout)
        return dict(cache.lengths), cache.bytes_per_rank

    (one, two) = weft.on_threads(Layout.parse("batch: dp=2; rows: local; features: local"), rank)
    assert one == two
    assert one[0]["batch"] == 3


def test_other_guesses_of_the_number_of_rows_are_refused():
    cells = _cells(5)

    def rank(layout):
        mine, model = layout.shard(cells, DIMS), _model(layout)
        for call in (model.fit, functools.partial(model, train=4)):
            with pytest.raises(ShapeError, match=r"of a table \(lengths, train\) must be the same"):
                call(mine)

    weft.on_threads(Layout.parse("rows: ring=2"), rank, timeout=20)


def test_ranks_of_other_tables_fit_and_predict_without_each_other():
    """Tables of other rows, of other columns, in uneven batches, and one more on rank 0."""

    def rank(layout):
        model, alone = _model(layout), _model(Layout.single())
        for table in range(3 - layout.rank):
            cells = _cells(8 + 2 * layout.rank, batch=1 + layout.rank, seed=table)
            cells = cells[:, :, layout.rank :]
            cache = model.fit(cells[:, :6])
            assert set(cache.lengths) == {"rows", "features"}
            found, wanted = model.predict(cells[:, 6:], cache), alone(cells, train=6)[:, 6:]
            _assert_same(found, wanted.detach())
            with pytest.raises(
                ShapeError, match=rf"'batch' is {2 + layout.rank} long on this rank"
            ):
                model.predict(torch.cat([cells, cells[:1]])[:, 6:], cache)

    weft.on_threads(Layout.parse(TABLES_APART), rank, timeout=20)


@pytest.mark.parametrize(
    ("rows", "batch", "text"),
    [
        ((8, 9), (2, 2), r"lengths .* must be the same(.|\n)*0: .*rows 8(.|\n)*1: .*rows 9"),
        ((9, 9), (1, 2), r"axis 'batch' is 3 long, .* hold \[1, 2\]"),
    ],
)
def test_tables_that_are_no_whole_are_not_moved(rows, batch, text):
    def rank(layout):
        cache = _model(layout).fit(_cells(rows[layout.rank], batch=batch[layout.rank]))
        with pytest.raises(ShapeError, match=text):
            cache.to(Layout.parse("rows: kv_parallel=2"))

    weft.on_threads(Layout.parse(TABLES_APART), rank, timeout=20)


def test_a_rank_alone_may_ask_how_much_all_hold():
    def rank(layout):
        cache = _model(layout).fit(_cells(8))
        if layout.rank == 0:
            with pytest.raises(ShapeError, match=r"how long axis 'batch' is .* ask for nbytes"):
                _ = cache.bytes_per_rank
            assert cache.nbytes > 0

    weft.on_threads(Layout.parse(TABLES_APART), rank, timeout=20)


def test_batch_of_unknown_length_moves_and_predicts_before_and_after():
    cells = _cells(9, batch=3)
    wanted = _one_pass(cells, 6)

    def rank(layout):
        model = _model(layout)
        cache = model.fit(layout.shard(cells[:, :6], DIMS))
        test = layout.shard(cells[:, 6:], DIMS)
        moved = cache.to(Layout.parse("rows: kv_parallel=2"))
        assert moved.lengths == cache.lengths == {"batch": 3, "rows": 6, "features": 5}
        _assert_same(_predict(moved.layout, cells[:, 6:], moved), wanted)
        for lengths in ({}, {"batch": 3}):
            found = model.predict(test, cache, lengths=lengths)
            _assert_same(layout.gather(found, {"batch": 0}), wanted)

    weft.on_threads(Layout.parse(TABLES_APART), rank, timeout=20)


def test_trunk_encodes_axes_that_no_block_attends_without_other_ranks():
    """Rank 0 encodes once more; what is moved is known to be of 3 samples over 5 places."""
    blocks = [{"attend": "time", "mask": "first-keys"}, {"attend": "lat"}, {"mlp": 24}]
    spec = ModelSpec.from_dict({**SPEC, "context": {}, "block": blocks})
    whole = torch.randn(3, 6, 4, 5, 16, dtype=torch.float64)
    dims = {name: dim for dim, name in enumerate(AXES[:-1])}

    def rank(layout):
        trunk = compose(spec, layout, seed=4, dtype=torch.float64)
        x = layout.shard(whole, dims)
        for _ in range(1 + (layout.rank == 0)):
            cache = trunk.encode(x[:, :4], "time")
            assert set(cache.lengths) == {"time", "lat"}
            assert trunk(x[:, 4:], cache=cache).shape == x[:, 4:].shape
        cache.to(layout)
        assert cache.lengths == {"batch": 3, "time": 4, "lat": 4, "lon": 5}
        return trunk(x[:, 4:], cache=cache).isfinite().all()

    line = {"mesh": {"dp": 2, "places": 2}, "shard": {"batch": ["dp"], "lon": ["places"]}}
    weft.on_threads(Layout.from_dict(line), rank, timeout=20)


def test_what_is_no_table_and_no_cache_is_refused():
    cells, model = _cells(6), _model(Layout.single())
    with pytest.raises(ShapeError, match=r"cells must be \(batch, rows, features \+ 1\)"):
        model.fit(cells[0])
    with pytest.raises(ShapeError, match="6 local rows, and this rank's part of 8 is 8"):
        model.fit(cells, lengths={"rows": 8})
    with pytest.raises(DeclarationError, match="cache must be the result of fit, found a NoneType"):
        model.predict(cells, None)


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor])
def test_integers_of_numpy_and_tensors_are_lengths_that_they_say(integer):
    cells, whole = _cells(9), _one_pass(_cells(9), 6)
    model = _model(Layout.single())
    train, test, lengths = cells[:, :6], cells[:, 6:], {"rows": integer(6), "features": integer(5)}
    cache = model.fit(train, lengths=lengths)
    assert cache.lengths == {"batch": 2, "rows": 6, "features": 5}
    _assert_same(model.predict(test, cache, lengths=lengths | {"rows": integer(3)}), whole)
    found = model(cells, train=integer(6), lengths=lengths | {"rows": integer(9)})
    _assert_same(found[:, 6:].detach(), whole)


def test_ranks_compare_integers_of_any_kind_and_refuse_what_none():
    cells = _cells(9)

    def rank(layout):
        mine, model = layout.shard(cells, DIMS), _model(layout)
        kind = (int, np.int64)[layout.rank]
        model(mine, train=kind(6), lengths={"rows": kind(9)})
        for train, n, text in ((6.0, 9, "train is a whole number"), (6, 9.5, "length of axis 'r")):
            wrong = {"train": train if layout.rank else 6, "lengths": {"rows": n}}
            with pytest.raises(ShapeError, match=text):
                model(mine, **wrong)

    weft.on_threads(Layout.parse("rows: ring=2"), rank, timeout=20)
