"""Packed batches: each rank reads its own tokens, and a run goes on with the next on any layout."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import weft
from weft import Layout
from weft.errors import DeclarationError, ShapeError
from weft_models.train import PackedReader, TokenDataset, TokenFile

VOCABULARY, LENGTH, ROWS = 50, 32, 2
LAYOUTS = {
    "one device": Layout.single(),
    "ring": Layout.parse("tokens: ring=3"),
    "ulysses x ring": Layout.parse("tokens: ulysses=2 x ring=2"),
    "dp": Layout.parse("batch: dp=2"),
    "dp x ring": Layout.parse("batch: dp=2; tokens: ring=2"),
}


@pytest.fixture
def file(tmp_path):
    """(path, lengths) of a file of documents."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 40, 23)
    draw.integers(0, VOCABULARY, lengths.sum()).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    return tmp_path / "tokens.bin", lengths


def reader(file, layout: Layout, **options) -> PackedReader:
    return PackedReader(TokenFile(*file), layout, LENGTH, ROWS, **options)


def steps(read: PackedReader, count: int) -> list:
    return list(itertools.islice(read, count))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_reads_its_share_and_a_token_per_fragment(file, name):
    layout = LAYOUTS[name]

    def rank(bound: Layout):
        read = reader(file, bound)
        for batch in itertools.islice(read, 9):
            fragments = batch.assignment.fragments[bound.chunk("tokens")]
            assert batch.tokens.numel() == sum(f.stop - f.start for f in fragments)
            most = 2 * (batch.tokens.numel() + len(fragments))
            # A fragment that ends its document has no further token to read.
            ends = int((batch.labels == -100).sum())
            assert read.source.bytes_read == most - 2 * ends
            read.source.bytes_read = 0
        return batch.targets

    targets = weft.on_threads(layout, rank)
    assert set(targets) == set(weft.on_threads(LAYOUTS["one device"], rank))


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_together_have_the_step_of_one_device(file, name):
    """And labels are those that whole documents shift to, cut where a row is full."""
    whole = steps(reader(file, LAYOUTS["one device"]), 5)
    for batch in whole:
        wanted = F.pad(batch.tokens[:, 1:], (0, 1), value=-100)
        wanted[:, np.cumsum(batch.assignment.lengths) - 1] = -100
        goes_on = (wanted == -100) & (batch.labels != -100)
        assert torch.equal(wanted[~goes_on], batch.labels[~goes_on])
        assert goes_on.sum() <= ROWS
        assert batch.targets == (batch.labels != -100).sum()

    def rank(bound: Layout):
        found = []
        for batch in steps(reader(file, bound), 5):
            on = bound.reorder("tokens", batch.assignment.order)
            sides = (batch.tokens, batch.positions, batch.labels)
            # Groups of dp have orders of their own: tokens first, then their rows.
            rows = [on.gather(on.gather(x, {"tokens": 1}), {"batch": 0}) for x in sides]
            rows = [x.reshape(1, -1) for x in rows]
            assert batch.targets == (rows[2] != -100).sum()
            found.append(rows)
        return found

    for found in weft.on_threads(LAYOUTS[name], rank):
        for rows, batch in zip(found, whole, strict=True):
            assert all(map(torch.equal, rows, (batch.tokens, batch.positions, batch.labels)))


@pytest.mark.parametrize("later", LAYOUTS)
def test_run_goes_on_with_the_next_sample_on_any_layout(file, later):
    """From the third of eight steps; the epoch ends on the way."""
    straight = [b.assignment.lengths for b in steps(reader(file, LAYOUTS["one device"]), 8)]
    before = reader(file, LAYOUTS["one device"])
    state = steps(before, 3)[-1].state
    assert state == before.state_dict()

    def rank(bound: Layout):
        after = reader(file, bound)
        after.load_state_dict(state)
        return [(b.state, b.targets) for b in steps(after, 5)]

    whole = [(b.state, b.targets) for b in steps(reader(file, LAYOUTS["one device"]), 8)]
    assert whole[-1][0]["epoch"] > 0
    assert all(found == whole[3:] for found in weft.on_threads(LAYOUTS[later], rank))
    assert len(set(straight)) == 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.where = nn.Embedding(LENGTH * 2, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, batch, layout: Layout):
        x = self.embed(batch.tokens) + self.where(batch.positions)
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = weft.attention(q, k, v, layout, "tokens", batch.mask)
        return self.head(x + out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_device(file, name):
    made = Model()

    def rank(bound: Layout):
        model = copy.deepcopy(made)
        for batch in steps(reader(file, bound), 2):  # two micro-batches
            logits = model(batch, bound.reorder("tokens", batch.assignment.order))
            total = F.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
            )
            (total / batch.targets).backward()
        bound.sync_gradients(model)
        return [p.grad for p in model.parameters()]

    (wanted,) = weft.on_threads(LAYOUTS["one device"], rank)
    for found in weft.on_threads(LAYOUTS[name], rank):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_loader_with_a_worker_reads_the_same(file):
    wanted = steps(reader(file, LAYOUTS["one device"]), 3)
    loader = DataLoader(reader(file, LAYOUTS["one device"]), batch_size=None, num_workers=1)
    for batch, other in zip(loader, wanted):
        assert torch.equal(batch.tokens, other.tokens)
        assert batch.state == other.state
    two = DataLoader(reader(file, LAYOUTS["one device"]), batch_size=None, num_workers=2)
    with pytest.raises(DeclarationError, match="2 workers would each read every step"):
        next(iter(two))


