"""Folders of tensors: shared with torch.distributed.checkpoint, and no pickle is ever executed."""

import io
import itertools
import json
import os
import pickle
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import weft
from weft import Layout, TabularClassifier
from weft.checkpoint import CheckpointError, Checkpoints, SafetensorsReader, SafetensorsWriter
from weft.checkpoint import folder as files
from weft.checkpoint.values import decode
from weft_models.models import compose, from_pretrained, save_pretrained
from weft_models.models.pretrained import read_notes


def _trained(layout: Layout, seed: int = 0):
    """A model with split heads and sharded weights, and AdamW after one step."""
    model = compose("tabular", layout, seed=seed, dtype=torch.float64)
    if layout.device_mesh is not None:
        model = weft.data_parallel(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.1 + number)
    optimizer.step()
    return model, optimizer


def _wholes(model, optimizer) -> dict[str, torch.Tensor]:
    full = {"full_state_dict": True}
    options = dcp.state_dict.StateDictOptions(**full)
    weights, states = get_state_dict(model, optimizer, options=options)
    return weights | {
        f"{name}.{key}": t for name, own in states["state"].items() for key, t in own.items()
    }


# -- torch.distributed.checkpoint ------------------------------------------------------------------


def _both_ways(rank: int, folder: str) -> None:
    """dcp reads what Checkpoints wrote, and Checkpoints reads what dcp wrote, on 2x2 ranks."""
    layout = Layout.parse("rows: ring=2; heads: tp=2").build("cpu", timeout=60)
    model, optimizer = _trained(layout)
    reference = _wholes(model, optimizer)
    path = Checkpoints(folder, layout).save(3, model, optimizer, {"epoch": 1})

    other, another = _trained(layout, seed=1)
    weights, states = get_state_dict(other, another)
    state = {"model": weights, "optimizer": states, "step": 0}
    dcp.load(state, storage_reader=SafetensorsReader(path))
    set_state_dict(other, another, model_state_dict=weights, optim_state_dict=state["optimizer"])
    assert state["step"] == 3
    for name, tensor in _wholes(other, another).items():
        assert torch.equal(tensor, reference[name]), name

    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": 5}
    writer = SafetensorsWriter(f"{folder}/step-000005")
    dcp.async_save(state, storage_writer=writer).result(60)
    third, its = _trained(layout, seed=2)
    loaded = Checkpoints(folder, layout).load(third, its)
    assert (loaded.step, loaded.notes) == (5, {})
    for name, tensor in _wholes(third, its).items():
        assert torch.equal(tensor, reference[name]), name


@pytest.mark.sample
def test_dcp_and_weft_read_each_other_s_folders(pool, tmp_path):
    pool.run(_both_ways, str(tmp_path))
    model, optimizer = _trained(Layout.single(), seed=3)
    assert Checkpoints(tmp_path, Layout.single()).load(model, optimizer).step == 5
    alone = _wholes(*_trained(Layout.single()))
    for name, tensor in _wholes(model, optimizer).items():
        assert torch.equal(tensor, alone[name]), name


def test_torch_s_own_reader_of_safetensors_reads_the_tensors(tmp_path):
    layout = Layout.parse("heads: tp=2")
    saved = weft.on_threads(layout, lambda on: Checkpoints(tmp_path, on).save(1, *_trained(on)))
    weights = compose("tabular", seed=1, dtype=torch.float64).state_dict()
    reader = dcp.HuggingFaceStorageReader(str(saved[0]))
    dcp.load({"model": weights}, storage_reader=reader, no_dist=True)
    for name, tensor in _trained(Layout.single())[0].state_dict().items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("damage", ["bit", "cut", "index"])
def test_dcp_refuses_a_damaged_folder_before_anything_changes(damage, tmp_path):
    model = nn.Linear(3, 2)
    dcp.save(model.state_dict(), storage_writer=SafetensorsWriter(tmp_path), no_dist=True)
    (file,), index = tmp_path.glob("rank-*"), tmp_path / "index.json"
    content = file.read_bytes()
    if damage == "index":
        index.write_text(index.read_text().replace("[2]", "[3]", 1))
    file.write_bytes(content[:-1] + b"\xff" if damage == "bit" else content[: -(damage == "cut")])
    if damage == "index":
        file.write_bytes(content)
    state = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    with pytest.raises(
        CheckpointException, match=r"the hash that|bytes, but|index.json cannot be read"
    ):
        dcp.load(state, storage_reader=SafetensorsReader(tmp_path), no_dist=True)
    assert not any(t.any() for t in state.values())


