"""Losses through a layout's sums and gathers: value and gradients are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from world import draw

import weft
from weft.errors import ShapeError
from weft.layout import Layout

LAYOUTS = (
    "tokens: ring=2",
    "tokens(zigzag): ring=3",
    "tokens: tile=2x2",
    "batch: dp=2; tokens: ring=2",
    "batch: dp=2; heads: tp=2; tokens(zigzag): ring=2",
)
B, N, E, V = 4, 11, 8, 13
TOKENS = {"batch": 0, "tokens": 1}


X, REFERENCE, ADVANTAGES = draw(B, N, E, seed=0), draw(B, N, seed=1) - 3, draw(B, seed=2)
LABELS = torch.randint(V, (B, N), generator=torch.Generator().manual_seed(3))
#: Real tokens of every sequence: the rest is padding, and whole shards of it.
REAL = torch.arange(N) < torch.tensor([11, 2, 7, 5])[:, None]


class _Model(nn.Module):
    """Attention over the tokens, so that every rank's gradient depends on other ranks' losses."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(5)
        options = {"axis": "tokens", "axes": ("batch", "tokens", "embed"), "generator": make}
        self.attend = weft.MultiAxisAttention(E, 2, layout=layout, **options).double()
        self.head = nn.Linear(E, V, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.copy_(draw(V, E, seed=6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, lengths={"tokens": N})


def _log_probs(model: _Model, layout: Layout) -> Tensor:
    """Of this rank's tokens; those of padding are 0."""
    scores = model.head(model(layout.shard(X, TOKENS))).log_softmax(-1)
    taken = scores.gather(-1, layout.shard(LABELS, TOKENS)[..., None]).squeeze(-1)
    return taken * layout.shard(REAL, TOKENS)


def _sequences(t: Tensor, layout: Layout) -> Tensor:
    """Numbers of this rank's sequences, of those of all."""
    return layout.shard(t, {"batch": 0})


def dpo(model: _Model, layout: Layout) -> Tensor:
    """Sigmoid of the margin between pairs of sequences, each a sum over all tokens."""
    chosen = layout.sum(_log_probs(model, layout).sum(1), "tokens")
    chosen = chosen - _sequences((REFERENCE * REAL).sum(1), layout)
    margins = -F.logsigmoid(0.3 * (chosen[::2] - chosen[1::2]))
    return layout.mean(margins.sum(), len(margins), axis="batch")


def gspo(model: _Model, layout: Layout) -> Tensor:
    """Clipped ratios of whole sequences: the exponential of a mean over all ranks' tokens."""
    ratios = _log_probs(model, layout) - layout.shard(REFERENCE * REAL, TOKENS)
    counts = _sequences(REAL.sum(1), layout)
    ratio = (layout.sum(ratios.sum(1), "tokens") / counts).exp()
    advantages = _sequences(ADVANTAGES, layout)
    terms = torch.minimum(ratio * advantages, ratio.clamp(0.2, 5.0) * advantages)
    return layout.mean(-terms.sum(), len(terms), axis="batch")


def grpo(model: _Model, layout: Layout) -> Tensor:
    """Clipped ratios of tokens, the mean over the tokens of all ranks."""
    real = layout.shard(REAL, TOKENS)
    ratio = (_log_probs(model, layout) - layout.shard(REFERENCE, TOKENS)).exp()
    advantages = _sequences(ADVANTAGES, layout)[:, None]
    terms = torch.minimum(ratio * advantages, ratio.clamp(0.2, 5.0) * advantages)
    return layout.mean(-(terms * real).sum(), real.sum())


def _pooled(model: _Model, layout: Layout) -> Tensor:
    """Unit embeddings of this rank's sequences: the mean over the tokens of all ranks."""
    real = layout.shard(REAL, TOKENS)
    summed = (model(layout.shard(X, TOKENS)) * real[..., None]).sum(1)
    counts = _sequences(REAL.sum(1), layout)[:, None]
    return F.normalize(layout.sum(summed, "tokens") / counts, dim=-1)


def contrastive(model: _Model, layout: Layout) -> Tensor:
    """In-batch negatives: all ranks compute the whole matrix of the gathered embeddings."""
    embeddings = layout.gather(_pooled(model, layout), {"batch": 0})
    scores = embeddings[::2] @ embeddings[1::2].T / 0.5
    return F.cross_entropy(scores, torch.arange(len(scores)))


def contrastive_by_rows(model: _Model, layout: Layout) -> Tensor:
    """Each rank its own rows against all: the gathered embeddings enter with its own part."""
    own = _pooled(model, layout)
    every = layout.enter(layout.gather(own, {"batch": 0}), "batch")
    scores = own @ every.T / 0.5
    same = layout.shard(torch.arange(B), {"batch": 0})
    scores = scores.scatter(1, same[:, None], -1e9)
    wanted = layout.shard(torch.arange(B) ^ 1, {"batch": 0})
    return layout.mean(F.cross_entropy(scores, wanted, reduction="sum"), len(own), axis="batch")


def centred(model: _Model, layout: Layout) -> Tensor:
    """Variance over all tokens: the mean of all is subtracted from each rank's own."""
    out = model(layout.shard(X, TOKENS))
    mean = layout.sum(layout.sum(out.sum((0, 1)), "tokens"), "batch") / (B * N)
    mean = layout.enter(layout.enter(mean, "tokens"), "batch")
    return layout.mean((out - mean).square().sum(), out[..., 0].numel())


def penalised(model: _Model, layout: Layout) -> Tensor:
    """A penalty of weights alone, which all ranks compute."""
    return grpo(model, layout) + layout.once(0.1 * model.head.weight.square().sum())


LOSSES = (dpo, gspo, grpo, contrastive, contrastive_by_rows, centred, penalised)


def _step(layout: Layout, loss_of) -> tuple[Tensor, dict[str, Tensor]]:
    model = _Model(layout)
    loss = loss_of(model, layout)
    loss.backward()
    layout.sync_gradients(model)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def _check(bound: Layout, loss_of, wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    loss, grads = _step(bound, loss_of)
    torch.testing.assert_close(loss, wanted[0], rtol=1e-11, atol=1e-13)
    assert grads.keys() == wanted[1].keys()
    for name, grad in grads.items():
        whole = wanted[1][name]
        if grad.shape != whole.shape:  # split heads
            dim = next(i for i, (a, b) in enumerate(zip(grad.shape, whole.shape)) if a != b)
            whole = whole.chunk(bound.size("heads"), dim)[bound.coords["tp"]]
        torch.testing.assert_close(grad, whole, rtol=0, atol=1e-11 * max(1, whole.abs().max()))


@pytest.mark.few(16)
@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.parametrize("loss_of", LOSSES, ids=lambda f: f.__name__)
def test_a_loss_and_its_gradients_are_those_of_one_process(loss_of, line):
    wanted = _step(Layout.single(), loss_of)
    assert all(g.abs().max() > 1e-3 for g in wanted[1].values())
    weft.on_threads(Layout.parse(line), _check, loss_of, wanted)


@pytest.mark.parametrize("name", ["sum", "enter", "once"])
def test_a_slip_of_an_axis_is_refused(name):
    def rank(layout):
        with pytest.raises(ShapeError, match=r"'token' is not split.*'tokens' is"):
            getattr(layout, name)(torch.ones(1), "token")
        with pytest.raises(ShapeError, match=r"'token' is not split.*'tokens' is"):
            layout.mean(torch.ones(1), 1, axis="token")

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_a_gather_of_parts_that_no_shard_makes_is_refused(order):
    """In an order they would be scrambled."""

    def rank(layout: Layout) -> None:
        with pytest.raises(ShapeError, match="its chunk holds"):
            layout.gather(torch.zeros(2 + 3 * layout.rank), {"tokens": 0})

    weft.on_threads(Layout.parse(f"tokens({order}): ring=2"), rank, timeout=20)
