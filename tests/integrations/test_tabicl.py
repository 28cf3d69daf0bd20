"""TabICL with its rows split over ranks: outputs and gradients of one process."""

import copy
import functools
import importlib.util

import pytest
import torch

import weft
from weft.errors import DeclarationError, UnsupportedError
from weft.layout import Layout

if importlib.util.find_spec("tabicl") is None:
    pytest.skip(
        "NOT RUN: tabicl is not installed, so nothing here says that its models work; "
        "pip install -e '.[tabicl]'",
        allow_module_level=True,
    )

from tabicl._model.inference_config import InferenceConfig
from tabicl._model.tabicl import TabICL

from weft import parallelize
from weft_integrations.tabular import parallelize_tabicl

SMALL = {
    "embed_dim": 16,
    "col_num_blocks": 2,
    "col_nhead": 2,
    "col_num_inds": 7,
    "row_num_blocks": 1,
    "row_nhead": 2,
    "row_num_cls": 2,
    "icl_num_blocks": 2,
    "icl_nhead": 2,
    "zero_init": False,
}
#: The package computes in fp32 (eps 2^-23): some hundred roundings through six blocks.
TOLERANCE = 128 * 2.0**-23
LINES = ("rows: ring=2", "rows: tile=2x2", "rows(striped): ulysses=2")


def build(**changes):
    torch.manual_seed(0)
    model = TabICL(**{"max_classes": 3} | SMALL | changes).train()
    for p in model.parameters():  # scales of SSMax begin at a value that hides the length
        p.data += 0.05 * torch.randn_like(p)
    return model


def draw(rows=23, train=15):
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(2, rows, 4, generator=generator)
    labels = torch.randint(0, 3, (2, train), generator=generator).float()
    wanted = torch.randint(0, 3, (2, rows - train), generator=generator)
    return table, labels, wanted


def train(model, table, labels, wanted):
    out = model(table, labels)[..., :3]
    loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), wanted.flatten())
    loss.backward()
    return out.detach(), loss.detach()


@pytest.mark.few(1)
@pytest.mark.parametrize("line", LINES)
def test_rows_on_ranks_are_rows_on_one_process(line):
    model, batch = build(), draw()
    reference = copy.deepcopy(model)
    out, loss = train(reference, *batch)

    def work(layout):
        sharded = parallelize(copy.deepcopy(model), layout)
        with weft.traffic() as moved:
            found = train(sharded, *batch)
        layout.sync_gradients(sharded)
        return *found, {n: p.grad for n, p in sharded.named_parameters()}, moved.bytes

    for got, got_loss, grads, moved in weft.on_threads(Layout.parse(line), work):
        assert moved > 0
        torch.testing.assert_close(got, out, rtol=TOLERANCE, atol=TOLERANCE)
        assert abs(got_loss - loss) < TOLERANCE * loss
        for name, p in reference.named_parameters():
            if p.grad is None:
                assert grads[name] is None or not grads[name].any()
                continue
            off = (grads[name] - p.grad).norm() / p.grad.norm().clamp_min(1e-4)
            assert off < 10 * TOLERANCE, (name, off)


def _all(model, table, labels, **options):
    return model(table, labels, **options)


def _config():
    """Without autocast, whose bf16 rounds more than ranks do."""
    config = InferenceConfig()
    for part in (config.COL_CONFIG, config.ROW_CONFIG, config.ICL_CONFIG):
        part.update({"use_amp": False, "use_fa3": False, "device": torch.device("cpu")})
    return config


def _infers(model, table, labels):
    return model.eval()(table, labels, inference_config=_config())


@torch.no_grad()
def _caches(mode, model, table, labels):
    run = functools.partial(model.eval().forward_with_cache, inference_config=_config())
    train, test = table[:, : labels.shape[1]], table[:, labels.shape[1] :]
    run(X_train=train, y_train=labels, cache_mode=mode)
    cached = functools.partial(run, use_cache=True, store_cache=False)
    return torch.cat([cached(X_test=test), cached(X_test=test[:, :1])], 1)


@torch.no_grad()
def _regresses(model, table, labels):
    config, asked = _config(), ["mean", "variance", "median", "quantiles"]
    found = model.eval().predict_stats(table, labels, asked, inference_config=config)
    train, test = table[:, : labels.shape[1]], table[:, labels.shape[1] :]
    run = functools.partial(model.predict_stats_with_cache, train, labels, test)
    found["cached"] = run(inference_config=config)
    return torch.cat([found[n].flatten(1) for n in sorted(found)], 1)


#: Name -> (options of the model, a call of it).
WAYS = {
    "affine columns": ({"col_affine": True, "col_feature_group": False}, _all),
    "recomputed blocks": ({"recompute": True}, _all),
    "test rows embedded with all": ({}, functools.partial(_all, embed_with_test=True)),
    "labels among the columns": ({"col_target_aware": True}, _all),
    "inference": ({}, _infers),
    "a cache of keys": ({}, functools.partial(_caches, "kv")),
    "a cache of rows": ({}, functools.partial(_caches, "repr")),
    "statistics": ({"max_classes": 0, "num_quantiles": 9}, _regresses),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", WAYS)
def test_options_of_the_package(name):
    options, call = WAYS[name]
    model, (table, labels, _) = build(**options), draw()
    wanted = call(copy.deepcopy(model), table, labels)

    def work(layout):
        found = call(parallelize(copy.deepcopy(model), layout), table, labels)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)

    weft.on_threads(Layout.parse("rows: ring=2"), work)


def test_a_table_of_fewer_rows_than_ranks():
    model, (table, labels, _) = build(), draw(rows=3, train=2)
    wanted = model(table, labels)

    def work(layout):
        found = parallelize(copy.deepcopy(model), layout)(table, labels)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)

    weft.on_threads(Layout.parse("rows: ring=4"), work)


def test_a_part_called_by_itself_is_refused():
    model = parallelize(build(), Layout.single())
    with pytest.raises(UnsupportedError, match=r"TabICL is called by itself.*predict_stats"):
        model.col_embedder(*draw()[:2])


def test_refuses_other_models_and_layouts():
    with pytest.raises(UnsupportedError, match="not TabICL"):
        parallelize_tabicl(torch.nn.Linear(2, 2), Layout.single())
    with pytest.raises(DeclarationError, match="nothing else"):
        parallelize(build(), Layout.parse("batch: dp=2; rows: ring=2"))
