"""Training: one loss curve per seed whatever the layout, resumable, and better than guessing."""

import math

import pytest
import torch

from weft import on_threads
from weft.comm import run_threads
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout
from weft_axes.nn.parameters import HeadWeight
from weft_models.models import ModelSpec, compose, from_pretrained
from weft_models.train import clip_grad_norm_, fit, stream, trainer
from weft_models.train.step import take_step

QUIET = {"quiet": True, "dtype": torch.float64}

HEADS_AND_BATCH = {"mesh": {"dp": 2, "tp": 2}, "shard": {"batch": ["dp"], "heads": ["tp"]}}

LAYOUTS = [
    ("tabular", HEADS_AND_BATCH),
    ("tabular", "tabular-2x2"),
    ("tabular", "tabular-axial-2x2"),
    ("causal_lm", "tp-x-ring"),
    ("pair", "pair-2x2"),
]


def _layout(layout) -> Layout:
    return Layout.load(layout) if isinstance(layout, str) else Layout.from_dict(layout)


def _small(name: str) -> ModelSpec:
    """The shipped model with short sequences."""
    spec = ModelSpec.load(name)
    length = {"rows": (13, 19), "columns": (13, 19), "features": (2, 5), "tokens": (21, 33)}
    return spec.training({"length": {axis: length[axis] for axis in spec.axes[1:-1]}})


@pytest.mark.few(3)
@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_loss_curve_of_seed_is_the_same_on_every_layout(model, layout):
    spec, options = _small(model), {"steps": 4, "seed": 7, "batch": 3, "lr": 1e-2, **QUIET}
    expected = fit(spec, Layout.single(), **options)
    layout = _layout(layout)
    runs = run_threads(
        dict(layout.mesh), lambda transport: fit(spec, layout.on(transport), **options)
    )
    for run in runs:
        for ours, theirs in zip(run.records, expected.records, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
            assert ours.norm == pytest.approx(theirs.norm, rel=1e-9)
            assert ours.accuracy == pytest.approx(theirs.accuracy)
    assert len(set(expected.losses)) == 4
    assert all(record.bytes > 0 for run in runs for record in run.records)


WAYS = [("tabular-2x2", "fsdp", 2), ("tabular-2x2", "ddp", 2), ("tabular-axial-2x2", "sync", 4)]


def _trained(rank, name, way, parts, folder):
    spec = _small("tabular").training({"gradients": way, "accumulate": parts})
    run = fit(spec, Layout.load(name), steps=3, seed=7, batch=4, log_dir=folder, **QUIET)
    return [(r.loss, r.norm, r.accuracy) for r in run.records]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "way", "parts"), WAYS)
def test_wrappers_and_accumulation_do_not_change_the_curve(name, way, parts, pool, tmp_path):
    wanted = fit(_small("tabular"), Layout.single(), steps=3, seed=7, batch=4, **QUIET)
    for found in pool.run(_trained, name, way, parts, str(tmp_path)):
        for got, record in zip(found, wanted.records, strict=True):
            assert got == pytest.approx((record.loss, record.norm, record.accuracy), rel=1e-9)
    loaded = from_pretrained(tmp_path / "model.safetensors")
    for name, tensor in wanted.model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=1e-8, atol=1e-10)


def test_micro_batches_of_unequal_targets_give_one_mean():
    spec, options = _small("pair"), {"steps": 2, "seed": 7, "batch": 4, **QUIET}
    parts = spec.training({"accumulate": 4, "batch": 4})
    drawn = stream(parts, Layout.single(), seed=7)
    assert len({int(drawn.batch(0, part).counted.sum()) for part in range(4)}) > 1
    one, many = (fit(s, Layout.single(), **options).records for s in (spec, parts))
    for a, b in zip(one, many, strict=True):
        assert (b.loss, b.norm) == pytest.approx((a.loss, a.norm), rel=1e-9)


def test_autocast_changes_the_products_and_not_the_weights():
    spec = _small("tabular").training({"autocast": "bfloat16", "steps": 3, "batch": 2})
    half = fit(spec, Layout.single(), quiet=True)
    full = fit(spec, Layout.single(), quiet=True, autocast=None)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    assert half.losses != full.losses
    assert half.losses == pytest.approx(full.losses, rel=0.05)
    assert any(x != torch.tensor(x).bfloat16().item() for x in half.losses)


