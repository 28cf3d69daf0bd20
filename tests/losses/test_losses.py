"""Chunked and vocab-parallel losses: value and gradients are those of whole logits."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from strides import LAID
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.errors import DeclarationError, ShapeError, UnsupportedError
from weft.layout import Layout
from weft.losses import cross_entropy, log_probs, num_items, sequence_sums, shift_labels

B, N, E, V = 2, 11, 6, 13
TOKENS = {"batch": 0, "tokens": 1}
SINGLE = Layout.single()


def _draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)


HIDDEN, WEIGHT = _draw(B, N, E, seed=0), _draw(V, E, seed=1)
LABELS = torch.randint(V, (B, N), generator=torch.Generator().manual_seed(2))
LABELS[0, 2:8] = -100
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "all": {"label_smoothing": 0.3, "z_loss": 0.01, "softcap": 2.0},
    "z-loss": {"z_loss": 0.1},
    "softcap": {"softcap": 1.5},
}


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """What torch makes of the whole logits."""
    z = _logits(hidden, weight, softcap).flatten(0, -2)
    loss = F.cross_entropy(z, labels.flatten(), label_smoothing=label_smoothing)
    return loss + z_loss * z.logsumexp(-1)[labels.flatten() != -100].square().mean()


def _with_gradients(loss_of, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    loss = loss_of(hidden, weight)
    loss.backward()
    return [loss.detach(), hidden.grad, weight.grad]


def _same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11 * max(1.0, b.norm().item()))


@pytest.mark.parametrize("chunk", [1, 5, np.int64(22), 4096])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_on_one_device_it_is_torch_s(options, chunk):
    wanted = _with_gradients(lambda h, w: _reference(h, w, LABELS, **options), HIDDEN, WEIGHT)
    found = _with_gradients(
        lambda h, w: cross_entropy(h, w, LABELS, SINGLE, chunk=chunk, **options), HIDDEN, WEIGHT
    )
    _same(found, wanted)


#: Layouts, the mesh dims that cut the vocabulary, and those along which its gradient is summed.
PLACES = {
    "whole": ("tokens: ring=2", ()),
    "whole, zigzag": ("tokens(zigzag): ring=3", ()),
    "whole, ranks without tokens": ("tokens: tile=2x8", ()),
    "whole, batch": ("batch: dp=2; tokens: ring=2", ()),
    "tp": ("heads: tp=3; tokens: local", ("tp",)),
    "tp, more ranks than words": ("heads: tp=14; tokens: local", ("tp",)),
    "tp beside a ring": ("heads: tp=2; tokens(zigzag): ring=2", ("tp",)),
    "replicated": ("replicate: r=2; tokens: ring=2", ("r",)),
    "ring": ("tokens(zigzag): ring=2", ("ring",)),
    "ring, ranks without tokens": ("tokens: ring=8", ("ring",)),
    "tile": ("tokens: tile=2x2", ("row", "col")),
    "one side of a tile": ("tokens: tile=2x2", ("col",)),
    "tp and ring": ("batch: dp=2; heads: tp=2; tokens: ring=2", ("tp", "ring")),
    "batch": ("batch: dp=2; tokens: ring=2", ("dp",)),
}


def _words(layout: Layout, weight: Tensor, vocab_dims: tuple[str, ...]) -> Tensor:
    """This rank's rows of a head, in torch's own chunks."""
    for mesh_dim in (d for d in layout.mesh if d in vocab_dims):
        parts = list(weight.chunk(layout.mesh[mesh_dim]))
        parts += [weight[:0]] * (layout.mesh[mesh_dim] - len(parts))
        weight = parts[layout.coords[mesh_dim]]
    return weight


def _on_ranks(layout: Layout, vocab_dims, loss_of, hidden: Tensor, weight: Tensor, wanted) -> None:
    """`loss_of(hidden, weight, layout)` of this rank's parts, beside one process's."""
    own = layout.shard(hidden, TOKENS), _words(layout, weight, vocab_dims)
    loss, d_hidden, d_weight = _with_gradients(lambda h, w: loss_of(h, w, layout), *own)
    over = [d for d in layout.data_dims if d not in vocab_dims]
    layout.bound.all_reduce(d_weight, over)
    _same(
        [loss, d_hidden, d_weight],
        [wanted[0], layout.shard(wanted[1], TOKENS), _words(layout, wanted[2], vocab_dims)],
    )


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_on_ranks_it_is_one_device_s(place, options):
    line, vocab_dims = place
    wanted = _with_gradients(lambda h, w: _reference(h, w, LABELS, **options), HIDDEN, WEIGHT)

    def loss_of(hidden, weight, layout):
        labels = layout.shard(LABELS, TOKENS)
        return cross_entropy(
            hidden, weight, labels, layout, vocab_dims=vocab_dims, chunk=4, **options
        )

    weft.on_threads(Layout.parse(line), _on_ranks, vocab_dims, loss_of, HIDDEN, WEIGHT, wanted)


def test_a_rank_may_have_impossible_words_only():
    """Their logits are -inf: the loss is that of the other ranks' words."""
    hidden, weight = torch.full((3, 1), 10.0), torch.tensor([[0.1], [0.2], [-3e38], [-3e38]])
    labels = torch.tensor([0, 1, 0])
    wanted = F.cross_entropy(hidden @ weight[:2].T, labels)

    def rank(layout: Layout) -> Tensor:
        own = _words(layout, weight, ("tp",))
        return cross_entropy(hidden, own, labels, layout, vocab_dims=("tp",))

    for loss in weft.on_threads(Layout.parse("heads: tp=2"), rank):
        torch.testing.assert_close(loss, wanted)


