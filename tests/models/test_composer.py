"""Model files without a head: any named axes, checked against attention written out."""

import math
import re

import pytest
import torch
from torch.distributed.tensor import DTensor
from world import draw

import weft
from weft import Layout, on_threads
from weft.declare import catalog
from weft.errors import DeclarationError, ShapeError
from weft.nn import MultiAxisAttention
from weft.nn.named import build_mask
from weft_axes.nn.parameters import local
from weft_models.declare.model_blocks import AttendBlock
from weft_models.models import ModelSpec, check_fit, compose

AXES = ("batch", "time", "lat", "lon", "embed")
SIZES = {"batch": 2, "time": 5, "lat": 3, "lon": 4}
DIMS = {name: i for i, name in enumerate(SIZES)}


X = draw(*SIZES.values(), 16)


def _dense(module: MultiAxisAttention, q_in, k_in, allowed=None, bias=None, q_rope=None):
    """Attention of sequences (b n e) and (b m e) by plain softmax, with the module's weights."""

    def heads(t, weight):
        return (t @ weight.T).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)

    q, k = heads(q_in, module.query.weight), heads(k_in, module.key.weight)
    v = heads(k_in, module.value.weight)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    if q_rope is not None:
        q, k = _turn(q, q_rope), _turn(k, q_rope)
    scores = q @ k.mT * (module.scale or module.head_dim**-0.5)
    scores = scores if bias is None else scores + bias
    scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ module.out.weight


def _turn(x, positions):
    """Rotation as complex numbers: an equal part of the head dim for each row of positions."""
    half = x.shape[-1] // 2
    share = half // len(positions)
    steps = 10000.0 ** -(torch.arange(share, dtype=torch.float64) / share)
    angle = torch.cat([p.double()[:, None] * steps for p in positions], -1)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def _attention(**options) -> MultiAxisAttention:
    generator = torch.Generator().manual_seed(1)
    place = {"axes": AXES, "generator": generator, "dtype": torch.float64}
    return MultiAxisAttention(16, 4, kv_heads=2, **place, **options)


def _same(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# -- one attention ---------------------------------------------------------------------------------


def test_joint_rotary_positions_share_the_head_dim_equally():
    module = _attention(axis=("lat", "lon"), rope=True)
    grid = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    flat = X.flatten(0, 1).flatten(1, 2)
    wanted = _dense(module, flat, flat, q_rope=[p.flatten() for p in grid])
    _same(module(X), wanted.reshape(X.shape))
    alone = _attention(axis=("lat", "lon"), rope=["lon"])
    wanted = _dense(alone, flat, flat, q_rope=[grid[1].flatten()])
    _same(alone(X), wanted.reshape(X.shape))


def test_a_bias_is_added_to_the_scores():
    module = _attention(axis="time", bias=weft.alibi(4))
    flat = X.permute(0, 2, 3, 1, 4).flatten(0, 2)
    far = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    slopes = 2.0 ** (-2.0 * torch.arange(1, 5, dtype=torch.float64))
    bias = -slopes[:, None, None] * far
    _same(module(X), _grid(_dense(module, flat, flat, bias=bias)))
    _same(module(X, bias=bias[None]), module(X))


def _grid(flat):
    return flat.unflatten(0, (2, 3, 4)).permute(0, 3, 1, 2, 4)


def test_axes_that_a_context_lacks_see_the_same_keys():
    module = _attention(axis="time", context_axes=("batch", "time", "notes"), context_dim=6)
    context = draw(2, 7, 6, seed=1)
    spread = context[:, None, None].expand(2, 3, 4, 7, 6).flatten(0, 2)
    wanted = _dense(module, X.permute(0, 2, 3, 1, 4).flatten(0, 2), spread)
    _same(module(X, context), _grid(wanted))
    mask = weft.MaskMod(lambda b, h, q, kv: (q + kv) % 2 == 0)
    allowed = (torch.arange(5)[:, None] + torch.arange(7)) % 2 == 0
    wanted = _dense(module, X.permute(0, 2, 3, 1, 4).flatten(0, 2), spread, allowed)
    _same(module(X, context, mask), _grid(wanted))


def test_every_token_attends_to_axis_that_only_the_context_has():
    module = _attention(axis="notes", context_axes=("notes", "batch", "width"), context_dim=6)
    context = draw(7, 2, 6, seed=1)
    wanted = _dense(module, X.flatten(1, 3), context.transpose(0, 1))
    _same(module(X, context), wanted.reshape(X.shape))
    with pytest.raises(ShapeError, match=r"takes its keys from a context .*give context"):
        module(X)
    with pytest.raises(ShapeError, match="axis 'batch' is 2 long in x and 3 in the context"):
        module(X, draw(7, 3, 6))


def test_keys_and_values_of_a_context_are_projected_once():
    module = _attention(axis="notes", context_axes=("batch", "notes", "embed"))
    seen = []
    split = module.key.split
    module.key.split = lambda t: seen.append(t.shape) or split(t)
    module(X, draw(2, 7, 16))
    assert seen == [(2, 7, 16)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"axis": "time", "rope": ["lat"]}, r"rope = \['lat'\]: name attended axes"),
        ({"axis": ("time", "lat", "lon"), "rope": True}, r"must be a multiple of 6, found 4"),
        ({"axis": "notes", "context_axes": ("depth", "notes", "embed")}, "must be axes of x"),
        ({"axis": ("time", "notes"), "context_axes": ("time", "notes", "embed")}, "all of x or"),
        ({"axis": "notes", "context_axes": ("notes", "embed"), "rope": True}, "rope needs an"),
    ],
)
def test_rejects_axes_and_positions_that_do_not_fit(options, text):
    with pytest.raises(DeclarationError, match=text):
        _attention(**options)


