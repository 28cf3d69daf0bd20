"""Checkpoints: resumed on any layout, whole or not there at all, and nothing is ever unpickled."""

import io
import itertools
import json
import os
import pickle
import shutil
import threading
import warnings
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft import Layout, ShapeError
from weft.checkpoint import CheckpointError, Checkpoints
from weft.checkpoint import folder as files
from weft.checkpoint.folder import read_index
from weft.checkpoint.values import decode
from weft_models.models import ModelSpec, compose, save_pretrained
from weft_models.models.pretrained import read_notes
from weft_models.train import fit
from weft_models.train.step import lr_schedule

SPEC = ModelSpec.load("tabular")
SPEC = SPEC.model_copy(
    update={
        "train": SPEC.train.model_copy(update={"length": {"rows": (9, 13), "features": (2, 3)}})
    }
)
STEPS = {"steps": 4, "batch": 2, "checkpoint_every": 2, "quiet": True}
DRAWS = threading.Lock()
HEADS = {"mesh": {"tp": 2}, "shard": {"heads": ["tp"]}}


def run(layout, folder, resume=False, **options):
    """Losses and rank 0's parameters of a run whose ranks are threads."""
    options = {**STEPS, "dtype": torch.float64, **options}

    def rank(bound):
        done = fit(SPEC, bound, checkpoint_dir=folder, resume=resume, **options)
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


def seeded(seed, make):
    """What `make` draws from a seed, also on threads, which share torch's generator."""
    with DRAWS:
        torch.manual_seed(seed)
        return make()


def small(seed=0, hidden=4):
    model = seeded(
        seed,
        lambda: nn.Sequential(nn.Linear(3, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1)),
    )
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


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["tabular-2x2", "tabular-axial-2x2", HEADS], ids=str)
def test_on_another_layout_it_goes_on_to_rounding_and_back(layout, whole, folder):
    layout = Layout.load(layout) if isinstance(layout, str) else Layout.from_dict(layout)
    shutil.rmtree(folder / "step-000004")
    losses, _ = run(layout, folder, resume=True)
    assert losses == pytest.approx(whole[1][2:], rel=1e-10)
    rest, parameters = run(Layout.single(), folder, resume=True)  # all is done
    assert rest == []
    for name, wanted in whole[2].items():
        torch.testing.assert_close(parameters[name], wanted, rtol=1e-10, atol=1e-10)


def test_any_module_and_optimizer_go_on_bitwise(tmp_path):
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


NOTES = {
    "plain": {"order": [3, 1], "best": float("inf"), "none": None, "yes": True, "big": 2**70},
    "keys": {3: "a", (1, "b"): {None: 2.5}, False: []},
    "kinds": {"t": (1, (2, [3])), "c": Counter({3: 1, 5: 2}), "<tuple>": [1], "n": {"<dict>": 1}},
    "numpy": {"i": np.int64(3), "f": np.float32(0.1), "b": np.bool_(True)},
    "top": {1: {2: {3: (4,)}}},
}


@pytest.mark.parametrize("notes", NOTES.values(), ids=NOTES)
def test_notes_come_back_equal_to_what_was_saved(notes, tmp_path):
    checkpoints, (model, _) = Checkpoints(tmp_path, Layout.single()), small()
    checkpoints.save(np.int64(5), model, notes=notes)
    loaded = checkpoints.load(model)
    assert (loaded.step, loaded.notes) == (5, notes)
    assert [type(v) for v in loaded.notes.values() if isinstance(v, Counter | tuple)] == [
        type(v) for v in notes.values() if isinstance(v, Counter | tuple)
    ]
    weights = save_pretrained(compose(SPEC), tmp_path / "w.safetensors", notes)
    assert read_notes(weights)["notes"] == notes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 2)])