@pytest.mark.parametrize("ranks", [(2, 4), (4, 2)])
def test_gradients_cross_the_outer_link_combined(ranks):
    """Backward a rank sends its chunk's rows over the outer mesh dim once to each rank there."""
    (outer, inner), label = ranks, ("row", "loss")

    def sent(layout: Layout) -> int:
        dims, hidden = tuple(layout.mesh), _draw(1, 2, E, seed=0).requires_grad_()
        own, labels = _words(layout, WEIGHT, dims), torch.zeros(1, 2).long()
        loss = cross_entropy(hidden, own, labels, layout, vocab_dims=dims, chunk=16)
        return -layout.bound.sent[label] + (loss.backward() or layout.bound.sent[label])

    wanted = (outer - 1) * 8 * (inner * 2 * (E + 4) + 2 * E)  # hidden, four numbers, gradients
    assert weft.on_threads(Layout.parse(f"tokens: tile={outer}x{inner}"), sent) == [wanted] * 8


# -- log-probabilities -----------------------------------------------------------------------------


def _policy_loss(taken: Tensor, entropy: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    """Weighted log-probabilities and an entropy bonus, summed."""
    return (taken * weights).sum() - 0.3 * (entropy.square() * (labels != -100)).sum()


WEIGHTS = _draw(B, N, seed=4)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_log_probabilities_and_entropy_with_their_gradients(place):
    line, vocab_dims = place

    def whole(hidden, weight):
        logs = _logits(hidden, weight, 3.0).log_softmax(-1)
        taken = logs.gather(-1, LABELS.clamp_min(0)[..., None]).squeeze(-1)
        taken = taken.masked_fill(LABELS == -100, 0.0)
        return _policy_loss(taken, -(logs.exp() * logs).sum(-1), WEIGHTS, LABELS)

    def loss_of(hidden, weight, layout):
        labels, weights = layout.shard(LABELS, TOKENS), layout.shard(WEIGHTS, TOKENS)
        options = {"vocab_dims": vocab_dims, "chunk": 3, "softcap": 3.0}
        both = log_probs(hidden, weight, labels, layout, entropy=True, **options)
        assert torch.equal(both[0], log_probs(hidden, weight, labels, layout, **options))
        return layout.sum(layout.sum(_policy_loss(*both, weights, labels), "tokens"), "batch")

    wanted = _with_gradients(whole, HIDDEN, WEIGHT)
    weft.on_threads(Layout.parse(line), _on_ranks, vocab_dims, loss_of, HIDDEN, WEIGHT, wanted)


@pytest.mark.parametrize("documents", [None, (4, 1, 6), np.array([4, 1, 6])], ids=str)
@pytest.mark.parametrize(
    "line", ["tokens: ring=2", "tokens(zigzag): ring=3", "batch: dp=2; tokens: ring=16"]
)
def test_sums_of_sequences_are_those_of_whole_rows(line, documents):
    values, lengths = _draw(B, N, seed=6), [N] if documents is None else list(documents)
    wanted = torch.stack([part.sum(1) for part in values.split([int(n) for n in lengths], 1)], 1)
    factors = _draw(*wanted.shape, seed=7)

    def rank(layout):
        own = layout.shard(values, TOKENS).requires_grad_()
        sums = sequence_sums(own, layout, documents=documents)
        expected = layout.shard(wanted, {"batch": 0})
        torch.testing.assert_close(sums, expected if documents is not None else expected[:, 0])
        by = layout.shard(factors, {"batch": 0})
        (sums.view(by.shape) * by).sum().backward()  # a loss that all ranks of the tokens compute
        spread = torch.cat([f.expand(-1, n) for f, n in zip(factors.split(1, 1), lengths)], 1)
        assert torch.equal(own.grad, layout.shard(spread, TOKENS))

    weft.on_threads(Layout.parse(line), rank)


def test_sums_of_documents_of_another_length_are_refused():
    def rank(layout):
        with pytest.raises(ShapeError, match=r"values \(2, 6\) are not \(b, 5\), this rank's"):
            sequence_sums(torch.zeros(2, 6), layout, documents=(4, 6))

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


# -- labels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "documents", [None, (11,), (3, 1, 2, 5), np.array([6, 5]), [1] * 11], ids=str
)
@pytest.mark.parametrize("by", [1, 2, 3, np.int64(4), 11, 30])
def test_label_is_token_so_many_places_later_in_its_document(documents, by):
    lengths = [N] if documents is None else [int(n) for n in documents]
    ends = list(itertools.accumulate(lengths))
    end_of = [ends[next(i for i, e in enumerate(ends) if t < e)] for t in range(N)]
    wanted = [
        [row[t + by] if t + by < end_of[t] else -100 for t in range(N)] for row in LABELS.tolist()
    ]
    assert shift_labels(LABELS, documents, by).tolist() == wanted
    assert shift_labels(LABELS[0], documents, by).tolist() == wanted[0]
    if documents is not None:
        assert shift_labels(LABELS, weft.Documents(lengths), by).tolist() == wanted