def test_uneven_chunks_without_lengths_are_refused_by_that_name():
    def rank(layout):
        module = MultiAxisAttention(8, 2, axis="tokens", layout=layout)
        module(torch.zeros(1, 3 - layout.rank, 8))

    with pytest.raises(ShapeError, match=r"pass lengths=\{axis: global length\}"):
        on_threads(Layout.parse("tokens: ring=2"), rank)


@pytest.mark.sample
@pytest.mark.sample
def test_a_module_compiles_whole():
    module = _attention(axis=("lat", "lon"), rope=True, mask=weft.Causal())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_()
    _same(compiled(x), module(x))
    compiled(x).sum().backward()
    grad, x.grad = x.grad, None
    module(x).sum().backward()
    _same(grad, x.grad)


# -- a trunk ---------------------------------------------------------------------------------------

SPEC = {
    "axes": list(AXES),
    "sizes": {"embed": 16, "heads": 4, "kv_heads": 2},
    "norm": "rms",
    "context": {
        "notes": {"axes": ["batch", "notes", "width"], "embed": 6},
        "past": {"axes": ["batch", "time", "embed"]},
    },
    "block": [
        {
            "repeat": 2,
            "block": [
                {"attend": "time", "mask": {"window": [2, 0]}, "rope": True, "qk_norm": True},
                {"attend": "lat+lon", "rope": True, "bias": {"relative": 2}},
                {"attend": "lat+lon", "mask": {"boxes": 2, "shift": [1, 0], "circular": "lat"}},
            ],
        },
        {"attend": "notes", "context": "notes", "heads": 2},
        {"attend": "time", "context": "past"},
        {"attend": "time", "mask": ["causal", "documents"], "bias": {"pair": "z", "width": 3}},
        {"attend": ["time", "lat"], "scale": 0.3, "bias": "alibi", "mask": {"near": [3, 2]}},
        {"mlp": 24, "gated": True, "activation": "silu"},
    ],
}
LAYOUTS = [
    "time: ring=2; lat: pass_q=2; lon: local",
    "batch: dp=2; lat: ring=2",
    "heads: tp=2; time: tile=2x1",
    "time: ulysses=2; lon: gather=2",
    "time(zigzag): ring=3",
]


def _run(layout: Layout, layouts=None, spec=SPEC):
    spec = ModelSpec.from_dict(spec, name="all")
    model = compose(spec, layout, layouts=layouts, seed=4, dtype=torch.float64)
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if "bias." in name:
                local(p).copy_(draw(*p.shape, seed=i))
    x = layout.shard(X, DIMS).clone().requires_grad_()
    notes, past, z = draw(2, 7, 6, seed=5), draw(2, 5, 16, seed=6), draw(5, 5, 3, seed=7)
    contexts = {
        "notes": layout.shard(notes, {"batch": 0}),
        "past": layout.shard(past, {"batch": 0, "time": 1}),
    }
    lengths = {name: SIZES[name] for name in ("time", "lat", "lon")}
    out = model(x, contexts, lengths=lengths, masks={"documents": (2, 3)}, biases={"z": z})
    weights = layout.shard(draw(*X.shape, seed=8), DIMS)
    (out * weights).sum().backward()
    layout.sync_gradients(model)
    return model, out.detach(), x.grad


