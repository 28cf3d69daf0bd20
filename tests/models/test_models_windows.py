"""Blocks of windows and norms over named axes: the numbers of one device anywhere."""

import math

import pytest
import torch
from torch import Tensor

import weft
from weft import DeclarationError, Layout, ShapeError, on_threads
from weft_axes.nn.parameters import local
from weft_models.models import ModelSpec, compose
from weft_models.models.blocks import BlockInputs

AXES = ("batch", "lat", "lon", "embed")
DIMS = {name: i for i, name in enumerate(AXES[:-1])}

SPEC = {
    "axes": list(AXES),
    "sizes": {"embed": 8, "heads": 2},
    "block": [
        {"conv": "lat+lon", "kernel": [3, 2], "border": {"lat": "reflect", "lon": "circular"}},
        {"norm": "batch"},
        {"conv": ["lat", "lon"], "kernel": 3, "stride": [2, 1]},
        {"attend": "lat+lon", "mask": {"boxes": [3, 4], "shift": [1, 2], "circular": "lon"}},
        {"pool": "max", "over": "lon", "kernel": 3, "stride": 2},
        {"attend": "lat+lon", "mask": {"near": 3}, "rope": True},
        {"norm": "group", "groups": 4, "over": ["lat", "lon"]},
        {"resample": {"lon": 2}},
        {"conv": "lon", "kernel": 3, "dilation": 2, "border": "causal", "depthwise": True},
        {"resample": {"lat": "input", "lon": "input"}, "mode": "linear"},
        {"norm": "layer", "over": "lat"},
        {"mlp": 8},
    ],
}
#: block -> its options
CONVOLUTIONS = {
    "borders": ("lat+lon", {"kernel": [3, 5], "border": {"lat": "reflect", "lon": "circular"}}),
    "stride": ("lat+lon", {"kernel": 3, "stride": 2}),
    "patches": ("lat+lon", {"kernel": 4, "stride": 4}),
    "causal": ("lat+lon", {"kernel": [3, 2], "dilation": 2, "border": "causal"}),
    "even": ("lon+lat", {"kernel": [2, 4], "border": "replicate", "depthwise": True}),
    "one axis": ("lon", {"kernel": 3, "stride": 3, "border": "circular", "depthwise": True}),
    "sparse": ("lat", {"kernel": 1, "stride": 3}),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(length: int, kernel: int, stride: int, dilation: int, border: str) -> list[list[int]]:
    """The positions of every window along an axis, by the formula; -1 for a zero."""
    extent = dilation * (kernel - 1) + 1
    before = extent - 1 if border == "causal" else max(extent - stride, 0) // 2
    rows = []
    for out in range(math.ceil(length / stride)):
        row = [out * stride - before + i * dilation for i in range(kernel)]
        inside = {
            "circular": [p % length for p in row],
            "replicate": [min(max(p, 0), length - 1) for p in row],
            "reflect": [abs(p) if p < length else 2 * (length - 1) - p for p in row],
        }
        rows.append(inside.get(border, [p if 0 <= p < length else -1 for p in row]))
    return rows


def block(layout: Layout | None = None, **options: object) -> torch.nn.Module:
    """A model's only block."""
    model = compose(ModelSpec.from_dict({**SPEC, "block": [options]}), layout, dtype=torch.float64)
    return model.blocks[0]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_is_its_formula(name):
    axes, options = CONVOLUTIONS[name]
    module, x = block(conv=axes, **options), drawn(2, 7, 8, 8)
    borders = dict(zip(module.axis, module.borders))
    sizes = dict(zip(module.axis, zip(module.kernel, module.stride, module.dilation)))
    gathered = torch.nn.functional.pad(x, (0, 0, 0, 1, 0, 1))  # where position -1 is a zero
    for dim, axis in ((1, "lat"), (3, "lon")):  # b y i x j c
        given = (*sizes.get(axis, (1, 1, 1)), borders.get(axis, "zeros"))
        rows = torch.tensor(seen(x.shape[DIMS[axis]], *given))
        gathered = gathered.index_select(dim, rows.flatten() % gathered.shape[dim])
        gathered = gathered.unflatten(dim, rows.shape)
    weight = module.run.weight
    if module.run.groups > 1:
        weight = torch.diag_embed(weight[:, 0].movedim(0, -1)).movedim((-2, -1), (0, 1))
    for axis, at in (("lat", 2), ("lon", 3)):
        if axis not in module.axis:
            weight = weight.unsqueeze(at)
    if module.axis == ("lon", "lat"):
        weight = weight.transpose(2, 3)
    wanted = torch.einsum("byixjc,ocij->byxo", gathered, weight) + module.run.bias
    found = module._turned(x, BlockInputs())
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_pools_count_positions_inside_alone():
    ones = torch.ones(1, 7, 8, 8, dtype=torch.float64)
    windows = {"over": "lat+lon", "kernel": [3, 2], "stride": [1, 2]}
    assert torch.equal(block(pool="mean", **windows)(ones, BlockInputs()), ones[:, :, :4])
    assert torch.equal(block(pool="max", **windows)(-ones, BlockInputs()), -ones[:, :, :4])


def test_running_statistics_are_used_in_evaluation():
    module, x = block(norm="batch"), drawn(3, 5, 4, 8) + 2
    module(x, BlockInputs())
    scale = torch.sqrt(module.run.running_var + module.run.eps)
    wanted = (x - module.run.running_mean) / scale
    torch.testing.assert_close(module.eval()(x, BlockInputs()), wanted)

    def rank(layout):
        split = block(layout, norm="batch").eval()
        split.load_state_dict(module.state_dict())
        out = split(layout.shard(x, DIMS), BlockInputs({"batch": 3, "lat": 5, "lon": 4}))
        torch.testing.assert_close(out, layout.shard(wanted, DIMS))

    on_threads(Layout.parse("lat: halo=2; lon: halo=2"), rank)


@pytest.mark.parametrize("lengths", [{}, {"lat": 7}])
def test_other_chunks_are_refused_on_every_rank(lengths):
    def rank(layout):
        x = layout.shard(drawn(1, 7, 4, 8), DIMS)
        if lengths and layout.chunk("lat"):
            x = x[:, 1:]
        with pytest.raises(ShapeError, match=r"axis 'lat' is|must be the same"):
            block(layout, conv="lat+lon")(x, BlockInputs(lengths))

    on_threads(Layout.parse("lat: halo=2; lon: halo=2"), rank)


@pytest.mark.parametrize("line", ["lat: local", "lat: halo=2"])
@pytest.mark.parametrize(
    ("make", "length"),
    [({"kernel": 9, "border": "reflect"}, 4), ({"dilation": 5, "border": "circular"}, 4), ({}, 0)],
)
def test_an_axis_too_short_for_its_windows_is_refused(make, length, line):
    def run(layout):
        module = block(layout, conv="lat", **make)
        x = torch.zeros(1, length // layout.size("lat"), 2, 8, dtype=torch.float64)
        with pytest.raises((ShapeError, RuntimeError)):
            module(x, BlockInputs())
        module(torch.zeros(1, 12, 2, 8, dtype=torch.float64), BlockInputs())

    weft.on_threads(Layout.parse(line), run)


def trained(layout: Layout, x: Tensor, layouts=None) -> list[Tensor]:
    model = compose(ModelSpec.from_dict(SPEC), layout, layouts=layouts, dtype=torch.float64)
    mine = layout.shard(x, DIMS).clone().requires_grad_()
    out = model(mine, lengths=dict(zip(DIMS, x.shape)))
    (out * layout.shard(drawn(*x.shape, seed=2), DIMS)).sum().backward()
    layout.sync_gradients(model)
    found = [out.detach(), mine.grad]
    for name, p in model.named_parameters():
        grad = local(p.grad) if isinstance(p.grad, torch.Tensor) else p.grad
        assert grad is not None, name
        found.append(grad)
    return [*found, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize(
    ("line", "other", "lat", "lon"),
    [
        ("lat: halo=2; lon: halo=2", "", 13, 9),
        ("lat: halo=3", "", 11, 7),
        ("batch: dp=2; lat: ring=2", "lat+lon: pass_q=4", 9, 10),
        ("lat: ulysses=2", "", 7, 8),
        ("lat(zigzag): ring=2; lon: halo=2", "", 5, 5),
    ],
)
def test_blocks_of_windows_are_one_devices_on_every_layout(line, other, lat, lon):
    x = drawn(3, lat, lon, 8)
    alone = trained(Layout.single(), x)

    def rank(layout):
        layouts = {"lat+lon": Layout.parse(other)} if other else None
        found = trained(layout, x, layouts)
        wanted = [*(layout.shard(t, DIMS) for t in alone[:2]), *alone[2:]]
        for one, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, want, rtol=1e-11, atol=1e-11)

    on_threads(Layout.parse(line), rank)


def test_lengths_after_a_model_are_known():
    blocks = SPEC["block"][:9]
    model = compose(ModelSpec.from_dict({**SPEC, "block": blocks}), dtype=torch.float64)
    after = model.lengths_after({"lat": 13, "lon": 9})
    assert after == {"lat": 7, "lon": 10}
    assert model(drawn(1, 13, 9, 8)).shape == (1, 7, 10, 8)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"conv": "lats"}, "there is no axis 'lats'.*did you mean 'lat'"),
        ({"conv": "lat+lat"}, "an axis is named twice"),
        ({"conv": "lat", "kernel": [3, 3]}, r"kernel = \[3, 3\] needs one number per axis"),
        ({"conv": "lat", "border": {"lon": "zeros"}}, "border names axis 'lon'"),
        ({"conv": "lat", "border": "wrap"}, "border"),
        ({"conv": []}, "one to three axes, found 0"),
        ({"pool": "min", "over": "lat"}, "pool"),
        ({"resample": {"lat": "half"}}, "resample"),
        ({"norm": "group", "over": "lat"}, "groups = None; it is for norm = 'group'"),
        ({"norm": "group", "groups": 3, "over": "lat"}, "not a multiple of groups = 3"),
        ({"norm": "layer"}, "say which axes"),
        ({"norm": "batch", "over": "lat"}, "it is over all axes"),
        ({"conv": "lat", "pool": "max"}, "exactly one of the keys"),
    ],
    ids=str,
)
def test_blocks_of_windows_that_cannot_be_are_refused(block, said):
    with pytest.raises(DeclarationError, match=said):
        ModelSpec.from_dict({**SPEC, "block": [block]})