def test_tensors_in_notes_come_back_bitwise(dtype, shape, tmp_path):
    checkpoints, (model, _) = Checkpoints(tmp_path, Layout.single()), small()
    tensor = (torch.randn(shape) * 9).to(dtype)
    checkpoints.save(1, model, notes={"t": [tensor]})
    (found,) = checkpoints.load(model).notes["t"]
    assert found.dtype == dtype
    assert found.shape == shape
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_schedulers_and_their_optimizers_go_on_bitwise(lr, tmp_path):
    def begin():
        model, own = small()[0], lr if isinstance(lr, float) else lr.clone()
        optimizer = torch.optim.AdamW(model.parameters(), own)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=2)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.1)
        plan = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], [2])
        return model, optimizer, plan

    def go(model, optimizer, plan, count):
        rates = []
        for _ in range(count):
            step(model, optimizer)
            plan.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    first, checkpoints = begin(), Checkpoints(tmp_path, Layout.single())
    go(*first, 3)
    checkpoints.save(3, *first[:2], {"plan": first[2].state_dict()})
    wanted, again = go(*first, 4), begin()
    again[2].load_state_dict(checkpoints.load(*again[:2]).notes["plan"])
    assert go(*again, 4) == wanted
    assert len(set(wanted)) == 2
    assert str(again[1].state_dict()) == str(first[1].state_dict())


def test_run_goes_on_with_options_that_it_is_given_now(folder, tmp_path):
    shutil.rmtree(folder / "step-000004")
    changes = {"before": {}, "none": {"weight_decay": 0.0}, "much": {"weight_decay": 50.0}}
    changes["betas"] = {"weight_decay": 0.0, "betas": (0.5, 0.75)}
    found = {}
    for name, change in changes.items():
        shutil.copytree(folder, tmp_path / name)
        steps = 2 if name == "before" else 3
        _, found[name] = run(Layout.single(), tmp_path / name, True, steps=steps, **change)
    rate = SPEC.train.lr * lr_schedule(2, 3, SPEC.train.warmup)
    for name, start in found["before"].items():
        wanted = found["none"][name] - 50.0 * rate * start
        torch.testing.assert_close(found["much"][name], wanted, rtol=1e-12, atol=1e-12)
    values = read_index(tmp_path / "betas" / "step-000003").values
    assert decode(values["optimizer.param_groups.0.betas"]) == (0.5, 0.75)
    assert not all(torch.equal(found["betas"][n], t) for n, t in found["none"].items())


def test_wrappers_do_not_change_names(tmp_path):
    model, _ = small()
    Checkpoints(tmp_path, Layout.single()).save(1, torch.compile(model))
    assert "model.0.weight" in read_index(tmp_path / "step-000001").tensors
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
def test_death_while_writing_leaves_the_last_whole_checkpoint(replaces, tmp_path, monkeypatch):
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
def test_failed_writes_of_one_rank_are_refused_on_all(error, tmp_path, monkeypatch):
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
    [(1, "cannot be written"), (2, "0, 1, 2: step 2\n  rank 3: step 1")],
)
def test_ranks_at_other_steps_or_folders_are_refused(step, what, pool, tmp_path):
    for text in pool.run(_save_elsewhere, str(tmp_path), step):
        assert what in text


class Odd(torch.optim.SGD):
    """Keeps something that is no parameter's."""

    def step(self):
        self.state["all"]["count"] = 1