@pytest.mark.few(1)
@pytest.mark.parametrize("line", LAYOUTS)
def test_trunk_is_the_same_on_every_layout_with_every_gradient(line):
    reference, wanted, wanted_x = _run(Layout.single())

    def rank(layout):
        model, out, grad = _run(layout)
        _same(out, layout.shard(wanted, DIMS))
        _same(grad, layout.shard(wanted_x, DIMS))
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            whole = layout.shard(q.grad, {"heads": 0}) if p.shape != q.shape else q.grad
            assert whole.abs().max() > 0, name
            assert (p.grad - whole).abs().max() < 1e-11, name

    on_threads(Layout.parse(line), rank)


MIXED = {
    "tile, with heads for two kinds": (
        "time: local; lat+lon: tile=2x2",
        {
            "notes": "heads: tp=4",
            "time": "heads: a=2; time: ring=2",
            "past": "batch: dp=2; replicate: r=2",
        },
    ),
    "samples and heads, with a ring": ("batch: dp=2; heads: tp=2", {"lat+lon": "lat+lon: ring=4"}),
    "ring, past by samples": ("time(zigzag): ring=2", {"past": "batch: dp=2"}),
}


def _mixed(name: str) -> tuple[Layout, dict[str, Layout], dict]:
    """The model's layout, those of its kinds of blocks, and a model file that both know."""
    line, others = MIXED[name]
    spec = {**SPEC, "sizes": {"embed": 16, "heads": 4, "kv_heads": 4}}
    spec["block"] = [{**b, "heads": 4} if "notes" in str(b) else b for b in SPEC["block"]]
    if "tile" in line:  # it does not say how time and lat are attended jointly
        spec["block"] = [b for b in spec["block"] if b.get("attend") != ["time", "lat"]]
    return Layout.parse(line), {kind: Layout.parse(other) for kind, other in others.items()}, spec


def _same_as_alone(found, alone, layout: Layout) -> None:
    """Outputs and all gradients of a rank, beside those of one device."""
    (model, out, grad), (reference, wanted, wanted_x) = found, alone
    _same(out, layout.shard(wanted, DIMS))
    _same(grad, layout.shard(wanted_x, DIMS))
    assert list(model.state_dict()) == list(reference.state_dict())
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        mine = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        whole = layout.shard(q.grad, {"heads": 0}) if mine.shape != q.shape else q.grad
        assert (mine - whole).abs().max() < 1e-11, name


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MIXED)
def test_blocks_of_a_kind_may_lie_as_another_layout_says(name):
    layout, layouts, spec = _mixed(name)
    alone = _run(Layout.single(), None, spec)
    on_threads(layout, lambda bound: _same_as_alone(_run(bound, layouts, spec), alone, bound))


def _mixed_on_processes(rank: int, name: str) -> dict:
    layout, layouts, spec = _mixed(name)
    bound = layout.build("cpu", timeout=60)
    with weft.traffic(bound) as moved:
        found = _run(bound, layouts, spec)
    _same_as_alone(found, _run(Layout.single(), None, spec), bound)
    return dict(moved.received)


@pytest.mark.parametrize("name", list(MIXED)[:2])
def test_blocks_lie_as_other_layouts_say_on_real_ranks_too(name, pool):
    """Their processes move between blocks, and count, what ranks as threads do."""
    layout, layouts, spec = _mixed(name)

    def rank(bound):
        with weft.traffic(bound) as moved:
            _run(bound, layouts, spec)
        return dict(moved.received)

    assert pool.run(_mixed_on_processes, name) == on_threads(layout, rank)


@pytest.mark.parametrize(
    ("model", "line", "words"),
    [
        ("weather", "station: ring=2", "splits axis 'station', which only a context has"),
        ("causal_lm", "rows: ring=2", "shards axis 'rows'"),
        ("causal_lm", "heads: tp=3; tokens: ring=2", "heads"),
    ],
)
def test_what_compose_refuses_does_not_fit(model, line, words):
    spec, layout = ModelSpec.load(model), Layout.parse(line)
    with pytest.raises(DeclarationError, match=words):
        check_fit(spec, layout)
    with pytest.raises(DeclarationError, match=words):
        weft.on_threads(layout, lambda bound: weft.compose(spec, bound, device="meta"))