def test_labels_are_shifted_by_whole_documents_only():
    with pytest.raises(ShapeError, match=r"add up to 10, but there are 11"):
        shift_labels(LABELS, (4, 6))
    with pytest.raises(ShapeError, match=r"by=0: labels are shifted by 1 or more"):
        shift_labels(LABELS, by=0)


# -- errors that other projects had ----------------------------------------------------------------


@pytest.mark.parametrize("vocab_dims", [(), ("ring",)], ids=["whole", "vocab-parallel"])
def test_verl_5983_rank_whose_shard_is_all_padding_is_ordinary(vocab_dims):
    """Its part is 0 of 0 tokens: the loss is the others', and its own gradients are 0, not NaN."""
    labels = LABELS.clone()
    labels[:, 3:] = -100
    wanted = _with_gradients(lambda h, w: _reference(h, w, labels), HIDDEN, WEIGHT)

    def loss_of(hidden, weight, layout):
        own = layout.shard(labels, TOKENS)
        assert layout.rank == 0 or (own == -100).all()
        return cross_entropy(hidden, weight, own, layout, vocab_dims=vocab_dims, chunk=4)

    line = Layout.parse("tokens: ring=3")
    weft.on_threads(line, _on_ranks, vocab_dims, loss_of, HIDDEN, WEIGHT, wanted)


# -- normalisers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["tokens: ring=2", "batch: dp=2; tokens(zigzag): ring=2"])
def test_micro_batches_over_all_labels_add_up_to_one_mean(line):
    hidden, labels = _draw(6, N, E, seed=8), LABELS.repeat(3, 1)
    labels[2:4, 1:] = -100  # a micro-batch of few labels
    labels[4:] = -100  # one of none
    wanted = _with_gradients(lambda h, w: _reference(h, w, labels), hidden, WEIGHT)

    def rank(layout):
        weight = WEIGHT.clone().requires_grad_()
        cut = [layout.shard(part, TOKENS) for part in labels.split(2)]
        items = num_items(cut, layout)
        assert items == (labels != -100).sum()
        losses = []
        for part, own in zip(hidden.split(2), cut):
            whole = layout.shard(part, TOKENS)
            losses.append(cross_entropy(whole, weight, own, layout, num_items=items, chunk=5))
            losses[-1].backward()
        layout.bound.all_reduce(weight.grad, layout.data_dims)
        _same([sum(losses).detach(), weight.grad], [wanted[0], wanted[2]])

    weft.on_threads(Layout.parse(line), rank)


def test_without_any_label_mean_nan_and_sum_over_number_0():
    def rank(layout):
        hidden, labels = layout.shard(HIDDEN, TOKENS), layout.shard(LABELS * 0 - 100, TOKENS)
        assert cross_entropy(hidden, WEIGHT, labels, layout).isnan()
        assert cross_entropy(hidden, WEIGHT, labels, layout, num_items=3) == 0

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