def test_objects_that_json_cannot_give_back_are_refused_by_name(tmp_path):
    state = {"w": torch.ones(2), "hook": print}
    with pytest.raises(CheckpointException, match="hook is a builtin_function"):
        dcp.save(state, storage_writer=SafetensorsWriter(tmp_path), no_dist=True)
    assert not (tmp_path / "index.json").exists()


# -- hostile files ---------------------------------------------------------------------------------


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _pickles(path):
    """A pickle as itself, and as torch.save writes it: a zip, and the older format."""
    yield pickle.dumps(Hostile(path))
    for new in (True, False):
        torch.save(Hostile(path), content := io.BytesIO(), _use_new_zipfile_serialization=new)
        yield content.getvalue()


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.bin", "w.ckpt"])
def test_pickle_in_place_of_weights_is_refused_and_never_executed(name, kind, tmp_path):
    path, marker = tmp_path / name, tmp_path / "executed"
    path.write_bytes([*_pickles(marker)][kind])
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "index.json").write_bytes(path.read_bytes())
    table = torch.zeros(4, 2).numpy(), [0, 1, 0, 1]
    asked = [
        lambda: from_pretrained(path),
        lambda: read_notes(path),
        lambda: TabularClassifier(checkpoint=str(path)).fit(*table),
        lambda: SafetensorsReader(tmp_path / "index").read_metadata(),
    ]
    for ask in asked:
        with pytest.raises(weft.WeftError):
            ask()
        assert not marker.exists()


def _deep(metadata: str, path):
    save_file({"w": torch.ones(2)}, path, metadata={"weft": metadata})
    return path


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("[" * 100_000, "cannot be read"),
        ('{"format": "weft weights 1"}', "no model file"),
        ('{"format": "weft weights 1", "model": {}, "notes": '
         + '{"<tuple>": [' * 2000 + "]}" * 2000 + "}", "cannot be read"),
        ('{"format": "weft weights 1", "model": {}, "notes": {"<tensor>": ["save", [1], [0]]}}',
         "notes cannot be read"),
        ('{"format": "weft weights 1", "model": {"axes": 3}}', "its model file"),
        ("[]", "do not say"),
    ],
)  # fmt: skip
def test_metadata_that_save_pretrained_never_wrote_are_refused(text, refused, tmp_path):
    with pytest.raises(weft.DeclarationError, match=refused):
        from_pretrained(_deep(text, tmp_path / "w.safetensors"))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_not_finite_are_refused_where_they_are_loaded(number, tmp_path):
    model = compose("tabular")
    with torch.no_grad():
        next(model.parameters()).view(-1)[3] = number
    path = save_pretrained(model, tmp_path / "w.safetensors")

    def rank(layout):
        with pytest.raises(CheckpointError, match="has numbers that are not finite"):
            from_pretrained(path, layout)

    weft.on_threads(Layout.parse("heads: tp=2"), rank)


INDICES = {
    "another format": {"format": "weft checkpoint 1"},
    "no file": {"files": {}},
    "small file": {"files": {"rank-00000-0a.safetensors": {"bytes": 3, "sha256": ""}}},
    "path": {"files": {}, "tensors": {"w": {"dtype": "float32", "shape": [2], "blocks": [
        {"file": "../rank-00000-0a.safetensors", "start": [0], "shape": [2]}]}}},
    "no dtype": {"dtype": "save"},
    "negative": {"shape": [-2]},
    "large": {"shape": [10**15], "blocks": [(0, 10**15)]},
    "too few": {"blocks": [(0, 1)]},
    "beyond": {"blocks": [(1, 2)]},
    "twice": {"blocks": [(0, 1), (0, 1)]},
    "none": {"blocks": []},
    "nested": {"values": {"a": {"<tuple>": 3}}},
}  # fmt: skip