def test_layouts_of_kinds_that_are_not_there_are_refused():
    spec = ModelSpec.from_dict(SPEC, name="all")
    with pytest.raises(DeclarationError, match="no block of the kind 'tmie'; did you mean 'time'"):
        compose(spec, layouts={"tmie": Layout.single()})
    with pytest.raises(DeclarationError, match="has a head"):
        compose("tabular", layouts={"rows": Layout.single()})


def test_routed_layout_of_one_kind_is_refused_before_anything_runs():
    """Its router's weights would be nowhere. A context is not routed, nor is one layout two."""
    block = [{"attend": "time"}, {"attend": "lat"}, {"attend": "time", "context": "past"}]
    whole = {"axes": list(AXES), "sizes": {"embed": 16, "heads": 4}, "block": block}
    whole["context"] = {"past": {"axes": ["batch", "time", "embed"]}}
    spec = ModelSpec.from_dict(whole, name="m")
    routed = Layout.parse("time: routed=2")

    def rank(layout):
        refused = r"model 'm': layouts\['time'\] is layout .* routes time .* such as a ring"
        with pytest.raises(DeclarationError, match=refused):
            compose(spec, layout, layouts={"time": routed})
        compose(spec, layout, layouts={"past": routed})

    on_threads(Layout.parse("lat: ring=2"), rank)
    on_threads(routed, lambda layout: compose(spec, layout, layouts={"time": layout}))


def test_blocks_run_in_order_with_groups_repeated():
    spec = ModelSpec.from_dict({**SPEC, "repeat": 2})
    kinds = [b.kind if hasattr(b, "kind") else b.mlp for b in spec.blocks]
    once = ["time", "lat+lon", "lat+lon"] * 2 + ["notes", "past", "time", "time+lat", 24]
    assert kinds == once * 2


@pytest.mark.parametrize("repeat", [10_001, 1 << 30, 1 << 64])
def test_more_blocks_than_can_be_written_out_are_refused(repeat):
    for spec in (
        {**SPEC, "repeat": repeat},
        {**SPEC, "block": [{"repeat": repeat, "block": SPEC["block"]}]},
    ):
        with pytest.raises(DeclarationError, match="repeat"):
            ModelSpec.from_dict(spec)


GRID_MASKS = [
    ({"near": 3}, weft.Near((6, 8), 3)),
    ({"near": [3, 5], "dilation": [2, 1]}, weft.Near((6, 8), (3, 5), (2, 1))),
    ({"near": 3, "circular": "lon"}, weft.Near((6, 8), 3, circular=(False, True))),
    ({"boxes": [3, 4], "shift": [1, 2]}, weft.Boxes((6, 8), (3, 4), (1, 2))),
    (
        [{"boxes": 3, "shift": 1, "circular": ["lat", "lon"]}, "causal"],
        weft.Boxes((6, 8), 3, 1, True) & weft.Causal(),
    ),
]


@pytest.mark.parametrize(("written", "mask"), GRID_MASKS, ids=str)
def test_masks_of_a_grid_are_read_and_written(written, mask):
    block = AttendBlock(attend="lat+lon", mask=written)
    assert build_mask(block.mask, {}, {"lat": 6, "lon": 8}) == mask
    assert AttendBlock.model_validate(block.model_dump(exclude_unset=True)) == block


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ({"near": 0}, "near = 0: give a whole number, 1 or more, or one per attended axis"),
        ({"near": [3, 3, 3]}, r"near = \[3, 3, 3\] needs one number per axis, 2"),
        ({"boxes": 3, "shift": -1}, "shift = -1: give a whole number, 0 or more"),
        ({"boxes": 3, "dilation": 2}, "no mask is called 'dilation'"),
        ({"near": 3, "circular": "long"}, "circular = 'long'.*did you mean 'lon'"),
        ({"near": 3, "circular": 1}, "circular = 1: name an attended axis"),
    ],
    ids=str,
)
def test_masks_of_no_grid_are_refused(mask, said):
    block = {"attend": "lat+lon", "mask": mask}
    with pytest.raises(DeclarationError, match=said):
        ModelSpec.from_dict({**SPEC, "block": [block]})


