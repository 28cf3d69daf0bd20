"""`weft.nn.GatedDeltaNet` on layouts beside one device: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import weft
from weft.layout import Layout
from weft.nn import GatedDeltaNet, recurrent
from weft.nn.recurrent import gated_delta_rule

TOKENS = {"mesh": {"a": 2, "b": 2}, "shard": {"tokens": ["a", "b"]}}
ATTEND = [{"strategy": "ulysses", "on": "a"}, {"strategy": "ring", "on": "b"}]
BY_HEADS = [{"strategy": "ulysses", "on": "a"}, {"strategy": "state", "on": "b"}]
CHAIN = [{"strategy": "ulysses", "on": "a"}, {"strategy": "state_chain", "on": "b"}]
LAYOUTS = {
    "ring": Layout.parse("tokens: ring=3"),
    "zigzag": Layout.parse("tokens(zigzag): ring=3"),
    "chain": Layout.parse("tokens(zigzag): state_chain=3"),
    "tile": Layout.parse("tokens: tile=2x2"),
    "batch and heads": Layout.parse("batch: dp=2; heads: tp=2; tokens: ring=2"),
    "ulysses": Layout.from_dict(TOKENS | {"carry": {"tokens": BY_HEADS}}),
    "ulysses and a chain": Layout.from_dict(TOKENS | {"carry": {"tokens": CHAIN}}),
    "heads within ulysses": Layout.from_dict(
        {"mesh": {"u": 2, "tp": 2}, "shard": {"tokens": ["u"], "heads": ["tp"]}}
        | {"carry": {"tokens": [{"strategy": "ulysses", "on": "u"}]}}
    ),
    "no carry": Layout.from_dict(TOKENS | {"attend": {"tokens": ATTEND}}),
    "one way for all": Layout.from_dict(
        {"mesh": {"u": 4}, "shard": {"tokens": ["u"]}, "order": {"tokens": "striped"}}
        | {"carry": {"tokens": [{"strategy": "ulysses", "on": "u"}]}}
    ),
}


def layer(layout: Layout | None = None) -> GatedDeltaNet:
    """The same weights on every layout; states decay slowly."""
    make = torch.Generator().manual_seed(0)
    found = GatedDeltaNet(
        24, 4, axis="tokens", layout=layout, head_dim=5, generator=make, dtype=torch.float64
    )
    with torch.no_grad():
        found.log_decay.weight.fill_(-3.0)
    return found


def weights(module: GatedDeltaNet) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.few(12)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("length", "documents"), [(150, None), (2, None), (150, (70, 1, 79))])
def test_outputs_and_gradients_are_those_of_one_device(name, length, documents):
    packed = documents and weft.Documents(documents)
    make = torch.Generator().manual_seed(1)
    x, above = torch.randn(2, 2, length, 24, dtype=torch.float64, generator=make)
    one, whole = layer(), x.clone().requires_grad_()
    out = one(whole, documents=packed)
    (out * above).sum().backward()

    def rank(layout):
        cut = {"batch": 0, "tokens": 1}
        module, own = layer(layout), layout.shard(x, cut).requires_grad_()
        found = module(own, {"tokens": length}, packed)
        (found * layout.shard(above, cut)).sum().backward()
        layout.sync_gradients(module)
        shares = [layout.gather(t.detach(), cut) for t in (found, own.grad)]
        heads = {
            n: g if n == "gain" else layout.gather(g, {"heads": 0})
            for n, g in weights(module).items()
        }
        return shares, heads

    (found, dx), grads = weft.on_threads(LAYOUTS[name], rank)[0]
    torch.testing.assert_close(found, out.detach(), rtol=0, atol=1e-11)
    torch.testing.assert_close(dx, whole.grad, rtol=0, atol=1e-11)
    for weight, grad in weights(one).items():
        torch.testing.assert_close(grads[weight], grad, rtol=1e-11, atol=1e-11, msg=weight)


def test_a_chain_within_ulysses_hands_states_on(monkeypatch):
    def states(self, *args, **kwargs):
        raise AssertionError("maps are composed, but the layout hands states on")

    monkeypatch.setattr(recurrent.LocalPieces, "states", states)
    layer_of = lambda layout: layer(layout)(torch.ones(1, 4, 24, dtype=torch.float64))  # noqa: E731
    weft.on_threads(LAYOUTS["ulysses and a chain"], layer_of)


def test_chunks_are_the_recurrence():
    make = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 2, 100, 3, 4, dtype=torch.float64, generator=make)
    k = torch.nn.functional.normalize(k, dim=-1)
    gates = torch.rand(2, 2, 100, 3, dtype=torch.float64, generator=make)
    decay, beta = -gates[0] * 0.1, gates[1]
    start = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=make)
    found, end = gated_delta_rule(q, k, v, decay, beta, start)
    outs, state = [], start
    for t in range(100):
        state = state * decay[:, t].exp()[..., None, None]
        seen = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        added = torch.einsum("bhk,bhv,bh->bhkv", k[:, t], v[:, t] - seen, beta[:, t])
        state = state + added
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    torch.testing.assert_close(found, torch.stack(outs, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(end, state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("line", ["tokens: state_chain=4", "tokens(zigzag): state_chain=2"])
def test_chain_at_kernels_cuts_has_the_bits_of_one_device(line):
    """Cuts at multiples of 64 tokens, as the kernel cuts its chunks; in fp32."""
    layout, length = Layout.parse(line), 512
    make = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, length, 8, 16, generator=make)
    k = torch.nn.functional.normalize(k, dim=-1)
    gates = torch.rand(2, 2, length, 8, generator=make)
    inputs = q, k, v, -0.01 * gates[0], gates[1]
    above = torch.randn(v.shape, generator=make)

    def run(layout):
        own = [layout.shard(t, {"tokens": 1}).clone().detach().requires_grad_() for t in inputs]
        pieces = recurrent.LocalPieces(layout, "tokens", length)
        out = recurrent._in_chain(pieces, tuple(own))
        (out * layout.shard(above, {"tokens": 1})).sum().backward()
        return [layout.gather(t.detach(), {"tokens": 1}) for t in (out, *(t.grad for t in own))]

    one = run(Layout.single())
    for found, wanted in zip(weft.on_threads(layout, run)[0], one):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "line",
    ["tokens(zigzag): ring=3", "tokens: tile=2x2", "batch: dp=2; heads: tp=2; tokens: ring=2"],
)
def test_a_hybrid_runs_on_layouts_that_say_nothing_of_states(line):
    one = weft.compose("hybrid", dtype=torch.float64)
    ids = torch.randint(32, (2, 50), generator=torch.Generator().manual_seed(4))
    wanted = one(ids, documents=(20, 30))

    def rank(layout):
        model = weft.compose("hybrid", layout, dtype=torch.float64)
        own = layout.shard(ids, {"batch": 0, "tokens": 1})
        found = model(own, lengths={"tokens": 50}, documents=(20, 30))
        return layout.gather(found.detach(), {"batch": 0, "tokens": 1})

    found = weft.on_threads(Layout.parse(line), rank)[0]
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-11)


def test_layouts_and_calls_that_no_recurrence_runs_on_are_refused():
    striped = Layout.parse("tokens(striped): ring=2")
    with pytest.raises(weft.DeclarationError, match=r"'hybrid' on layout .* for every token"):
        weft.models.check_fit(weft.models.ModelSpec.load("hybrid"), striped)
    with pytest.raises(weft.DeclarationError, match="no axis 'token'"):
        weft.models.ModelSpec.from_dict(
            {"axes": ["tokens", "embed"], "sizes": {"embed": 4, "heads": 2}}
            | {"block": [{"carry": "token"}]}
        )
    spec = weft.models.ModelSpec.from_dict(
        {"axes": ["tokens", "embed"], "sizes": {"embed": 4, "heads": 2}}
        | {"block": [{"carry": "tokens"}]}
    )
    with pytest.raises(weft.DeclarationError, match=r"within= is a weft\.Documents"):
        weft.compose(spec)(torch.zeros(3, 4), within=weft.Causal())
    with pytest.raises(weft.DeclarationError, match="conv=0"):
        GatedDeltaNet(8, 2, axis="tokens", conv=0)
    with pytest.raises(weft.ShapeError, match="embed = 8"):
        GatedDeltaNet(8, 2, axis="tokens")(torch.zeros(1, 3, 4))