@pytest.mark.parametrize("name", INDICES)
def test_an_index_with_a_new_digest_is_still_checked(name, tmp_path):
    """Whoever can write a folder can write its digests: what they say must fit together."""
    file = {"rank-00000-0a.safetensors": {"bytes": 100, "sha256": ""}}
    changes = dict(INDICES[name])
    blocks = [
        {"file": next(iter(file)), "start": [at], "shape": [n]}
        for at, n in changes.pop("blocks", [(0, 2)])
    ]
    stored = {"dtype": "float32", "shape": [2], "blocks": blocks}
    stored |= {key: changes.pop(key) for key in ("dtype", "shape") if key in changes}
    index = {"format": files.FORMAT, "values": {}, "files": file, "tensors": {"w": stored}}
    text = json.dumps(index | changes)
    seal = files._text_hash(text)
    (tmp_path / "index.json").write_text(f'{{"sha256":"{seal}","index":{text}}}')
    with pytest.raises(CheckpointError, match=r"index.json cannot be read|a value cannot be read"):
        decode(files.read_index(tmp_path).values)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"index"'])
def test_an_index_that_is_no_object_is_shown(text, tmp_path):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json cannot be read: it holds .* no index"):
        files.read_index(tmp_path)


def test_a_folder_of_torchs_default_writer_is_named_as_one(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"is a checkpoint of another .*SafetensorsWriter"):
        files.read_index(tmp_path)


def test_weights_of_another_width_are_refused_before_model_is_made(tmp_path, monkeypatch):
    """A file of kilobytes may name a width of which the weights take all memory."""
    path = save_pretrained(compose("pair"), tmp_path / "w.safetensors")
    with files.open_tensors(path) as file:
        facts = json.loads(file.metadata()["weft"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts["model"]["sizes"]["embed"] = 48 * 256
    save_file(tensors, path, metadata={"weft": json.dumps(facts)})

    def draw(weight: torch.Tensor, *_, **__) -> torch.Tensor:
        assert weight.is_meta
        return weight

    monkeypatch.setattr(torch.Tensor, "uniform_", draw)
    with pytest.raises(CheckpointError, match=r"has shape \(.*\), not \(.*12288"):
        from_pretrained(path)


@pytest.mark.parametrize("dims", [1, 2])
def test_blocks_of_one_tensor_are_checked_in_linear_time(dims):
    ways = {1: 6000, 2: 80}[dims]
    blocks = [
        {"file": "rank-00000-0a.safetensors", "start": [*at], "shape": [1] * dims}
        for at in itertools.product(range(ways), repeat=dims)
    ]
    begin = time.process_time()
    files.Stored(dtype="float32", shape=[ways] * dims, blocks=blocks)
    assert time.process_time() - begin < 2
    blocks[-1] = blocks[0]
    with pytest.raises(ValueError, match="do not make it up"):
        files.Stored(dtype="float32", shape=[ways] * dims, blocks=blocks)


TILINGS = {
    "a pinwheel": ([3, 3], [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)),
                            ((1, 1), (1, 1))], True),
    "uneven": ([5], [((0,), (3,)), ((3,), (2,))], True),
    "empty blocks": ([2, 0], [((0, 0), (1, 0)), ((1, 0), (1, 0))], True),
    "an empty one more": ([2], [((0,), (2,)), ((1,), (0,))], True),
    "a number": ([], [((), ())], True),
    "a number twice": ([], [((), ()), ((), ())], False),
    "overlap and gap": ([4], [((0,), (2,)), ((1,), (2,))], False),
    "two halves twice": ([2, 2], [((0, 0), (1, 2)), ((0, 0), (2, 1))], False),
}  # fmt: skip


@pytest.mark.parametrize("name", TILINGS)
def test_blocks_make_up_a_tensor_exactly(name):
    shape, blocks, exact = TILINGS[name]
    given = [{"file": "rank-0-0a.safetensors", "start": [*a], "shape": [*n]} for a, n in blocks]
    if exact:
        assert files.Stored(dtype="float32", shape=shape, blocks=given).shape == shape
    else:
        with pytest.raises(ValueError, match="do not make it up"):
            files.Stored(dtype="float32", shape=shape, blocks=given)