def test_a_mask_of_a_grid_is_not_of_a_context():
    block = {"attend": "time", "context": "past", "mask": {"near": 3}}
    with pytest.raises(DeclarationError, match="'near' is of x itself, not of a context"):
        ModelSpec.from_dict({**SPEC, "block": [block]})


def test_what_the_call_must_give_is_asked_for_by_name():
    model = compose(ModelSpec.from_dict(SPEC, name="all"), dtype=torch.float64)
    contexts, z = {"notes": draw(2, 7, 6), "past": draw(2, 5, 16)}, draw(5, 5, 3)
    with pytest.raises(ShapeError, match=r"takes the contexts \['notes', 'past'\], found \[\]"):
        model(X)
    with pytest.raises(DeclarationError, match=r"masks=\{'documents': ...\}"):
        model(X, contexts)
    with pytest.raises(DeclarationError, match=r"biases=\{'z': ...\}"):
        model(X, contexts, masks={"documents": (2, 3)})
    for given in ({"masks": {"docments": (2, 3)}}, {"biases": {"docs": z, "z": z}}):
        with pytest.raises(DeclarationError, match=r"has 'doc(ment)?s', which no block asks for"):
            model(X, contexts, **given)
    with pytest.raises(DeclarationError, match=r"lengths has 'lats'.*did you mean 'lat'"):
        model(X, contexts, lengths={"lats": 3})


# -- masks of full tensors where a context is attended locally ---------------------------

THIRDS = weft.MaskMod(lambda b, h, q, k: (q * 7 + k * 3 + b) % 5 != 0)


@pytest.mark.parametrize("line", ["batch: dp=2; t: local", "batch: dp=2; t(zigzag): ring=2"])
@pytest.mark.parametrize("axes", [("batch", "k", "embed"), ("batch", "t", "k", "embed")], ids=len)
@pytest.mark.parametrize("mask", ["padding", {"given": "mine"}], ids=str)
def test_masks_over_a_context_mean_whole_tensors_wherever_they_lie(line, axes, mask):
    sizes = {"batch": 3, "t": 5, "y": 2, "k": 7}
    spec = {
        "axes": ["batch", "t", "y", "embed"],
        "sizes": {"embed": 8, "heads": 2},
        "context": {"far": {"axes": list(axes)}},
        "block": [{"attend": "k", "context": "far", "mask": mask}],
    }
    x, far = draw(3, 5, 2, 8, seed=1), draw(*(sizes[a] for a in axes[:-1]), 8, seed=2)
    sequences = math.prod(sizes[a] for a in axes[:-2])
    masks = (
        {"padding": [i % 8 for i in range(sequences)]} if mask == "padding" else {"mine": THIRDS}
    )
    lengths = {name: sizes[name] for name in ("batch", "t", "y")}

    def run(layout):
        model = compose(ModelSpec.from_dict(spec), layout, dtype=torch.float64)
        here = {name: i for i, name in enumerate(axes[:-2])}
        out = model(
            layout.shard(x, {"batch": 0, "t": 1}),
            {"far": layout.shard(far, here)},
            masks=masks,
            lengths=lengths,
        )
        return layout.gather(out.detach(), {"batch": 0, "t": 1})

    wanted = run(Layout.single())
    for out in weft.on_threads(Layout.parse(line), run):
        torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-11)


# -- biases of full tensors there ----------------------------------------------------------------

#: Which axes x has, and the context; y is shared, or both of x's axes are queries.
OVER = {
    "t": (("batch", "t", "embed"), ("batch", "k", "embed"), "k"),
    "t, y shared": (("batch", "t", "y", "embed"), ("batch", "y", "k", "embed"), "k"),
    "y shared, t": (("batch", "y", "t", "embed"), ("y", "batch", "k", "embed"), "k"),
    "t y": (("batch", "t", "y", "embed"), ("batch", "k", "l", "embed"), "k+l"),
    "y t": (("batch", "y", "t", "embed"), ("batch", "k", "l", "embed"), "k+l"),
}
LONG = {"batch": 2, "t": 7, "y": 2, "k": 5, "l": 3, "embed": 8}


