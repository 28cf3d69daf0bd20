"""Training data: what a seed means, on every layout; what the model may and may not see."""

import numpy as np
import pytest
import torch

from weft.comm import run_threads
from weft.layout import Layout
from weft_models.models import ModelSpec
from weft_models.train import stream

LAYOUTS = {
    "data parallel": {"mesh": {"dp": 3}, "shard": {"batch": ["dp"]}},
    "rows": {
        "mesh": {"a": 2, "b": 2},
        "shard": {"rows": ["a", "b"]},
        "order": {"rows": "striped"},
        "attend": {"rows": [{"strategy": "ring", "on": "a"}, {"strategy": "ring", "on": "b"}]},
    },
    "rows and features": {
        "mesh": {"r": 2, "f": 2},
        "shard": {"rows": ["r"], "features": ["f"]},
        "attend": {
            "rows": [{"strategy": "ring", "on": "r"}],
            "features": [{"strategy": "ring", "on": "f"}],
        },
    },
}


@pytest.fixture(scope="module")
def spec():
    return ModelSpec.load("tabular")


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_on_any_layout_gather_to_the_one_device_batch(spec, name):
    whole = stream(spec, Layout.single(), seed=4, batch=7).batch(step=2)
    layout = Layout.from_dict(LAYOUTS[name])

    def rank(transport):
        on = layout.on(transport)
        local = stream(spec, on, seed=4, batch=7).batch(step=2)
        cells = on.gather(local.inputs, {"batch": 0, "rows": 1, "features": 2})
        targets = on.gather(local.targets, {"batch": 0, "rows": 1})
        counted = on.gather(local.counted, {"batch": 0, "rows": 1})
        torch.testing.assert_close(cells, whole.inputs, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(targets, whole.targets)
        assert torch.equal(counted, whole.counted)
        assert local.given == whole.given
        assert local.tokens == whole.tokens

    run_threads(dict(layout.mesh), rank)


def test_the_model_gets_no_class_of_a_test_row(spec):
    batch = stream(spec, Layout.single(), seed=0).batch(step=0)
    train = batch.given["train"]
    assert batch.inputs[:, train:, -1].isnan().all()
    assert torch.equal(batch.inputs[:, :train, -1].long(), batch.targets[:, :train])
    assert batch.counted[:, train:].all()
    assert not batch.counted[:, :train].any()


@pytest.mark.parametrize("model", ["tabular", "causal_lm", "pair"])
def test_steps_and_seeds_differ_and_repeat(model):
    spec = ModelSpec.load(model)

    def draw(seed, step):
        batch = stream(spec, Layout.single(), seed=seed, batch=2).batch(step)
        return batch.targets

    assert torch.equal(draw(0, 1), draw(0, 1))
    for other in (draw(0, 2), draw(1, 1)):
        assert other.shape != draw(0, 1).shape or not torch.equal(other, draw(0, 1))


def test_token_sequences_repeat_and_targets_are_the_next_tokens():
    spec = ModelSpec.load("causal_lm")
    batch = stream(spec, Layout.single(), seed=0).batch(step=0)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    ids = batch.inputs
    repeats = [any(torch.equal(row[p:], row[:-p]) for p in range(1, len(row) // 2)) for row in ids]
    assert all(repeats)


def test_hidden_pairs_are_symmetric_off_the_diagonal_and_unseen():
    batch = stream(ModelSpec.load("pair"), Layout.single(), seed=0).batch(step=0)
    assert torch.equal(batch.counted, batch.counted.transpose(1, 2))
    assert torch.equal(batch.inputs.isnan(), batch.counted)
    assert not batch.counted.diagonal(dim1=1, dim2=2).any()
    assert torch.equal(batch.inputs[~batch.counted], batch.targets[~batch.counted])


def test_lengths_a_model_file_does_not_give_are_asked_for():
    spec = ModelSpec.load("tabular")
    bare = spec.model_copy(update={"train": spec.train.model_copy(update={"length": {}})})
    with pytest.raises(ValueError, match=r"no train\.length for \['rows', 'features'\]"):
        stream(bare, Layout.single(), seed=0).batch(0)


@pytest.mark.parametrize("model", ["tabular", "causal_lm", "pair"])
def test_the_parts_of_a_batch_are_its_examples(model):
    spec = ModelSpec.load(model)
    whole = stream(spec.training({"batch": 6}), Layout.single(), seed=3).batch(2)
    parts = stream(spec.training({"batch": 6, "accumulate": 3}), Layout.single(), seed=3)
    drawn = [parts.batch(2, part) for part in range(parts.parts)]
    for name in ("inputs", "targets", "counted"):
        joined = torch.cat([getattr(part, name) for part in drawn])
        torch.testing.assert_close(joined, getattr(whole, name), rtol=0, atol=0, equal_nan=True)
    assert sum(part.tokens for part in drawn) == whole.tokens


def test_tables_of_step_have_few_features_more_often_than_many():
    lengths = {"rows": (8, 9), "features": (2, 33)}
    spec = ModelSpec.load("tabular").training({"batch": 1, "length": lengths})
    drawn = stream(spec, Layout.single(), seed=0)
    widths = [drawn.batch(step).inputs.shape[2] - 1 for step in range(60)]
    assert min(widths) >= 2
    assert max(widths) <= 33
    assert 5 < np.median(widths) < 12  # log-uniform: sqrt(2 * 33) is 8


def test_a_batch_too_small_for_its_ranks_is_refused(spec):
    layout = Layout.from_dict({"mesh": {"dp": 3}, "shard": {"batch": ["dp"]}})
    with pytest.raises(ValueError, match=r"batch=4 .* 3 ranks .* multiple of 3"):
        stream(spec, layout, seed=0, batch=4)