def _refused_by_rank_3(rank, folder):
    """What four ranks are told, where rank 3 alone has what cannot be kept."""
    checkpoints = Checkpoints(folder, Layout.parse("batch: dp=4").build("cpu", timeout=20))
    model, optimizer = small()
    lbfgs, odd = torch.optim.LBFGS(model.parameters()), Odd(model.parameters(), 0.1)
    lbfgs.step(lambda: model(torch.ones(2, 3)).square().sum())
    hook = torch.optim.SGD(model.parameters(), 0.1)
    hook.param_groups[0]["hook"] = print
    odd.step()
    keyed = torch.optim.SGD(model.parameters(), 0.1)
    keyed.state[model[0].bias][5] = torch.ones(4)
    lbfgs.state[model[0].weight]["old"] = [torch.ones(2)]
    loop: list = []
    loop.append(loop)
    bad = [
        (1, None, {"a": [0, {5: {1}}]}, r"notes['a'][1][5] is a set"),
        (1, None, {"a": loop}, "notes cannot be saved: nested too deeply"),
        (1, None, {1: torch.ones(2, dtype=torch.cfloat)}, "notes[1] is a Tensor"),
        (1, lbfgs, {}, "optimizer.state.0.weight.old[0] is a Tensor"),
        (1, hook, {}, "optimizer.param_groups.0.hook is a builtin_function"),
        (1, odd, {}, "the optimizer's state 'count' of 'all' has no name"),
        (1, keyed, {}, "the optimizer's state 5 of '0.bias' has no name"),
        (-5, None, {}, "step is -5; it must be an integer from 0 on"),
        (1.5, None, {}, "step is 1.5; it must"),
        (
            1,
            None,
            {"at": 3, "seed": 2},
            'notes are {"seed": 2} on rank 0 and {"at": 3, "seed": 2} on rank 3',
        ),
        (1, None, {"seed": 3}, 'notes are {"seed": 2} on rank 0 and {"seed": 3} on rank 3'),
    ]
    told = []
    for number, its, notes, text in bad:
        its, notes = (its, notes) if rank == 3 else (optimizer, {"seed": 2})
        with pytest.raises(CheckpointError) as refused:
            checkpoints.save(number, model, its, notes)
        told.append((text, str(refused.value)))
    assert not os.listdir(folder)
    kept = {"order": {1: 2}}
    checkpoints.save(1, model, notes=kept if rank in (2, 3) else None)
    assert checkpoints.load(model).notes == kept
    return told


def test_unstorable_values_of_one_rank_are_refused_before_writing(pool, tmp_path):
    for told in pool.run(_refused_by_rank_3, str(tmp_path)):
        for text, found in told:
            assert text in found, (text, found)


# -- what ranks do not share ----------------------------------------------------------------------


class Split(nn.Linear):
    """Holds its own part of a weight, which nothing says."""

    def __init__(self, rank):
        super().__init__(2, 3)
        with torch.no_grad():
            self.weight.fill_(rank)
            self.bias.zero_()


class Counts(nn.Linear):
    """Follows torch's recipe for a state that is no tensor of its own."""

    seen = 0

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def counting(seen):
    model = seeded(0, lambda: nn.Sequential(nn.Linear(2, 2), Counts(2, 1)))
    model[1].seen = seen
    return model


def unlike(rank, what):
    """A model, and its optimizer or None, that differs on rank 1 in one thing."""
    if what == "statistics":
        model = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU())
        model(torch.full((4, 2), 10.0) * (rank + 1))
        return model, None
    if what == "weights":
        return Split(rank), None
    if what == "extra":
        return counting({"at": rank}), None
    model = Split(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    if what == "missing" and rank == 0:
        model.zero_grad()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("statistics", "'0.running_mean' differs between rank 0 and rank 1.*SyncBatchNorm"),
        ("weights", "'weight' differs between rank 0 and rank 1; .* one copy.* make a DTensor"),
        ("states", "momentum_buffer' differs .*sync_gradients"),
        ("missing", "momentum_buffer' differs .*sync_gradients"),
        ("extra", "the extra state of module '1' differs between rank 0 and rank 1"),
    ],
)
def test_what_differs_between_ranks_that_hold_whole_refused_on_all(what, text, tmp_path):
    def rank(layout):
        checkpoints = Checkpoints(tmp_path, layout)
        with pytest.raises(CheckpointError, match=text):
            checkpoints.save(1, *unlike(layout.rank, what))
        checkpoints.save(2, *unlike(0, what))
        return checkpoints.steps()

    layout = Layout.parse("tokens: ring=2")
    assert weft.on_threads(layout, rank) == [[2], [2]]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-000002"]


def _statistics_under_ddp(rank, folder):
    """Of a BatchNorm whose statistics DDP takes from its first rank before each forward pass."""
    layout = Layout.parse("batch: dp=4").build("cpu", timeout=20)
    model = nn.parallel.DistributedDataParallel(small()[0])
    model(torch.randn(5, 3) * (rank + 1))
    checkpoints = Checkpoints(folder, layout)
    with pytest.raises(CheckpointError, match="save the wrapped model"):
        checkpoints.save(1, model.module)
    checkpoints.save(1, model)
    again = nn.parallel.DistributedDataParallel(small(seed=1)[0])
    checkpoints.load(again)
    inputs = torch.ones(5, 3)  # the same on all ranks: DDP's statistics count
    model(inputs), again(inputs)
    return all(torch.equal(a, b) for a, b in zip(model.buffers(), again.buffers()))