def _over_a_context(layout: Layout, axes: str, kind, lengths=("batch", "t", "y"), sizes=LONG):
    """The output and the gradients of x, the weights and a pair bias, whole."""
    names, of_context, attended = OVER[axes]
    block = {"attend": attended, "context": "far", "bias": kind}
    spec = {"axes": list(names), "sizes": {"embed": 8, "heads": 2}, "block": [block]}
    spec["context"] = {"far": {"axes": list(of_context)}}
    model = compose(ModelSpec.from_dict(spec), layout, seed=1, dtype=torch.float64)
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if "bias." in name:
                p.copy_(draw(*p.shape, seed=i))
    dims, far_dims = (
        {a: i for i, a in enumerate(part) if a in ("batch", "t", "y")}
        for part in (names, of_context)
    )
    x, far = (draw(*(sizes[a] for a in part), seed=len(part)) for part in (names, of_context))
    x = layout.shard(x, dims).clone().requires_grad_()
    far = layout.shard(far, far_dims)
    queries = math.prod(sizes[a] for a in names[:-1] if a not in of_context)
    keys = math.prod(sizes[a] for a in of_context if a not in names)
    sequences = math.prod(sizes[a] for a in names[:-1] if a in of_context)
    z = torch.nn.Parameter(draw(sequences, queries, keys, 3, seed=3))
    given = {"biases": {"z": z}} if "pair" in kind else {}
    known = {a: sizes[a] for a in lengths if a in names}
    out = model(x, {"far": far}, lengths=known, **given)
    weights = draw(*(sizes[a] for a in names), seed=4)
    out.backward(layout.shard(weights, dims))
    layout.sync_gradients(model)
    if given:
        layout.sync_gradients(torch.nn.ParameterList([z]))
    whole = [layout.gather(t.detach(), dims) for t in (out, x.grad)]
    return [*whole, *(p.grad for p in model.parameters()), *([z.grad] if given else [])]


@pytest.mark.few(7)
@pytest.mark.parametrize("kind", [{"relative": 3}, {"pair": "z", "width": 3}], ids=str)
@pytest.mark.parametrize("axes", OVER)
@pytest.mark.parametrize(
    "line",
    ["t: ring=2", "t: ring=3", "t(zigzag): ring=2", "t: pass_q=5", "batch: dp=2; t: gather=2"],
)
def test_biases_over_context_count_from_the_first_token_of_all(line, axes, kind):
    """Ranks hold 4 and 3 of 7 tokens, 3 3 1, or 2 2 2 1 and none."""
    wanted = _over_a_context(Layout.single(), axes, kind)
    for found in on_threads(Layout.parse(line), _over_a_context, axes, kind):
        for a, b in zip(found, wanted, strict=True):
            assert b.abs().max() > 0
            assert (a - b).abs().max() <= 1e-11 * b.abs().max()


@pytest.mark.parametrize(
    ("axes", "of_context", "attended", "queries"),
    [
        (("batch", "t", "y", "embed"), ("batch", "k", "embed"), "k", ["t", "y"]),
        (("batch", "t", "embed"), ("batch", "k", "l", "embed"), "k+l", ["t"]),
        (("batch", "t", "embed"), ("k", "embed"), "k", ["batch", "t"]),
        (("batch", "t", "embed"), ("batch", "t", "k", "embed"), "k", []),
    ],
)
def test_distances_to_context_need_as_many_axes_on_either_side(axes, of_context, attended, queries):
    block = {"attend": attended, "context": "far", "bias": {"relative": 3}}
    spec = {"axes": list(axes), "sizes": {"embed": 8, "heads": 2}, "block": [block]}
    spec["context"] = {"far": {"axes": list(of_context)}}
    said = f"relative = 3 .*{re.escape(str(queries))}.*{re.escape(str(attended.split('+')))}"
    with pytest.raises(DeclarationError, match=said):
        ModelSpec.from_dict(spec)


