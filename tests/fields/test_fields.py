"""Fields: functions of torch on split tensors beside one device, in values and every gradient."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import weft
from benchmarks.fields import CASES, measure
from weft import Field, Layout, ShapeError, UnsupportedError
from weft._torch import as_torch_does, fake_ranks

GRIDS = ((2, 2), (3, 1), (1, 4), (3, 2), (5, 1))


def grid(height: int, width: int) -> Layout:
    """A layout that splits height and width, by gather where attention runs over them."""
    parts = {"height": height, "width": width}
    terms = (f"{a}: gather={n}" if n > 1 else f"{a}: local" for a, n in parts.items())
    return Layout.parse("; ".join(terms))


def error(found: Tensor, right: Tensor) -> float:
    """The largest error, relative to the largest entry."""
    if not right.numel():
        return 0.0
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-300))


def errors(
    layout: Layout,
    run: Callable,
    params: list[Tensor],
    x: Tensor,
    where: dict[str, int],
    chunks: dict[str, tuple[int, ...]] | None = None,
) -> list[float]:
    """Errors of output, d input and d parameters of `run(params, x)` on a layout."""
    leaves = [t.clone().requires_grad_() for t in (x, *params)]
    y = run(leaves[1:], leaves[0])
    w = torch.randn(y.shape, generator=torch.Generator().manual_seed(987654), dtype=y.dtype)
    wanted = [y.detach(), *torch.autograd.grad((y * w).sum(), leaves, allow_unused=True)]

    def rank(layout):
        whole = x.clone().requires_grad_()
        own = [p.clone().requires_grad_() for p in params]
        field = Field.distribute(whole, layout, where)
        for axis, starts in (chunks or {}).items():
            field = in_chunks(field, where[axis], axis, starts)
        out = run(own, field)
        (out * w).sum().backward()
        zeros = [torch.zeros_like(t) if t.grad is None else t.grad for t in (whole, *own)]
        return out.full_tensor().detach(), zeros

    ranks = weft.on_threads(layout, rank)
    shares = (sum(r[1][i] for r in ranks) for i in range(1, len(leaves)))
    found = [ranks[0][0], ranks[-1][1][0], *shares]
    return [error(a, torch.zeros_like(a) if b is None else b) for a, b in zip(found, wanted)]


def in_chunks(field: Field, dim: int, axis: str, starts: tuple[int, ...]) -> Field:
    """A field in other chunks of an axis, some of them empty."""
    from weft_axes.fields.dims import split_dim
    from weft_axes.fields.exchange import placed_like

    if axis not in field.chunks:
        return field
    place = field._place
    dims = [
        *place.dims[:dim],
        split_dim(field._region.chunks_like(axis, 0).contiguous(starts)),
        *place.dims[dim + 1 :],
    ]
    local = placed_like(field.to_local(), place.dims, dims, place.region)
    return Field(local, place.region.place(dims))


def net(p: list[Tensor], x: Tensor) -> Tensor:
    """What an autoencoder does: pads, strides, norms and resampling."""
    x = F.conv2d(F.pad(x, (0, 1, 0, 1)), p[0], None, 2)
    x = F.conv2d(F.silu(F.group_norm(x, 2)), p[1], None, 1, 1)
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def functions(rng: random.Random, height: int, width: int) -> dict[str, tuple]:
    """Name -> (function of parameters and x, shapes of parameters), with random options."""
    k, s, d = rng.randrange(1, 6), rng.randrange(1, 4), rng.randrange(1, 3)
    least = min(height, width)
    while d * (k - 1) + 1 > least:
        k -= 1
    p, g = rng.randrange(0, d * (k - 1) // 2 + 1), rng.choice([1, 2])
    mode, pads = (
        rng.choice(["circular", "reflect", "replicate"]),
        [rng.randrange(4) for _ in "1234"],
    )
    out_pad, cut, a = rng.randrange(0, s), rng.randrange(0, (k + 1) // 2), rng.randrange(2, 4)
    half, ceil, counted = rng.randrange(0, a // 2 + 1), rng.random() < 0.5, rng.random() < 0.5
    size, factor = (rng.randrange(3, 20), rng.randrange(3, 20)), rng.choice([2, 3, 1.5, 0.5])
    corners, shift = rng.random() < 0.5, (rng.randrange(-9, 9), rng.randrange(-9, 9))
    low, step = rng.randrange(0, 3), rng.randrange(1, 4)
    return {
        "conv": (lambda q, x: F.conv2d(x, q[0], q[1], s, p, d, g), (6, 4 // g, k, k), (6,)),
        "conv of a pad": (lambda q, x: F.conv2d(F.pad(x, pads, mode), q[0], None, s), (6, 4, k, k)),
        "conv same": (lambda q, x: F.conv2d(x, q[0], None, 1, "same", d), (5, 4, k, k)),
        "conv transposed": (
            lambda q, x: F.conv_transpose2d(x, q[0], q[1], s, cut, out_pad),
            (4, 3, k, k),
            (3,),
        ),
        "average pool": (lambda q, x: F.avg_pool2d(x, a, s, half, ceil, counted),),
        "max pool": (lambda q, x: F.max_pool2d(x - 5, a, s, half, 1, ceil),),
        "wide pool": (lambda q, x: F.avg_pool2d(x, 1 << 15, ceil_mode=True, padding=half),),
        "nearest": (lambda q, x: F.interpolate(x, scale_factor=factor),),
        "nearest exact": (lambda q, x: F.interpolate(x, size=size, mode="nearest-exact"),),
        "linear": (
            lambda q, x: F.interpolate(x, size=size, mode="bilinear", align_corners=corners),
        ),
        "linear by a factor": (
            lambda q, x: F.interpolate(x, scale_factor=factor, mode="bilinear"),
        ),
        "group norm": (lambda q, x: F.group_norm(x + 1e2, 2, *q), (4,), (4,)),
        "instance norm": (lambda q, x: F.instance_norm(x),),
        "batch norm": (lambda q, x: F.batch_norm(x, None, None, *q, training=True), (4,), (4,)),
        "layer norm": (
            lambda q, x: F.layer_norm(x, (4, height, width), *q),
            (4, height, width),
            (4, height, width),
        ),
        "rms norm": (lambda q, x: F.rms_norm(x, (width,), q[0], 1e-6), (width,)),
        "roll": (lambda q, x: torch.roll(x, shift, (2, 3)) * q[0], (1, 4, height, width)),
        "slices": (lambda q, x: torch.cat([x[:, :, low::step], x[:, :, low::step]], 1) * 2,),
        "one row": (lambda q, x: x[:, :, low] + x[:, :, -1],),
        "mean": (lambda q, x: x - x.mean((2, 3), keepdim=True),),
        "largest": (lambda q, x: x / x.abs().amax((1, 2, 3), keepdim=True),),
        "windows": (
            lambda q, x: x[:, :, : height // 2 * 2].unflatten(2, (-1, 2)).softmax(3).flatten(2, 3),
        ),
        "tokens": (lambda q, x: F.linear(x.flatten(2).transpose(1, 2), q[0], q[1]), (5, 4), (5,)),
        "attention": (
            lambda q, x: F.scaled_dot_product_attention(
                *(F.linear(x.flatten(2).mT, w).unflatten(2, (2, 3)).transpose(1, 2) for w in q)
            ),
            *[(6, 4)] * 3,
        ),
        "linear attention": (lambda q, x: (x.flatten(2) @ x.flatten(2).mT) @ q[0], (4, 3)),
        "pixels": (lambda q, x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) * x,),
        "net": (net, (4, 4, 3, 3), (4, 4, 3, 3)),
    }


def check(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layout = grid(*GRIDS[seed % len(GRIDS)])
    height, width = rng.randrange(5, 14), rng.randrange(5, 14)
    x, where = torch.randn(2, 4, height, width, dtype=torch.float64), {"height": 2, "width": 3}
    chunks = None
    if seed % 2:
        chunks = {
            axis: (0, *sorted(rng.randrange(0, n + 1) for _ in range(layout.size(axis) - 1)), n)
            for axis, n in (("height", height), ("width", width))
        }
    for name, (run, *shapes) in functions(rng, height, width).items():
        params = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        try:
            run(params, x)
        except RuntimeError:  # torch refuses these options
            continue
        found = errors(layout, run, params, x, where, chunks)
        assert max(found) < 1e-12, (name, layout.name, height, width, chunks, found)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(6))
def test_functions_equal_one_device(seed):
    check(seed)


def _functions_on_processes(rank: int, seeds: list[int]) -> None:
    """The same on real ranks, whose layouts are built once."""
    built: dict[str, Layout] = {}

    def on_ranks(layout: Layout, run: Callable) -> list:
        if layout.name not in built:
            built[layout.name] = layout.build("cpu")
        every: list = [None] * layout.world_size
        torch.distributed.all_gather_object(every, run(built[layout.name]))
        return every

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weft, "on_threads", on_ranks)
        for seed in seeds:
            check(seed)


@pytest.mark.slow
def test_functions_equal_one_device_on_processes():
    seeds = [s for s in range(30) if math.prod(GRIDS[s % len(GRIDS)]) == 4]
    with Pool(4) as pool:
        pool.run(_functions_on_processes, seeds)


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "grid"), [("autoencoder_kl", "2x2"), ("swin", "3x1")])
def test_an_unmodified_model_equals_one_device(name, grid):
    assert_exact(name, grid)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["2x2", "3x1", "1x5"])
@pytest.mark.parametrize("name", list(CASES))
def test_unmodified_models_equal_one_device(name, grid):
    assert_exact(name, grid)


def assert_exact(name: str, grid: str) -> None:
    """Gradients that are zero in exact numbers are measured against 1e-6 of the largest."""
    found = measure(name, grid)
    assert max(found.output, found.d_input, found.buffers) < 1e-11, found
    assert found.d_parameters < 1e-9, found


def test_a_training_step_equals_that_of_one_device():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(4), torch.nn.SiLU()
    ).double()
    x = torch.randn(2, 3, 13, 9, dtype=torch.float64)

    def step(model: torch.nn.Module, sync=None) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if sync is not None:
                sync(model)
            optimizer.step()
        return {name: t.detach() for name, t in model.state_dict().items()}

    def rank(layout: Layout) -> dict[str, Tensor]:
        return step(weft.parallelize(copy.deepcopy(model), layout), layout.sync_gradients)

    layout = Layout.load("field-2x2")
    ranks, right = weft.on_threads(layout, rank), step(copy.deepcopy(model))
    for found in ranks:
        for name, tensor in right.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)


def test_a_model_is_as_before_after_restore():
    model = torch.nn.Conv2d(3, 4, 3)
    on_layout = weft.parallelize(model, Layout.single(), dims={"height": 2})
    assert on_layout is model
    assert "forward" in vars(model)
    with pytest.raises(weft.DeclarationError, match="parallelized already"):
        weft.parallelize(model, Layout.single(), dims={"height": 2})
    weft.restore(model)
    assert not {"forward", "_weft"} & vars(model).keys()


def test_outputs_stay_fields_where_asked():
    convolution = torch.nn.Conv2d(1, 1, 3)
    layout = Layout.parse("height: halo=3")

    def rank(layout):
        model = weft.parallelize(copy.deepcopy(convolution), layout, output="field")
        out = model(torch.ones(1, 1, 11, 5))
        return isinstance(out, Field), tuple(out.shape), out.chunks["height"]

    assert weft.on_threads(layout, rank)[0] == (True, (1, 1, 9, 3), (0, 3, 7, 9))


# -- memory, bytes, precision ---------------------------------------------------------------------


def test_a_rank_keeps_its_share_and_receives_strips():
    layers = [torch.nn.Conv2d(4, 4, 3, 1, 1), torch.nn.GroupNorm(2, 4), torch.nn.SiLU()]
    model = torch.nn.Sequential(*(copy.deepcopy(m) for _ in range(4) for m in layers))
    x = torch.randn(1, 4, 96, 96)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(run: Callable) -> int:
        storages: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = run()
        return sum(n for at, n in storages.items() if at not in weights) if out is not None else 0

    def rank(layout):
        field = Field.distribute(x, layout, {"height": 2, "width": 3}).requires_grad_()
        with weft.traffic(layout) as moved:
            nbytes = kept(lambda: model(field))
        assert moved.received == moved.predicted.received
        return nbytes, sum(moved.received.values())

    alone = kept(lambda: model(x.clone().requires_grad_()))
    gathered = 4 * 3 * x.numel()  # of every convolution's input, what three other ranks hold
    for nbytes, received in weft.on_threads(Layout.load("field-2x2"), rank):
        assert nbytes * 4 < 1.15 * alone
        assert received * 20 < gathered


def test_joined_parts_are_attended_in_the_least_room():
    def rank(layout):
        cut = (Field.distribute(torch.randn(1, 2, n, 4), layout, {"tokens": 2}) for n in (13, 5))
        x = torch.cat([*cut], 2)  # of 10 and 8 tokens, attended as 10 and 9
        with weft.traffic(layout) as moved:
            F.scaled_dot_product_attention(x, x, x)
        return moved.by_tensor()["out"]

    assert weft.on_threads(Layout.parse("tokens: ulysses=2"), rank) == [10 * 4 * 4, 9 * 4 * 4]


#: functions that look positions up, or fill what is outside
LOOKED_UP = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, size=(10, 9)),
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "circular": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "filled": lambda x: F.pad(x, (1, 2, 2, 1), value=3.0),
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_indices_are_made_and_uploaded_once(name, monkeypatch):
    """A copy to a device in every call would wait for it, or at least be launched."""
    made, real = [], torch.tensor
    layout, x = grid(2, 1), torch.randn(1, 2, 9, 7)

    def rank(layout):
        field = Field.distribute(x, layout, {"height": 2})
        first = LOOKED_UP[name](field).full_tensor()
        return field, first

    weft.clear_caches()
    fields = weft.on_threads(layout, rank)
    monkeypatch.setattr(torch, "tensor", lambda *a, **b: made.append(a) or real(*a, **b))
    monkeypatch.setattr(torch, "arange", lambda *a, **b: made.append(a))
    again = weft.on_threads(layout, rank)
    assert torch.equal(again[0][1], fields[0][1])
    torch.testing.assert_close(again[0][1], LOOKED_UP[name](x))
    indices = [a for a in made if a and not (isinstance(a[0], list) and len(a[0]) == 1)]
    assert not indices, "besides the numbers of passes"


def test_norms_lose_no_digits_where_the_mean_is_large():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 23, 11) + 1e4
    right = F.group_norm(x.double(), 2)
    alone = float((F.group_norm(x, 2) - right).abs().max())

    def rank(layout):
        field = Field.distribute(x, layout, {"height": 2, "width": 3})
        return F.group_norm(field, 2).full_tensor()

    for found in weft.on_threads(Layout.load("field-2x2"), rank):
        assert float((found - right).abs().max()) <= 2 * alone


def test_gradients_of_one_row_through_batch_norm_in_evaluation():
    """Which come back in the strides of a transposed view."""
    x, w = torch.randn(2, 1, 8, 4, 4, dtype=torch.float64)
    norm, scale = torch.nn.BatchNorm2d(8).double().eval(), (1 + 1e-5) ** -0.5

    def rank(layout: Layout) -> Tensor:
        given = x.clone().requires_grad_()
        y = norm(Field.distribute(given, layout, {"height": 2}))
        out = y.view(1, 8, 16).permute(0, 2, 1).sin().full_tensor()
        return torch.autograd.grad((out * w.view(1, 8, 16).mT.contiguous()).sum(), given)[0]

    for found in weft.on_threads(Layout.parse("height: ring=2"), rank):
        torch.testing.assert_close(found, w * (x * scale).cos() * scale)


def test_running_statistics_are_those_of_all_positions():
    x = torch.randn(2, 4, 13, 9, dtype=torch.float64)
    alone = torch.nn.BatchNorm2d(4).double()
    alone(x)

    def rank(layout):
        norm = torch.nn.BatchNorm2d(4).double()
        norm(Field.distribute(x, layout, {"height": 2, "width": 3}))
        return norm.running_mean, norm.running_var

    for mean, variance in weft.on_threads(grid(3, 1), rank):
        torch.testing.assert_close(mean, alone.running_mean)
        torch.testing.assert_close(variance, alone.running_var)


def _low_precision(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.group_norm(F.conv2d(x, weight, None, 1, 1), 2))


def _norm_alone(x: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(x, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layer", "mean"), [(_low_precision, 0), (_norm_alone, 16)])
def test_low_precision_is_as_near_as_one_device(layer, mean, dtype):
    torch.manual_seed(0)
    x, weight = (torch.randn(2, 4, 13, 9) + mean).to(dtype), torch.randn(4, 4, 3, 3).to(dtype)
    right = layer(x.double(), weight.double())
    alone = float((layer(x, weight).double() - right).abs().max())

    def rank(layout):
        field = Field.distribute(x, layout, {"height": 2, "width": 3})
        return layer(field, weight).full_tensor().double()

    for found in weft.on_threads(Layout.load("field-2x2"), rank):
        assert float((found - right).abs().max()) <= 2 * alone


def test_autocast_casts_as_on_one_device():
    x, model = (
        torch.randn(1, 4, 13, 9),
        torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.GroupNorm(2, 4)),
    )

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x), F.conv2d(x, model[0].weight)

    right = run(x)

    def rank(layout):
        outs = run(Field.distribute(x, layout, {"height": 2, "width": 3}))
        return [out.full_tensor() for out in outs]

    for found in weft.on_threads(Layout.load("field-2x2"), rank):
        for a, b in zip(found, right):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


# -- gradients through other tools ----------------------------------------------------------------


def test_checkpointed_layers_have_the_same_gradients():
    x, weight = torch.randn(1, 2, 9, 7, dtype=torch.float64), torch.randn(2, 2, 3, 3).double()
    layer = lambda x, w: F.group_norm(F.conv2d(x, w, None, 1, 1), 2).tanh()  # noqa: E731

    def rank(layout):
        made = []
        for checkpointed in (False, True):
            field = Field.distribute(x, layout, {"height": 2, "width": 3}).requires_grad_()
            own = weight.clone().requires_grad_()
            if checkpointed:
                out = checkpoint(layer, field, own, use_reentrant=False)
            else:
                out = layer(field, own)
            out.square().sum().backward()
            made.append((field.to_local().grad, own.grad))
        return made

    for one, two in weft.on_threads(Layout.load("field-2x2"), rank):
        torch.testing.assert_close(one, two)


def test_checkpoints_within_checkpoints_have_the_same_gradients():
    x, weight = torch.randn(1, 2, 9, 7, dtype=torch.float64), torch.randn(2, 2, 3, 3).double()
    run = functools.partial(checkpoint, use_reentrant=False)

    def layer(x, w, call):
        return F.group_norm(F.conv2d(call(torch.mul, x, x), w, None, 1, 1), 2).tanh()

    def block(x, w, call):
        return call(layer, call(layer, x, w, call), w, call) * 2

    def rank(layout, call):
        field = Field.distribute(x, layout, {"height": 2, "width": 3}).requires_grad_()
        own = weight.clone().requires_grad_()
        call(block, field, own, call).square().sum().backward()
        return field.to_local().grad, own.grad

    layout = Layout.load("field-2x2")
    plain = weft.on_threads(layout, rank, lambda fn, *args: fn(*args))
    for one, two in zip(plain, weft.on_threads(layout, rank, run)):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


REFUSED = {
    "a function without a rule": (lambda x: torch.fft.fft(x), "fft_fft has no rule"),
    "dropout on threads": (lambda x: F.dropout(x, 0.1), "ranks that are threads share"),
    "an autograd function": (lambda x: Twice.apply(x.requires_grad_()) + 1, "gradients through it"),
    "a function that torch makes": (lambda x: torch.unique(x), "torch's unique has no rule"),
    "random numbers": (lambda x: torch.randn_like(x), "has no rule"),
    "numbers in place": (lambda x: torch.ones(1, 1, 5, 6).add_(x), "into a plain tensor"),
    "a view that cuts an axis": (lambda x: x.reshape(1, 3, 10), "cuts a split axis elsewhere"),
    "a copy": (lambda x: copy.deepcopy(x), "is not copied"),
    "a resampling": (lambda x: F.interpolate(x, size=(3, 3), mode="bicubic"), "bicubic"),
    "the address of its numbers": (lambda x: x.data_ptr(), "lie in memory"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_split_is_refused_by_name(what):
    run, message = REFUSED[what]

    def rank(layout):
        x = Field.distribute(torch.randn(1, 1, 5, 6), layout, {"height": 2, "width": 3})
        with pytest.raises(UnsupportedError, match=message):
            run(x)
        return True

    assert all(weft.on_threads(Layout.load("field-2x2"), rank))


def test_a_dtensor_is_refused_where_a_plain_tensor_was_met_before():
    plain = torch.ones(4, 4)

    def rank(layout):
        x = Field.distribute(torch.ones(1, 6, 4), layout, {"height": 1})
        F.linear(x, plain)
        with pytest.raises(UnsupportedError, match=r"gets a weft\.Field and a DTensor"):
            F.linear(x, of_mesh)

    with fake_ranks(0, 2):
        of_mesh = DTensor.from_local(plain, init_device_mesh("cpu", (2,)), [Replicate()])
        weft.on_threads(Layout.parse("height: gather=2"), rank)


def test_a_layout_that_fields_used_is_pickled_as_a_declaration():
    def rank(layout):
        Field.distribute(torch.ones(1, 1, 5, 6), layout, {"height": 2}).add(1)
        return pickle.loads(pickle.dumps(layout)) == layout.unbound

    assert all(weft.on_threads(Layout.load("field-2x2"), rank))


def test_code_below_torch_functions_raises():
    def rank(layout):
        x = Field.distribute(torch.randn(1, 1, 5, 6), layout, {"height": 2, "width": 3})
        with pytest.raises(UnsupportedError, match="past torch's Python functions"):
            as_torch_does(torch.exp, x)
        return True

    assert all(weft.on_threads(Layout.load("field-2x2"), rank))


def test_calls_that_cannot_be_split_are_refused_on_every_rank():
    model = torch.nn.Conv2d(1, 1, 3)

    def rank(layout):
        split = weft.parallelize(copy.deepcopy(model), layout)
        split.use_tiling = True
        with pytest.raises(UnsupportedError, match=r"vae\.disable_tiling"):
            split(torch.ones(1, 1, 5, 5))
        split.use_tiling = False
        with pytest.raises(ShapeError, match="must be the same on every rank"):
            split(torch.ones(1, 1, 5, 5 + layout.rank))
        return True

    assert all(weft.on_threads(Layout.parse("height: halo=2"), rank))
    with pytest.raises(weft.DeclarationError, match="dims= says which dim"):
        weft.on_threads(
            Layout.parse("height: halo=2; rows: ring=2"),
            lambda layout: weft.parallelize(copy.deepcopy(model), layout),
        )


def test_attention_over_an_axis_that_is_not_attended_is_refused():
    layout = Layout.from_dict({"mesh": {"y": 2}, "shard": {"height": ["y"]}})

    def rank(layout):
        x = Field.distribute(torch.randn(1, 1, 6, 4), layout, {"height": 2})
        with pytest.raises(UnsupportedError, match="declare how, as in"):
            F.scaled_dot_product_attention(x, x, x)
        return True

    assert all(weft.on_threads(layout, rank))


# -- processes ------------------------------------------------------------------------------------


def _layers() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(4), torch.nn.SiLU()]
    more = [torch.nn.Upsample(scale_factor=2), torch.nn.Conv2d(4, 3, 3, padding=1)]
    return torch.nn.Sequential(*layers, *more).double()


def _on_processes(rank: int, way: str) -> dict[str, float]:
    """Errors of gradients under DDP, and under FSDP2 with its units inside the model."""
    layout = Layout.load("field-2x2").build("cpu")
    x = torch.randn(1, 3, 13, 9, generator=torch.Generator().manual_seed(1)).double()
    base = _layers()
    base(x).square().mean().backward()
    model = weft.parallelize(_layers(), layout)
    wrapped = weft.data_parallel(model, layout, way)
    wrapped(x).square().mean().backward()
    pairs = zip(base.named_parameters(), model.parameters())
    full = {n: (p.grad.full_tensor() if way == "fsdp" else p.grad, q.grad) for (n, q), p in pairs}
    return {name: error(*grads) for name, grads in full.items()}


@pytest.mark.sample
def test_four_processes_do_the_same_under_ddp_and_fsdp():
    with Pool(4) as pool:
        for way in ("ddp", "fsdp"):
            for found in pool.run(_on_processes, way):
                assert max(found.values()) < 1e-11, (way, found)


def test_ranks_of_which_one_has_a_view_agree_on_how_values_were_made():
    def rank(layout: Layout) -> Tensor:
        local = torch.arange(6.0)[:3] if layout.rank else torch.arange(3.0)
        x = Field.from_local(local, layout, {"a": 0}, {"a": 6})
        return x.to(x.dtype).full_tensor()

    whole = weft.on_threads(Layout.parse("a: ring=2"), rank)[0]
    torch.testing.assert_close(whole, torch.tensor([0.0, 1, 2, 0, 1, 2]))
