"""Checkpoints: resumed on any layout, whole or not there at all, and nothing is ever unpickled."""

import json
import os
import pickle
import shutil
import warnings

import pytest
import torch
from torch import nn

import weft
from weft import Layout, ShapeError
from weft.nn import ModelSpec
from weft.train import CheckpointError, Checkpoints, files, train
from weft.train.files import read_index

SPEC = ModelSpec.load("tabular")
SPEC = SPEC.model_copy(
    update={
        "train": SPEC.train.model_copy(update={"length": {"rows": (9, 13), "features": (2, 3)}})
    }
)
STEPS = {"steps": 4, "batch": 2, "checkpoint_every": 2, "quiet": True, "evaluate_tables": False}
HEADS = {"mesh": {"tp": 2}, "shard": {"heads": ["tp"]}}


def run(layout, folder, resume=False, **options):
    """Losses and rank 0's parameters of a run whose ranks are threads."""
    options = {**STEPS, "dtype": torch.float64, **options}

    def rank(bound):
        done = train(SPEC, bound, checkpoint_dir=folder, resume=resume, **options)
        return done.losses, {n: p.detach() for n, p in done.model.named_parameters()}

    return weft.on_threads(layout, rank)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps on one device, checkpoints after two and four: folder, losses, parameters."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run(Layout.single(), folder)


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the four steps that a test may spoil."""
    shutil.copytree(whole[0], tmp_path / "run")
    return tmp_path / "run"


def small(seed=0, hidden=4):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1))
    return model, torch.optim.AdamW(model.parameters(), 0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


# -- going on -------------------------------------------------------------------------------------


def test_on_the_same_layout_a_run_goes_on_bitwise(tmp_path):
    layout = Layout.load("tabular-2x2")
    losses, parameters = run(layout, tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "step-000004")
    rest, again = run(layout, tmp_path / "a", resume=True)
    assert rest == losses[2:]
    assert all(torch.equal(parameters[name], again[name]) for name in parameters)


@pytest.mark.parametrize("layout", ["tabular-2x2", "tabular-axial-2x2", HEADS], ids=str)
def test_on_another_layout_it_goes_on_to_rounding_there_and_back(layout, whole, folder):
    layout = Layout.load(layout) if isinstance(layout, str) else Layout.from_dict(layout)
    shutil.rmtree(folder / "step-000004")
    losses, _ = run(layout, folder, resume=True)
    assert losses == pytest.approx(whole[1][2:], rel=1e-10)
    rest, parameters = run(Layout.single(), folder, resume=True)  # all is done
    assert rest == []
    for name, wanted in whole[2].items():
        torch.testing.assert_close(parameters[name], wanted, rtol=1e-10, atol=1e-10)


def test_any_module_and_optimizer_go_on_bitwise_with_buffers_notes_and_random_numbers(tmp_path):
    model, optimizer = small()
    checkpoints = Checkpoints(tmp_path, Layout.single())
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.025
    checkpoints.save(1, model, optimizer, {"order": [3, 1, 2], "best": float("inf")})
    step(model, optimizer)
    again, other = small(seed=5)
    step(again, other)
    loaded = checkpoints.load(again, other)
    assert (loaded.step, loaded.notes) == (1, {"order": [3, 1, 2], "best": float("inf")})
    assert other.param_groups[0]["lr"] == 0.025
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    step(again, other)
    for (name, wanted), found in zip(model.state_dict().items(), again.state_dict().values()):
        assert torch.equal(wanted, found), name
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_wrappers_do_not_change_names(tmp_path):
    model, _ = small()
    Checkpoints(tmp_path, Layout.single()).save(1, torch.compile(model))
    assert "model/0.weight" in read_index(tmp_path / "step-000001").tensors
    again, _ = small(seed=1)
    Checkpoints(tmp_path, Layout.single()).load(again)
    assert torch.equal(again[0].weight, model[0].weight)


def test_checkpoints_are_in_the_order_of_their_numbers(tmp_path):
    checkpoints, (model, _) = Checkpoints(tmp_path, Layout.single()), small()
    for number in (1_000_000, 999_999, 8):
        checkpoints.save(number, model)
    for name in ("step-", "step-x", "step-000009", "step-²", "step-" + "9" * 200):
        (tmp_path / name).mkdir()
    assert checkpoints.steps() == [8, 999_999, 1_000_000]
    assert checkpoints.load(model).step == 1_000_000


def test_a_checkpoint_is_replaced_by_one_of_the_same_step(tmp_path):
    checkpoints, (model, _) = Checkpoints(tmp_path, Layout.single()), small()
    checkpoints.save(1, model)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    path = checkpoints.save(1, model)
    assert len(list(path.iterdir())) == 2
    checkpoints.load(again := small()[0])
    assert torch.equal(again[0].weight, model[0].weight)


# -- whole or not at all --------------------------------------------------------------------------


class Killed(BaseException):
    """What ends a process in the middle of anything."""


@pytest.mark.parametrize("replaces", [False, True])
def test_a_run_that_dies_at_any_moment_of_writing_leaves_the_last_whole_checkpoint(
    replaces, tmp_path, monkeypatch
):
    checkpoints, (model, _) = Checkpoints(tmp_path, Layout.single()), small()
    checkpoints.save(1, model)
    moments = [(os, "fsync"), (os, "replace"), (os, "open"), (files, "save_file")]
    deaths = 0
    for module, name in moments:
        real = getattr(module, name)
        for moment in range(20):
            calls = iter(range(1000))

            def die(*args, calls=calls, moment=moment, real=real, **options):
                if next(calls) == moment:
                    raise Killed
                return real(*args, **options)

            with torch.no_grad():
                model[0].weight.fill_(float(deaths))
            monkeypatch.setattr(module, name, die)
            try:
                checkpoints.save(1 if replaces else 2, model)
                break
            except Killed:
                deaths += 1
            finally:
                monkeypatch.undo()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loaded = checkpoints.load(small()[0])
            assert loaded.step in (1, 2)
    assert deaths >= 9
    assert checkpoints.load(again := small()[0]).step == (1 if replaces else 2)
    assert torch.equal(again[0].weight, model[0].weight)
    assert len(list(loaded.path.parent.glob("*/rank-*"))) == (1 if replaces else 2)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError(30, "Read-only")]
)
def test_what_one_rank_cannot_write_is_refused_on_all_and_the_one_before_stays(
    error, tmp_path, monkeypatch
):
    def rank(layout, number):
        try:
            Checkpoints(tmp_path, layout).save(number, small()[0])
        except CheckpointError as refused:
            return str(refused)

    layout = Layout.parse("tokens: ring=2")
    weft.on_threads(layout, rank, 1)
    real = files.save_file

    def full(tensors, path, **options):
        if "rank-00001" in str(path):
            raise error
        real(tensors, path, **options)

    monkeypatch.setattr(files, "save_file", full)
    text = weft.on_threads(layout, rank, 2)
    assert text[0] == text[1]
    assert text[0].endswith(f"cannot be written: {error.strerror}")
    assert Checkpoints(tmp_path, Layout.single()).load(small()[0]).step == 1


def _save_elsewhere(rank, folder, step):
    layout = Layout.parse("batch: dp=4").build("cpu", timeout=20)
    checkpoints = Checkpoints(f"{folder}/{rank}" if step == 1 else folder, layout)
    with pytest.raises((ShapeError, CheckpointError)) as refused:
        checkpoints.save(step if rank < 3 else 1, small()[0])
    return str(refused.value)


@pytest.mark.parametrize(
    ("step", "what"),
    [(1, "is not there on this rank, though rank 0"), (2, "0, 1, 2: step 2\n  rank 3: step 1")],
)
def test_ranks_at_other_steps_or_folders_are_refused(step, what, pool, tmp_path):
    for text in pool.run(_save_elsewhere, str(tmp_path), step):
        assert what in text


def a_file(path):
    return next(path.glob("rank-*"))


def cut_file(path):
    file = a_file(path)
    file.write_bytes(file.read_bytes()[:-8])


def flip_bit(path):
    file = a_file(path)
    data = bytearray(file.read_bytes())
    data[-3] ^= 16
    file.write_bytes(data)


def lose_file(path):
    a_file(path).unlink()


def cut_index(path):
    (path / "index.json").write_text((path / "index.json").read_text()[:-100])


def edit_index(path):
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text.replace('"step":', '"step":9'))


def empty_index(path):
    (path / "index.json").write_text("")


def nest_index(path):
    (path / "index.json").write_text("[" * 100_000)


def leave_the_folder(path):
    index = json.loads((path / "index.json").read_text())["index"]
    index = json.loads(json.dumps(index).replace("rank-", "../rank-"))
    text = json.dumps(index)
    whole = f'{{"sha256":"{files._text_hash(text)}","index":{text}}}'
    (path / "index.json").write_text(whole)


SPOIL = [
    cut_file,
    flip_bit,
    lose_file,
    cut_index,
    edit_index,
    empty_index,
    nest_index,
    leave_the_folder,
]


def load_on_two(folder):
    """Steps done by a small model's latest whole checkpoint, on two ranks."""
    layout = Layout.parse("tokens: ring=2")
    return weft.on_threads(layout, lambda bound: Checkpoints(folder, bound).load(small()[0]).step)