def test_a_dataset_of_documents_is_read_too(file):
    tokens, ends = np.fromfile(file[0], np.uint16), np.cumsum(file[1])
    documents = [{"input_ids": part.tolist()} for part in np.split(tokens, ends[:-1])]
    source = TokenDataset(documents)
    both = (PackedReader(s, Layout.single(), LENGTH) for s in (source, TokenFile(*file)))
    for one, other in itertools.islice(zip(*both), 6):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.labels, other.labels)


def test_what_does_not_fit_is_refused(file):
    with pytest.raises(ShapeError, match="tokens of uint16, but the documents' lengths add up to"):
        TokenFile(file[0], file[1][:-1])
    with pytest.raises(ShapeError, match="at least one document"):
        PackedReader(TokenDataset([]), Layout.single(), 4)

    def rank(bound: Layout):
        with pytest.raises(DeclarationError, match="3 rows do not divide over the 2 ranks"):
            PackedReader(TokenFile(*file), bound, LENGTH, rows=3)

    weft.on_threads(LAYOUTS["dp"], rank)


def test_whole_batches_take_cumulative_lengths():
    """`shard_batch`, for transformers' models: one packing for all rows."""
    from weft_integrations.transformers.batches import shard_batch

    whole = {"input_ids": [[3, 1, 4, 1, 5]] * 2, "labels": [[3, 1, 4, 1, 5]] * 2}
    packed = weft.Documents.from_cu_seqlens(torch.tensor([0, 2, 5]))
    batch = shard_batch(whole, Layout.single(), documents=packed)
    assert batch["weft"].documents == (2, 3)
    assert batch["shift_labels"][0].tolist() == [1, -100, 1, 5, -100]
    with pytest.raises(weft.UnsupportedError, match="documents that differ by row"):
        shard_batch(whole, Layout.single(), documents=weft.Documents([(2, 3), (5,)]))


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda x: np.array(x, np.uint64)])
def test_lengths_are_any_sequence_of_whole_numbers(kind, tmp_path):
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    sources = (
        TokenFile(tmp_path / "tokens.bin", kind([3, 2])),
        TokenDataset([[0, 1, 2], [3, 4]], kind([3, 2])),
    )
    for source in sources:
        reader = PackedReader(source, Layout.single(), np.int32(4), np.int64(1), seed=None)
        batch = next(iter(reader))
        assert batch.labels.tolist() == [[1, 2, -100, 4]]
        assert [type(n) for n in (batch.targets, *batch.state.values())] == [int] * 4


def test_documents_and_steps_without_tokens_are_refused_before_a_step(tmp_path):
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    with pytest.raises(ShapeError, match="document 1 has a length of 0"):
        TokenDataset([[5], []])
    with pytest.raises(ShapeError, match="document 1 has a length of -1"):
        TokenFile(tmp_path / "tokens.bin", [6, -1])
    with pytest.raises(ShapeError, match="1 lengths for 2 documents"):
        TokenDataset([[5], [6]], [1])
    (tmp_path / "nothing.bin").touch()
    with pytest.raises(ShapeError, match=r"nothing.bin is empty"):
        TokenFile(tmp_path / "nothing.bin", [1])
    for iterated in (iter([[5]]), (ids for ids in [[5]])):
        with pytest.raises(TypeError, match=r"has no items by number.* map-style dataset"):
            TokenDataset(iterated)
    for length, rows in ((0, 1), (-1, 1), (4, 0)):
        with pytest.raises(ShapeError, match="at least 1 row of 1 token"):
            PackedReader(TokenDataset([[5]]), Layout.single(), length, rows)


@pytest.mark.parametrize("lengths", [[2, 2], [4, 2]])
def test_document_of_another_length_is_refused_when_it_is_read(lengths):
    reader = PackedReader(TokenDataset([[5, 6, 7], [8, 9]], lengths), Layout.single(), 4, seed=None)
    with pytest.raises(ShapeError, match="document 0 has 3 tokens"):
        next(iter(reader))


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 0, "document": 0},
        {"epok": 0, "document": 0, "token": 0},
        {"epoch": 0, "document": 7, "token": 0},
        {"epoch": 0, "document": 0, "token": 3},
        {"epoch": -1, "document": 0, "token": 0},
    ],
)
def test_a_state_of_another_reader_is_refused(state):
    reader = PackedReader(TokenDataset([[5, 6, 7]]), Layout.single(), 4)
    with pytest.raises(ShapeError, match=r"state has|load it with the same"):
        reader.load_state_dict(state)


def test_an_axis_that_the_layout_does_not_have_is_refused():
    layout = weft.Layout.parse("tokens: ring=2")
    for axis, hint in (("tokenz", "did you mean 'tokens'"), ("seq", "tokens")):
        with pytest.raises(DeclarationError, match=f"no axis {axis!r}.*{hint}"):
            layout.pack([3, 4], axis)

    def rank(bound):
        with pytest.raises(DeclarationError, match=r"no axis 'token'.*did you mean 'tokens'"):
            PackedReader(TokenDataset([[5, 6, 7]]), bound, 4, axis="token")

    weft.on_threads(layout, rank)
    assert weft.Layout.single().pack([3, 4], "seq").lengths == (3, 4)