def test_statistics_that_ddp_takes_from_one_rank_are_that_ranks(pool, tmp_path):
    assert pool.run(_statistics_under_ddp, str(tmp_path)) == [True] * 4


@pytest.mark.parametrize(
    "state",
    [
        {"seen": 7, "scales": {3: (0.5,)}},
        torch.arange(4, dtype=torch.uint8),
        None,
        pickle.dumps({"seen": 7}),
        {"<bytes>": [b"", b"\xff\0"]},
    ],
    ids=["dict", "tensor", "None", "bytes", "nested"],
)
@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile], ids=["plain", "compiled"])
def test_extra_states_of_modules_come_back_equal(wrap, state, tmp_path):
    def rank(layout):
        checkpoints = Checkpoints(tmp_path, layout)
        checkpoints.save(1, wrap(counting(state)))
        checkpoints.load(again := counting("before"))
        return again[1].seen

    for found in weft.on_threads(Layout.parse("batch: dp=2"), rank):
        assert torch.equal(found, state) if isinstance(state, torch.Tensor) else found == state


def test_extra_state_in_file_of_memory_comes_back_as_one(tmp_path):
    """As modules give it that write it by `torch.save`."""
    torch.save({"scale": torch.ones(2)}, state := io.BytesIO())
    checkpoints = Checkpoints(tmp_path, Layout.single())
    checkpoints.save(1, counting(state))
    checkpoints.load(again := counting(None))
    assert type(again[1].seen) is io.BytesIO
    assert torch.equal(torch.load(again[1].seen)["scale"], torch.ones(2))