# -- dtypes, memory, strides -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", ["whole, zigzag", "tp", "ring", "tile"])
def test_errors_are_at_most_twice_one_device_s(dtype, place):
    """Beside fp64; one device makes whole logits in the dtype, and its loss of them in fp32."""
    line, vocab_dims = PLACES[place]
    hidden, weight = (_draw(*shape, seed=9, dtype=dtype) for shape in ((B, 160, E), (97, E)))
    labels = torch.randint(97, (B, 160), generator=torch.Generator().manual_seed(3))
    exact = _with_gradients(lambda h, w: _reference(h, w, labels), hidden.double(), weight.double())
    device = _with_gradients(lambda h, w: _reference(h, w, labels), hidden, weight)

    def rank(layout):
        own = layout.shard(hidden, TOKENS), _words(layout, weight, vocab_dims)
        y = layout.shard(labels, TOKENS)
        loss, d_hidden, d_weight = _with_gradients(
            lambda h, w: cross_entropy(h, w, y, layout, vocab_dims=vocab_dims, chunk=4), *own
        )
        over = [d for d in layout.data_dims if d not in vocab_dims]
        d_weight = layout.bound.all_reduce(d_weight.double(), over)
        return loss, layout.gather(d_hidden, TOKENS), (layout.coords, d_weight)

    ranks = weft.on_threads(Layout.parse(line), rank)
    rows = {tuple(c[d] for d in vocab_dims): d_weight for _, _, (c, d_weight) in ranks}
    found = [ranks[0][0], ranks[0][1], torch.cat([rows[at] for at in sorted(rows)])]
    assert found[0].dtype == torch.float32
    eps = torch.finfo(dtype).eps
    for mine, theirs, right in zip(found, device, exact):
        error, limit = ((t.double() - right).norm() for t in (mine, theirs))
        assert error <= 2 * limit + eps * right.norm() / 4


