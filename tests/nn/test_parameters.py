"""Head-parallel parameters are DTensors: torch's own tools are right on real processes."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from weft import Layout, on_threads
from weft_models.models import compose

IDS = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(4))
WHOLE = StateDictOptions(full_state_dict=True)


def _built(line: str) -> Layout:
    layout = Layout.load(line) if ":" not in line else Layout.parse(line)
    bound = layout.build("cpu", timeout=60)
    return bound if isinstance(bound, Layout) else layout


def _model(layout: Layout, seed: int = 3):
    return compose("causal_lm", layout, seed=seed, dtype=torch.float64)


def _loss(model, layout: Layout) -> torch.Tensor:
    ids, targets = (layout.shard(t, {"tokens": 1}) for t in (IDS, IDS.roll(-1, 1)))
    scores = model(ids, lengths={"tokens": IDS.shape[1]}).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(scores, targets.flatten(), reduction="sum")
    return layout.mean(loss, targets.numel())


def _train(layout: Layout, steps: int = 4):
    """Losses and gradient norms of plain torch steps, clipped hard."""
    model = _model(layout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, norms = [], []
    for _ in range(steps):
        loss = _loss(model, layout)
        optimizer.zero_grad()
        loss.backward()
        layout.sync_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, torch.tensor(losses), torch.stack(norms)


def _close(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def _steps(rank: int) -> None:
    *_, losses, norms = _train(_built("tp-x-ring"))
    *_, wanted_losses, wanted_norms = _train(Layout.single())
    _close(losses, wanted_losses)
    _close(norms, wanted_norms)


def test_clipping_and_optimiser_steps_are_those_of_one_device(pool):
    pool.run(_steps)


def _placements(rank: int) -> None:
    layout, whole = _built("tp-x-ring"), dict(_model(Layout.single()).named_parameters())
    model = _model(layout)
    heads = {"query.weight", "key.weight", "value.weight", "out.weight"}
    for name, parameter in model.named_parameters():
        split = name.split("attention.")[-1] in heads
        assert isinstance(parameter, DTensor), name
        assert parameter.placements == ((Shard(0),) if split else (Replicate(),)), name
        assert parameter.device_mesh.mesh_dim_names == ("tp",)
        assert parameter.dtype == torch.float64
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    plain = _model(_built("ring-4"))
    assert not any(isinstance(p, DTensor) for p in plain.parameters())
    two, one = (
        weft.MultiAxisAttention(
            16, 4, axis="tokens", layout=on, generator=torch.Generator().manual_seed(1)
        )
        for on in (_built("heads: a=2 x b=2"), Layout.single())
    )
    assert two.key.weight.to_local().shape == (4, 16)
    assert torch.equal(two.key.weight.full_tensor(), one.key.weight)


def test_weights_are_the_slices_of_one_devices_weights(pool):
    pool.run(_placements)


def _load(rank: int) -> None:
    layout, other = _built("tp-x-ring"), _model(Layout.single(), seed=9)
    wanted = _loss(other, Layout.single()).item()
    model = _model(layout)
    model.load_state_dict(other.state_dict())
    _close(_loss(model, layout).item(), wanted)
    model = _model(layout)
    set_model_state_dict(model, other.state_dict(), options=WHOLE)
    _close(_loss(model, layout).item(), wanted)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    _close(_loss(model, layout).item(), wanted)
    state = other.state_dict()
    state["scores.weight"] = state["scores.weight"][:5]
    with pytest.raises(RuntimeError, match=r"size mismatch for scores.weight"):
        model.load_state_dict(state)


def test_weights_of_one_device_loaded_on_ranks_that_split_heads(pool):
    pool.run(_load)


def test_weights_of_one_device_loaded_on_threads_that_split_heads():
    other = _model(Layout.single(), seed=9)
    wanted = _loss(other, Layout.single()).item()

    def rank(layout):
        model = _model(layout)
        model.load_state_dict(other.state_dict())
        return _loss(model, layout).item()

    for found in on_threads(Layout.load("tp-x-ring"), rank):
        _close(found, wanted)


def _state_dict(rank: int, folder: str) -> None:
    model, optimizer, *_ = _train(layout := _built("tp-x-ring"))
    alone, _, *_ = _train(Layout.single())
    whole, _ = get_state_dict(model, optimizer, options=WHOLE)
    for name, value in alone.state_dict().items():
        _close(whole[name], value)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    for line in ("ring-4", "replicate: b=2; heads: a=2"):
        resumed = _model(layout := _built(line), seed=8)
        fresh = torch.optim.AdamW(resumed.parameters(), 1e-2)
        weights, moments = get_state_dict(resumed, fresh)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        resumed.load_state_dict(weights)
        _close(_loss(resumed, layout).item(), _loss(alone, Layout.single()).item())


def test_a_checkpoint_through_torch_resumes_on_other_layouts(pool, tmp_path):
    pool.run(_state_dict, str(tmp_path))


def test_parameters_stay_plain_on_one_device():
    model = weft.MultiAxisAttention(16, 4, axis="tokens", qk_norm=True)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