def test_extra_states_that_cannot_be_kept_or_given_back_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run", Layout.single())
    with pytest.raises(CheckpointError, match=r"model.1._extra_state\['a'\] is a set"):
        checkpoints.save(1, counting({"a": {1}}))
    assert not (tmp_path / "run").exists()
    plain = nn.Sequential(*counting(1)[:1], nn.Linear(2, 1))
    checkpoints.save(1, plain)
    with pytest.raises(CheckpointError, match="it has no extra state of module '1'"):
        checkpoints.load(model := counting(1))
    assert model[1].seen == 1
    checkpoints.save(1, Counts(2, 1))
    with pytest.raises(CheckpointError, match="this one has no extra state of the model"):
        checkpoints.load(nn.Linear(2, 1))
    model = compose(SPEC)
    model.counts = Counts(1, 1)
    with pytest.raises(weft.WeftError, match="the extra state of module 'counts' is no weight"):
        save_pretrained(model, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()


def _replicas(rank, folder):
    """Both replicas save one step; then each saves alone, and all load."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mine = Layout.parse("tokens: ring=2").bind(mesh["cp"], {"ring": "cp"}, 20)
    checkpoints, model = Checkpoints(folder, mine), small()[0]
    checkpoints.check_writable()
    told = "saved"
    try:
        checkpoints.save(1, model)
    except CheckpointError as refused:
        told = str(refused)
    dist.barrier()
    if rank < 2:
        Checkpoints(folder, mine).save(2, model)
    dist.barrier()
    whole = Checkpoints(folder, Layout.parse("batch: dp=4").build("cpu", timeout=20))
    found = (checkpoints.load(model).step, whole.load(model).step, whole.steps())
    whole.save(2, model)  # it has ranks of the layout that wrote this step: the run goes on
    alone = "saved"
    try:
        Checkpoints(f"{folder}/alone", Layout.single()).save(1, model)
    except CheckpointError as refused:
        alone = str(refused)
    return told, found, alone


def test_replicas_that_save_into_one_folder_lose_nothing(pool, tmp_path):
    results = pool.run(_replicas, str(tmp_path))
    told = [told for told, _, _ in results]
    assert told[0] == told[1]
    assert told[2] == told[3]
    assert told.count("saved") == 2
    assert "saved by ranks" in (refused := max(told, key=len))
    assert "let one save" in refused
    assert [found for _, found, _ in results] == [(2, 2, [1, 2])] * 4
    alone = [alone for _, _, alone in results]
    assert alone.count("saved") == 1
    assert sum("saved by ranks" in text for text in alone) == 3


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
def test_damaged_checkpoint_is_passed_over_for_the_one_before_it(spoil, two_saved):
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
        "run/step-000004": "is one checkpoint; resume from the folder that contains it",
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


def test_folder_that_cannot_be_written_is_refused_before_first_step(tmp_path):
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
    with pytest.raises(CheckpointError, match="metadata is a pickle; weft reads safetensors"):
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


def test_a_model_file_that_computes_something_else_is_refused(folder):
    first, second, *rest = SPEC.block
    changes = [
        {"sizes": SPEC.sizes.model_copy(update={"heads": 2 * SPEC.sizes.heads})},
        {"block": (second, first, *rest)},
        {"block": (first, second.model_copy(update={"mask": ()}), *rest)},
    ]
    options = {**STEPS, "dtype": torch.float64, "checkpoint_dir": folder, "resume": True}
    for change in changes:
        other = SPEC.model_copy(update=change)
        with pytest.raises(CheckpointError, match=r"step-000004 .*another model file 'tabular'"):
            fit(other, Layout.single(), **options)


def test_two_runs_at_once_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.checkpoint.run.LIMIT", 0.2)
    checkpoints = Checkpoints(tmp_path / "run", Layout.single())
    with checkpoints.alone(), pytest.raises(CheckpointError, match="another run writes to"):
        run(Layout.single(), tmp_path / "run")
    run(Layout.single(), tmp_path / "run")
    assert checkpoints.steps() == [2, 4]


def test_run_that_its_launcher_starts_again_goes_on_by_itself(whole, folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    shutil.rmtree(folder / "step-000004")
    assert run(Layout.single(), folder)[0] == whole[1][2:]
    shutil.rmtree(folder)
    assert run(Layout.single(), folder, resume=True)[0] == whole[1]


def test_one_restarted_rank_is_a_restart_of_all(whole, folder, monkeypatch):
    """An agent that joined late has counted no restart, nor has one of a run that grows."""
    shutil.rmtree(folder / "step-000004")
    counts = itertools.cycle([False, True])
    monkeypatch.setattr("weft_models.train.trainer.restarted", lambda: next(counts))
    losses, _ = run(Layout.parse("rows: ring=2"), folder)
    assert losses == pytest.approx(whole[1][2:], rel=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["rows: ring=3", "batch: dp=2"])
def test_launch_goes_on_with_its_own_checkpoints(layout, whole, tmp_path, monkeypatch):
    """A run that grows or shrinks without a counted restart; another launch is refused."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    run(Layout.parse("rows: ring=2"), tmp_path, steps=2)
    losses, _ = run(Layout.parse(layout), tmp_path)
    assert losses == pytest.approx(run(Layout.single(), tmp_path / "b")[0][2:], rel=1e-10)
    for other in ("job-8", "none", ""):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
        with pytest.raises(
            CheckpointError, match="has checkpoints of an earlier run, up to step 4"
        ):
            run(Layout.single(), tmp_path)


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
        (short, None, "this one has no '2.weight'"),
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


@pytest.mark.parametrize(("dim", "refused"), [("tp", False), ("ring", True)])
def test_on_gpus_only_ranks_that_split_data_have_the_same_bits(dim, refused, tmp_path, monkeypatch):
    """Their gradients are summed, and so everywhere the same; others round by themselves."""
    monkeypatch.setattr("weft.checkpoint.replicated.rounds", lambda tensor: True)

    def rank(layout):
        model, _ = small()
        model[0].weight.data.mul_(1 + 1e-6 * layout.coords[dim])
        told = pytest.raises(CheckpointError, match="weight' differs between rank 0 and rank 2")
        with told if refused else nullcontext():
            Checkpoints(tmp_path, layout).save(1, model)

    weft.on_threads(Layout.parse("tokens: ring=2; heads: tp=2"), rank)
