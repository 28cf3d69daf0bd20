"""Run files: what is typed wins over the file, and the file over the model's."""

from __future__ import annotations

import re

import pytest

from weft.declare import catalog
from weft.errors import DeclarationError
from weft_models.declare.model_blocks import AttendBlock
from weft_models.declare.run_file import RunSpec, changed, layout_for
from weft_models.models import ModelSpec


def test_a_resolved_run_says_all_and_reads_back_as_itself(tmp_path):
    run = RunSpec.from_dict(
        {"model": "tabular", "layout": "rows: ring=2", "train": {"lr": 0.5, "gradients": "fsdp"}}
    )
    resolved = run.resolved()
    path = tmp_path / "run.toml"
    path.write_text(resolved.to_toml())
    again = RunSpec.load(path)
    assert again.resolved() == resolved
    assert again.spec() == run.spec()
    assert again.spec().train.lr == 0.5
    assert again.spec().train.batch == ModelSpec.load("tabular").train.batch


def test_a_gradient_that_is_never_clipped_reads_back_as_that(tmp_path):
    run = RunSpec.from_dict(changed({"model": "tabular"}, ["clip=inf"]))
    for one in (run, run.resolved()):
        path = tmp_path / "run.toml"
        path.write_text(one.to_toml())
        assert RunSpec.load(path).spec().train.clip == float("inf")


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("lr=1e-4", {"lr": 1e-4}),
        ("train.accumulate=2", {"accumulate": 2}),
        ("length.rows=[4, 9]", {"length": {"rows": (4, 9), "features": (3, 10)}}),
        ("length={rows=[4, 9]}", {"length": {"rows": (4, 9), "features": (3, 10)}}),
        ("gradients=ddp", {"gradients": "ddp"}),
        ("betas=[0.8, 0.99]", {"betas": (0.8, 0.99)}),
    ],
)
def test_a_setting_changes_one_key(setting: str, wanted: dict):
    train = RunSpec.from_dict(changed({"model": "tabular"}, [setting])).spec().train
    assert {key: getattr(train, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        ({"model": "tabular"}, ["lrr=1"], r"no such key.*'lr'"),
        ({"model": "tabular"}, ["lr"], r"write KEY=VALUE"),
        ({"model": "tabular"}, ["lr=-1"], r"run: \[train\]: lr = -1: give more than 0"),
        ({"model": "tabular"}, ["lr=fast"], r"lr = 'fast': give a number"),
        ({"model": "tabular"}, ["lr=true"], r"lr = True: give a number"),
        ({"model": "tabular", "train": 3}, [], r"train = 3: give a table"),
        ({"model": "tabular"}, ["gradients=fsdp2"], r"gradients = 'fsdp2'.*'sync'"),
        ({"model": "tabular"}, ["accumulate=3"], r"batch = 8 is not a multiple of accumulate = 3"),
        ({"model": "tabular"}, ["length.row=[1, 2]"], r"length names axis 'row'.*'rows'"),
        ({"model": "tabular", "train": {"stepps": 3}}, [], r"unknown key 'stepps'.*'steps'"),
        ({"model": "tabula"}, [], r"did you mean 'tabular'"),
        ({"layout": "ring-4"}, [], r"key 'model' is missing"),
        ({"model": "tabular", "seed": -1}, [], r"seed = -1: give 0 or more"),
        ({"model": "tabular", "elastic": {"layouts": []}}, [], r"elastic.*layouts = \[\]"),
        ({"model": "tabular", "elastic": {"layout": ["a"]}}, [], r"unknown key.*'layouts'"),
        (
            {"model": "tabular", "layout": "ring-4", "elastic": {"layouts": ["ring-2"]}},
            [],
            r"layout = 'ring-4' beside \[elastic\] layouts",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(data: dict, settings: list[str], words: str):
    with pytest.raises(DeclarationError) as raised:
        RunSpec.from_dict(changed(data, settings))
    assert re.search(words, str(raised.value)), raised.value


def test_layout_follows_the_number_of_ranks(tmp_path):
    layouts = ["tile-2x2", "rows: ulysses=2 x ring=-1", "rows: ring=3"]
    path = tmp_path / "run.toml"
    path.write_text(RunSpec(model="tabular", elastic={"layouts": layouts}).to_toml())
    run = RunSpec.load(path)
    assert [layout_for(run.layouts, ranks) for ranks in (4, 6, 3)] == layouts
    with pytest.raises(DeclarationError, match=r"no layout fits 5 ranks: .*tile-2x2.*ring=3"):
        layout_for(run.layouts, 5)


@pytest.mark.parametrize("name", catalog.names("models"))
def test_a_model_written_as_data_reads_back_as_itself(name: str):
    spec = ModelSpec.load(name)
    assert ModelSpec.from_dict(spec.model_dump(mode="json", exclude_unset=True)) == spec


def test_masks_and_biases_are_written_as_they_are_read():
    block = {"attend": "t", "mask": ["causal", {"window": [4, 0]}, {"given": "mine"}]}
    for bias in ("alibi", {"relative": 8}, {"pair": "p", "width": 16}, None):
        one = AttendBlock(**block, bias=bias) if bias else AttendBlock(**block)
        assert AttendBlock(**one.model_dump(mode="json", exclude_unset=True)) == one