def test_a_head_needs_a_result_for_every_position():
    spec = {
        "head": "tokens",
        "axes": ["batch", "tokens", "embed"],
        "sizes": {"embed": 8, "heads": 2, "vocabulary": 5},
    }
    ModelSpec.from_dict({**spec, "block": [{"conv": "tokens", "border": "causal"}]})
    with pytest.raises(DeclarationError, match="needs a result for every position"):
        ModelSpec.from_dict({**spec, "block": [{"conv": "tokens", "stride": 2}]})


def test_positions_in_windows_are_not_cached():
    spec = {**SPEC, "block": [{"conv": "lat"}, {"attend": "lat", "mask": "first-keys"}]}
    model = compose(ModelSpec.from_dict(spec))
    with pytest.raises(DeclarationError, match="block 0 sees several of its positions"):
        model.encode(torch.zeros(1, 4, 4, 8), "lat")


@pytest.mark.slow
def test_a_model_of_windows_compiles_whole_on_one_device():
    model = compose(ModelSpec.from_dict(SPEC), dtype=torch.float64).eval()
    x = drawn(1, 7, 8, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    model, x, context = compose("weather"), torch.randn(1, 2, 3, 4, 32), torch.randn(1, 3, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(x, {"forcing": context}), model(x, {"forcing": context}), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("layout", ["weather-halo-2x2", "lat: ring=3", "heads: tp=2; lat: halo=2"])
def test_the_shipped_weather_model_of_windows_is_exact(layout):
    x = drawn(1, 13, 18, 32)

    def run(layout):
        model = compose("weather_windows", layout, dtype=torch.float64)
        mine = layout.shard(x, DIMS).clone().requires_grad_()
        out = model(mine, lengths={"lat": 13, "lon": 18})
        (out * layout.shard(drawn(*x.shape, seed=1), DIMS)).sum().backward()
        layout.sync_gradients(model)
        return model, out.detach(), mine.grad

    reference, out, dx = run(Layout.single())

    def rank(layout):
        model, *found = run(layout)
        for one, wanted in zip(found, (out, dx)):
            torch.testing.assert_close(one, layout.shard(wanted, DIMS), rtol=1e-11, atol=1e-11)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            whole = q.grad if p.shape == q.shape else layout.shard(q.grad, {"heads": 0})
            torch.testing.assert_close(p.grad, whole, rtol=1e-10, atol=1e-10)

    named = Layout.load(layout) if "weather" in layout else Layout.parse(layout)
    on_threads(named, rank)


class Forecast(torch.nn.Module):
    """The shipped trunk with an embedding and a head of plain torch."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.trunk = compose("weather_windows", layout, dtype=torch.float64)
        torch.manual_seed(7)
        self.enter = torch.nn.Linear(2, 32, dtype=torch.float64)
        self.leave = torch.nn.Linear(32, 2, dtype=torch.float64)

    def forward(self, fields: Tensor) -> Tensor:
        lengths = {"lat": 13, "lon": 18}
        return fields + self.leave(self.trunk(self.enter(fields), lengths=lengths))


def losses(layout: Layout, way: str) -> list[float]:
    """Of three steps; gradients are summed by DDP, FSDP2, or after the backward pass."""
    model = Forecast(layout)
    model = model if way == "sync" else weft.data_parallel(model, layout, way)
    optimizer, found = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(3):
        now = layout.shard(drawn(1, 13, 18, 2, seed=step), DIMS)
        loss = layout.mean((model(now) - now.square()).square().sum(), now.numel())
        optimizer.zero_grad()
        loss.backward()
        if way == "sync":
            layout.sync_gradients(model)
        optimizer.step()
        found.append(loss.item())
    return found


def _on_ranks(rank: int, way: str) -> list[float]:
    return losses(Layout.load("weather-halo-2x2").build("cpu", timeout=60), way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "ddp", "fsdp"])
def test_windows_train_on_real_ranks_as_on_one(pool, way):
    alone = losses(Layout.single(), "sync")
    for found in pool.run(_on_ranks, way):
        assert max(abs(a - b) for a, b in zip(found, alone, strict=True)) < 1e-10


@pytest.mark.parametrize("lengths", [{}, {"tim": 3}, {"time": 13, "tim": 3}])
def test_lengths_after_a_trunk_are_of_its_axes(lengths):
    spec = {"axes": ["batch", "time", "embed"], "sizes": {"embed": 8, "heads": 2}}
    blocks = [{"conv": "time", "kernel": 4, "stride": 4}, {"attend": "time"}]
    with pytest.raises(DeclarationError, match="lengths"):
        compose(ModelSpec.from_dict(spec | {"block": blocks})).lengths_after(lengths)