@pytest.mark.parametrize("kind", [{"relative": 3}, {"pair": "z", "width": 3}], ids=str)
@pytest.mark.parametrize(("line", "t"), [("t: ring=2", 7), ("t: ring=2", 6), ("t: ring=3", 8)])
def test_their_lengths_are_compared_where_none_are_given(line, t, kind):
    sizes, names = {**LONG, "t": t}, ("batch",)

    def rank(layout):
        if t == 6:
            return _over_a_context(layout, "t", kind, names, sizes)
        with pytest.raises(ShapeError, match=r"chunks of x must be (.|\n)*pass lengths="):
            _over_a_context(layout, "t", kind, names, sizes)

    wanted = _over_a_context(Layout.single(), "t", kind, names, sizes)
    for found in on_threads(Layout.parse(line), rank, timeout=20):
        for a, b in zip(found or wanted, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-11 * b.abs().max()


@pytest.mark.parametrize(
    "line", ["heads: tp=2", "batch: dp=2; heads: tp=2; t: local", "heads: tp=2; t: ring=3"]
)
@pytest.mark.parametrize("bias", ["alibi", {"relative": 2}, {"pair": "z", "width": 3}], ids=str)
def test_biases_over_a_context_know_heads_by_their_numbers(bias, line):
    spec = {
        "axes": ["batch", "t", "embed"],
        "sizes": {"embed": 8, "heads": 4, "kv_heads": 2},
        "context": {"far": {"axes": ["batch", "k", "embed"]}},
        "block": [{"attend": "k", "context": "far", "bias": bias}],
    }
    x, far = draw(2, 6, 8, seed=1), draw(2, 7, 8, seed=2)
    biases = {"z": draw(6, 7, 3, seed=3)} if "pair" in bias else {}

    def run(layout):
        model = compose(ModelSpec.from_dict(spec), layout, dtype=torch.float64)
        learned = [p for name, p in model.named_parameters() if ".bias." in name]
        for p in learned:
            with torch.no_grad():
                p.copy_(draw(*p.shape, seed=4))
        here = {"batch": 0, "t": 1}
        context = layout.shard(far, {"batch": 0})
        out = model(layout.shard(x, here), {"far": context}, biases=biases)
        out.square().sum().backward()
        layout.sync_gradients(model)
        return layout.gather(out.detach(), here), [p.grad for p in learned]

    wanted = run(Layout.single())
    assert bias == "alibi" or wanted[1]
    for found in weft.on_threads(Layout.parse(line), run):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def with_widths(**sizes) -> ModelSpec:
    """The shipped language model with other widths."""
    declared = ModelSpec.load("causal_lm").model_dump(exclude_unset=True)
    declared["sizes"] = declared["sizes"] | sizes
    return ModelSpec.from_dict(declared)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"embed": 1 << 40}, "give at most 16777216"),
        ({"embed": 1 << 24}, "a model has at most"),
        ({"vocabulary": 1 << 30}, "give at most 16777216"),
    ],
)
def test_widths_beyond_any_model_are_refused(sizes, words):
    with pytest.raises(DeclarationError, match=words):
        with_widths(**sizes)


def test_weights_beyond_the_memory_are_refused_unmade():
    spec = with_widths(embed=1 << 20)
    with pytest.raises(DeclarationError, match=r"weights of [\d,]+ GiB at least .* this machine"):
        compose(spec)
    shapes = compose(spec, device="meta")  # takes no memory
    assert sum(p.numel() for p in shapes.parameters()) > spec.least_weights > 1 << 40


@pytest.mark.parametrize("name", catalog.names("models"))
def test_a_model_of_shapes_alone_has_all_its_weights(name):
    made, shapes = compose(name), compose(name, device="meta")
    assert {k: v.shape for k, v in made.state_dict().items()} == {
        k: v.shape for k, v in shapes.state_dict().items()
    }
    assert {t.device.type for t in shapes.state_dict().values()} == {"meta"}
    assert sum(p.numel() for p in made.parameters()) >= made.spec.least_weights > 0


GLOBE = {"batch": 0, "lat": 1, "lon": 2}


@pytest.mark.parametrize("layout", ["weather-halo-2x2", "lat: ring=3", "heads: tp=2; lat: halo=2"])
def test_the_shipped_weather_model_of_windows_is_exact(layout):
    x = draw(1, 13, 18, 32)

    def run(layout):
        model = compose("weather_windows", layout, dtype=torch.float64)
        mine = layout.shard(x, GLOBE).clone().requires_grad_()
        out = model(mine, lengths={"lat": 13, "lon": 18})
        (out * layout.shard(x.square(), GLOBE)).sum().backward()
        layout.sync_gradients(model)
        return model, out.detach(), mine.grad

    reference, out, dx = run(Layout.single())

    def rank(layout):
        model, *found = run(layout)
        for one, wanted in zip(found, (out, dx)):
            torch.testing.assert_close(one, layout.shard(wanted, GLOBE), rtol=1e-11, atol=1e-11)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            whole = q.grad if p.shape == q.shape else layout.shard(q.grad, {"heads": 0})
            torch.testing.assert_close(p.grad, whole, rtol=1e-10, atol=1e-10)

    named = Layout.load(layout) if "weather" in layout else Layout.parse(layout)
    on_threads(named, rank)