@pytest.fixture
def two_saved(tmp_path):
    for number in (2, 4):
        Checkpoints(tmp_path, Layout.single()).save(number, small()[0])
    return tmp_path


@pytest.mark.parametrize("spoil", SPOIL)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(spoil, two_saved):
    spoil(two_saved / "step-000004")
    with pytest.warns(UserWarning, match="step-000004.* cannot be .*; going on from .*step-000002"):
        assert load_on_two(two_saved) == [2, 2]
    spoil(two_saved / "step-000002")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint: .*step-000004.*") as refused:
        load_on_two(two_saved)
    assert len(str(refused.value).splitlines()) == 1


# -- what is refused ------------------------------------------------------------------------------


def test_folders_without_a_checkpoint_are_refused_by_name(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    refused = {
        "rum": r"no folder .*rum to resume from; did you mean 'run'",
        "empty": "empty has no complete checkpoint to resume from",
        "run/step-000004": "is one checkpoint; resume from the folder that it lies in",
    }
    for name, text in refused.items():
        with pytest.raises(CheckpointError, match=text):
            run(Layout.single(), tmp_path / name, resume=True)
    with pytest.raises(weft.WeftError, match="resume=True needs checkpoint_dir"):
        run(Layout.single(), None, resume=True)


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/run cannot be written: Not a directory"):
        run(Layout.load("tabular-2x2"), tmp_path / "file" / "run")


def test_a_hostile_pickle_is_never_executed(tmp_path):
    path = tmp_path / "run" / "step-000004"
    path.mkdir(parents=True)
    for name in (".metadata", "index.json", "__0_0.distcp", "rank-00000-00.safetensors"):
        (path / name).write_bytes(pickle.dumps(Hostile(tmp_path / "executed")))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        run(Layout.single(), tmp_path / "run", resume=True)
    (path / "index.json").unlink()
    with pytest.raises(CheckpointError, match="hold pickles; weft reads safetensors"):
        run(Layout.single(), tmp_path / "run", resume=True)
    assert not (tmp_path / "executed").exists()


def test_nothing_is_unpickled(folder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    for module, name in ((pickle, "loads"), (pickle, "load"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    run(Layout.load("tabular-2x2"), folder, resume=True)


def test_a_new_run_does_not_mix_with_an_older_one(folder):
    with pytest.raises(CheckpointError, match=r"an earlier run, up to step 4; resume that run"):
        run(Layout.single(), folder)
    with pytest.raises(CheckpointError, match="trained with seed 0, not 5"):
        run(Layout.single(), folder, resume=True, seed=5)
    with pytest.raises(CheckpointError, match="trained with batch 2, not 3"):
        run(Layout.single(), folder, resume=True, batch=3)


def test_two_runs_at_once_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LIMIT", 0.2)
    checkpoints = Checkpoints(tmp_path / "run", Layout.single())
    with checkpoints.alone(), pytest.raises(CheckpointError, match="another run writes to"):
        run(Layout.single(), tmp_path / "run")
    run(Layout.single(), tmp_path / "run")
    assert checkpoints.steps() == [2, 4]


def test_a_run_that_its_launcher_starts_again_goes_on_by_itself(whole, folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    shutil.rmtree(folder / "step-000004")
    assert run(Layout.single(), folder)[0] == whole[1][2:]
    shutil.rmtree(folder)
    assert run(Layout.single(), folder, resume=True)[0] == whole[1]


def test_another_model_or_optimizer_is_refused_and_nothing_changes(tmp_path):
    checkpoints, (model, optimizer) = Checkpoints(tmp_path, Layout.single()), small()
    step(model, optimizer)
    checkpoints.save(1, model, optimizer)
    wide, deep = small(hidden=5)[0], nn.Sequential(*small()[0], nn.Linear(1, 1))
    short = nn.Sequential(*list(small()[0])[:2])
    few = torch.optim.AdamW(list(model.parameters())[:2])
    foreign = torch.optim.AdamW(small()[0].parameters())
    refused = [
        (wide, None, r"'0.weight' is float32 \(4, 3\) there, float32 \(5, 3\) here"),
        (small()[0].double(), None, "'0.weight' is float32 .* there, float64"),
        (deep, None, "it has no '3.weight'"),
        (short, None, "this one has no '2.bias'"),
        (model, torch.optim.SGD(model.parameters(), 0.1), "has the states of AdamW, this is SGD"),
        (model, few, "group 0 of its optimizer has other parameters"),
        (model, foreign, "a parameter of shape .* that the model does not have"),
    ]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.add_(1.0)
        before["0.weight"].add_(1.0)
    for other, its, text in refused:
        with pytest.raises(CheckpointError, match=text):
            checkpoints.load(other, its)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    checkpoints.save(2, model)
    with pytest.raises(CheckpointError, match="was saved without its optimizer"):
        checkpoints.load(model, optimizer)
    assert checkpoints.load(model).step == 2