def test_gradients_are_clipped_by_the_norm_of_the_whole_model():
    def norms(layout):
        model = compose("causal_lm", layout, seed=1, dtype=torch.float64)
        ids = torch.arange(24).reshape(1, 24) % 32
        model(layout.shard(ids, {"tokens": 1}), lengths={"tokens": 24}).square().sum().backward()
        layout.sync_gradients(model)
        if layout.mesh:  # plain parameters do not say whose heads they hold
            with pytest.raises(UnsupportedError, match="give it the model, which knows"):
                clip_grad_norm_(model.parameters(), 0.5, layout)
        before = clip_grad_norm_(model, 0.5, layout)
        return float(before), float(clip_grad_norm_(model, 0.5, layout))

    layout = Layout.from_dict({"mesh": {"tp": 2}, "shard": {"heads": ["tp"]}})
    expected, after = norms(Layout.single())
    assert after == pytest.approx(0.5, rel=1e-5)
    for ours in run_threads({"tp": 2}, lambda transport: norms(layout.on(transport))):
        assert ours == pytest.approx((expected, after), rel=1e-9)


def test_a_tensor_alone_is_clipped_as_a_list_of_it():
    one, other = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    one.grad, other.grad = torch.full((2, 2), 3.0), torch.full((2, 2), 3.0)
    assert clip_grad_norm_(one, 1.0, Layout.single()) == 6.0
    torch.nn.utils.clip_grad_norm_(other, 1.0)
    torch.testing.assert_close(one.grad, other.grad)


def test_a_loss_that_is_not_finite_stops_the_run():
    with pytest.raises(FloatingPointError, match="step 1: the loss is nan"):
        fit(_small("tabular"), Layout.single(), steps=3, lr=1e300, batch=2, **QUIET)
    for wrong in ({"steps": 0}, {"lr": math.nan}, {"lr": math.inf}, {"lr": -1.0}, {"batch": 0}):
        with pytest.raises(DeclarationError, match=r"(steps|lr|batch) = "):
            fit(_small("tabular"), Layout.single(), **{"steps": 3, "batch": 2, **wrong}, **QUIET)
    headless = ModelSpec.load("weather")
    with pytest.raises(DeclarationError, match=r"'weather' has no head.*a loop of your own"):
        fit(headless, Layout.single(), steps=1, **QUIET)


def _weights_and_refusal(layout, spec, value, clip):
    """What a step says whose gradient alone is not finite, in the last rank's heads."""
    model = compose(spec, layout, seed=7, dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    if layout.rank == layout.world_size - 1:
        heads = next(m for m in model.modules() if isinstance(m, HeadWeight))
        heads.weight.register_hook(lambda gradient: gradient * value)
    optimizer = torch.optim.AdamW(model.parameters(), 1.0)
    data = stream(spec.training({"clip": clip}), layout, 7)
    with pytest.raises(FloatingPointError) as refused:
        take_step(model, layout, optimizer, data, 3)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))
    assert not optimizer.state
    return str(refused.value)


@pytest.mark.parametrize("clip", [1.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("layout", [None, "tabular-2x2", HEADS_AND_BATCH], ids=str)
def test_infinite_gradients_are_refused_before_weights_change(layout, value, clip):
    spec = _small("tabular").training({"batch": 4})
    layout = Layout.single() if layout is None else _layout(layout)
    told = on_threads(layout, _weights_and_refusal, spec, value, clip)
    assert len({*told}) == 1
    assert "step 3: the norm of the gradient is " in told[0]
    assert "though the loss is finite; lower lr" in told[0]


def test_run_whose_gradient_not_finite_leaves_no_checkpoint_of_it(tmp_path, monkeypatch):
    def overflowing(*args, **options):
        model = compose(*args, **options)
        next(model.parameters()).register_hook(lambda gradient: gradient * math.inf)
        return model

    monkeypatch.setattr(trainer, "compose", overflowing)
    folders = {"checkpoint_dir": tmp_path / "steps", "log_dir": tmp_path / "log"}
    with pytest.raises(FloatingPointError, match="step 0: the norm of the gradient is"):
        fit(_small("tabular"), Layout.single(), steps=1, batch=2, **folders, **QUIET)
    assert not [*tmp_path.glob("steps/step-*"), *tmp_path.glob("log/*.safetensors")]


def test_tensorboard_gets_every_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    once = {"batch": 2, "log_dir": tmp_path, **QUIET}
    fit(_small("tabular"), Layout.single(), steps=3, seed=1, **once)  # then hidden by the next
    run = fit(_small("tabular"), Layout.single(), steps=2, **once)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    curves = {"loss", "accuracy", "learning rate", "bytes per step", "tokens per second"}
    curves |= {"gradient norm", "memory in MiB"}
    assert curves <= set(events.Tags()["scalars"])
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(run.losses, rel=1e-6)


@pytest.mark.slow
def test_training_teaches_a_table_model_to_use_the_training_rows():
    spec = ModelSpec.load("tabular")
    length = {"rows": (40, 48), "features": (2, 4)}
    spec = spec.training({"length": length, "steps": 150})
    run = fit(spec, Layout.single(), quiet=True)
    start, end = (sum(run.losses[s]) / 20 for s in (slice(5, 25), slice(-20, None)))
    assert end < start - 0.2