def test_under_autocast_it_is_in_autocast_s_dtype():
    def whole(hidden, weight):
        return _reference(hidden.bfloat16(), weight.bfloat16(), LABELS)

    def found(hidden, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(hidden, weight, LABELS, SINGLE, chunk=4)

    wide = HIDDEN.float(), WEIGHT.float()
    for a, b in zip(_with_gradients(found, *wide), _with_gradients(whole, *wide)):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
    logits = _reference(*(t.bfloat16() for t in wide), LABELS)
    assert abs(found(*wide) - logits) < 1e-6  # fp32 would differ by 1e-3


class _Largest(TorchDispatchMode):
    """The most numbers of a tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.numbers = max(self.numbers, t.numel())
        return out


@pytest.mark.parametrize("place", ["whole, zigzag", "tp", "ring", "tp and ring"])
@pytest.mark.parametrize("entropy", [False, True])
def test_no_more_logits_than_a_chunk_s_exist(place, entropy):
    line, vocab_dims = PLACES[place]
    hidden, weight = _draw(4, 40, 4, seed=0), _draw(120, 4, seed=1)
    labels = torch.randint(120, (4, 40))

    def rank(layout):
        own, y = layout.shard(hidden, TOKENS).requires_grad_(), layout.shard(labels, TOKENS)
        words = _words(layout, weight, vocab_dims).requires_grad_()
        with _Largest() as largest:
            options = {"vocab_dims": vocab_dims, "chunk": 8}
            if entropy:
                sum(log_probs(own, words, y, layout, entropy=True, **options)).sum().backward()
            else:
                cross_entropy(own, words, y, layout, **options).backward()
        assert largest.numbers <= max(8 * len(words), own.numel(), words.numel())

    weft.on_threads(Layout.parse(line), rank)


LAYS = {
    "sliced": LAID["sliced"],
    "shifted": LAID["shifted"],
    "transposed": lambda t: t.mT.contiguous().mT,
}


@pytest.mark.parametrize("lay", LAYS.values(), ids=LAYS)
def test_any_strides(lay):
    wanted = _with_gradients(lambda h, w: _reference(h, w, LABELS), HIDDEN, WEIGHT)
    labels = LABELS.T.contiguous().T

    def loss_of(hidden, weight):
        return cross_entropy(lay(hidden), lay(weight), labels, SINGLE, chunk=4)

    _same(_with_gradients(loss_of, HIDDEN, WEIGHT), wanted)


def test_any_shapes():
    wanted = _reference(HIDDEN, WEIGHT, LABELS)
    flat = cross_entropy(HIDDEN.flatten(0, 1), WEIGHT, LABELS.flatten().int(), SINGLE)
    torch.testing.assert_close(flat, wanted)
    taken = log_probs(HIDDEN[None], WEIGHT, LABELS[None], SINGLE)
    assert taken.shape == (1, B, N)
    none = cross_entropy(HIDDEN[:0], WEIGHT, LABELS[:0], SINGLE, num_items=1)
    assert none == 0


def test_a_frozen_head_or_frozen_hidden_states_have_no_gradient():
    weight = WEIGHT.clone().requires_grad_()
    cross_entropy(HIDDEN, weight, LABELS, SINGLE).backward()
    hidden = HIDDEN.clone().requires_grad_()
    cross_entropy(hidden, WEIGHT, LABELS, SINGLE).backward()
    _same(
        [hidden.grad, weight.grad],
        _with_gradients(lambda h, w: _reference(h, w, LABELS), HIDDEN, WEIGHT)[1:],
    )


def test_gradients_are_not_differentiated_again_without_a_word():
    hidden = HIDDEN.clone().requires_grad_()
    loss = cross_entropy(hidden, WEIGHT, LABELS, SINGLE)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"weft\.losses has no second derivative"):
        grad.sum().backward()


# -- refusals --------------------------------------------------------------------------------------


def _on_rank_1(change):
    """A call that only rank 1 makes in another way."""

    def arguments(layout):
        call = {
            "hidden": layout.shard(HIDDEN, TOKENS),
            "head_weight": WEIGHT,
            "labels": layout.shard(LABELS, TOKENS),
        }
        return change(call) if layout.rank == 1 else call

    return arguments


def _label(number):
    def change(call):
        labels = call["labels"].clone()
        labels[1, 0] = number
        return call | {"labels": labels}

    return change


REFUSED = {
    "a label too many": (
        _label(V),
        IndexError,
        r"(rank 1: )?labels from 0 to 13, but there are 13",
    ),
    "a negative label": (_label(-1), IndexError, r"labels from -1 to \d+, but there are 13 words"),
    "labels of another shape": (
        lambda c: c | {"labels": c["labels"][:, 1:]},
        ShapeError,
        r"labels \(2, 4\) for hidden \(2, 5, 6\): every token has one",
    ),
    "real labels": (
        lambda c: c | {"labels": c["labels"].double()},
        ShapeError,
        r"labels are whole numbers, found torch\.float64",
    ),
    "another dtype": (
        lambda c: c | {"head_weight": WEIGHT.float()},
        ShapeError,
        r"hidden is torch\.float64 and head_weight torch\.float32",
    ),
    "another width": (
        lambda c: c | {"head_weight": WEIGHT[:, :5]},
        ShapeError,
        r"hidden \(2, 5, 6\) and head_weight \(13, 5\) are not",
    ),
    "another head": (
        lambda c: c | {"head_weight": torch.cat([WEIGHT, WEIGHT[:1]])},
        ShapeError,
        r"a loss must be the same on every rank.*13 words.*14 words",
    ),
    "another smoothing": (
        lambda c: c | {"label_smoothing": 0.1},
        ShapeError,
        r"a loss must be the same on every rank",
    ),
    "a share above 1": (
        lambda c: c | {"label_smoothing": 1.5},
        ShapeError,
        r"label_smoothing=1\.5: a share",
    ),
    "no chunk": (lambda c: c | {"chunk": 0}, ShapeError, r"chunk=0: logits are made of 1 or more"),
    "no cap": (lambda c: c | {"softcap": 0.0}, ShapeError, r"softcap=0\.0: a positive number"),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_refused_on_every_rank_before_anything_is_sent(refused):
    change, error, message = refused

    def rank(layout):
        with weft.traffic(layout) as moved, pytest.raises(error, match=f"(?s){message}"):
            cross_entropy(layout=layout, **_on_rank_1(change)(layout))
        assert moved.bytes == 0

    weft.on_threads(Layout.parse("tokens: ring=2"), rank)


def test_ranks_with_other_numbers_of_the_same_tokens_are_refused():
    def rank(layout):
        hidden, labels = HIDDEN[:, : N - layout.rank], LABELS[:, : N - layout.rank]
        words = _words(layout, WEIGHT, ("tp",))
        with pytest.raises(ShapeError, match=r"number of tokens along mesh dims \('tp',\)"):
            cross_entropy(hidden, words, labels, layout, vocab_dims="tp")

    weft.on_threads(Layout.parse("heads: tp=2; tokens: local"), rank)


def test_a_mesh_dim_that_the_layout_has_not_is_refused():
    with pytest.raises(DeclarationError, match=r"vocab_dims has 'tp', which is no mesh dim"):
        cross_entropy(HIDDEN, WEIGHT, LABELS, SINGLE, vocab_dims="tp")


# -- real processes --------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(E, E), nn.Tanh(), nn.Linear(E, E))
        self.head = nn.Linear(E, V, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _trained(layout: Layout, way: str | None) -> tuple[float, list[Tensor]]:
    model = _Model()
    trained = weft.data_parallel(model, layout, way) if way else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    x, labels = layout.shard(HIDDEN, TOKENS), layout.shard(LABELS, TOKENS)
    for _ in range(2):
        loss = cross_entropy(trained(x), model.head.weight, labels, layout, chunk=4)
        loss.backward()
        if way is None:
            layout.sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return loss.item(), [w.detach() for w in weights]


def _train_on_processes(rank: int, way: str | None) -> tuple[float, list]:
    layout = Layout.parse("tokens(zigzag): ring=2 x ulysses=2").build("cpu", timeout=30)
    loss, weights = _trained(layout, way)
    return loss, [w.tolist() for w in weights]


@pytest.mark.parametrize("way", [None, "ddp", "fsdp"])
def test_model_trains_as_on_one_process_whatever_sums_its_gradients(pool, way):
    wanted = _trained(SINGLE, None)
    for loss, weights in pool.run(_train_on_processes, way):
        assert math.isclose(loss, wanted[0], rel_tol=1e-11)
        _same([torch.tensor(w, dtype=torch.float64) for w in weights], wanted[1])


def _dtensors(rank: int, line: str, name: str) -> list:
    layout = Layout.parse(line).build("cpu", timeout=30)
    weight = nn.Parameter(distribute_tensor(WEIGHT, layout.device_mesh[name], [Shard(0)]))
    hidden = layout.shard(HIDDEN, TOKENS).requires_grad_()
    labels = layout.shard(LABELS, TOKENS)
    loss = cross_entropy(hidden, weight, labels, layout, chunk=4)
    loss.backward()
    rows = weight.grad.to_local()
    layout.bound.all_reduce(rows, [d for d in layout.data_dims if d != name])
    whole = DTensor.from_local(
        rows, weight.device_mesh, [Shard(0)], shape=WEIGHT.shape, stride=(E, 1)
    )
    cut = distribute_tensor(WEIGHT, layout.device_mesh[name], [Shard(1)])
    with pytest.raises(UnsupportedError, match=r"may be cut over mesh dims"):
        cross_entropy(hidden, cut, labels, layout)
    found = loss.detach(), layout.gather(hidden.grad, TOKENS), whole.full_tensor()
    return [t.tolist() for t in found]


@pytest.mark.parametrize(
    ("line", "name"),
    [("heads: tp=2; tokens: ring=2", "tp"), ("heads: tp=2; tokens: ring=2", "ring")],
)
def test_head_that_is_a_dtensor_says_how_it_is_cut(pool, line, name):
    wanted = _with_gradients(lambda h, w: _reference(h, w, LABELS), HIDDEN, WEIGHT)
    for found in pool.run(_dtensors, line, name):
        _same([torch.tensor(t, dtype=torch.float64) for t in found], wanted)


# -- the guide -------------------------------------------------------------------------------------


def test_the_guide_s_examples_run():
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(block, "docs/losses.md", "exec"), names)
    layout = names["layout"]
    (found, *_), whole = weft.on_threads(layout, names["with_penalty"]), names["expected"]
    torch.testing.assert_close(found, whole + 1e-2 * names["head"].weight.square().sum())
    for name in ("dpo", "grpo"):
        (found, *_), (wanted,) = (weft.on_threads(x, names[name]) for x in (layout, SINGLE))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("vocab_dims", [("col", "row"), ("row", "row")])
def test_refuses_words_cut_in_another_order_than_that_of_ranks(vocab_dims):
    def work(layout):
        hidden, labels = torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64)
        with pytest.raises(DeclarationError, match="in the order of the ranks"):
            cross_entropy(hidden, torch.zeros(3, 4), labels, layout, vocab_dims=vocab_dims)
        return True

    assert all(weft.on_threads(Layout.parse("tokens: tile=2x2"), work))
