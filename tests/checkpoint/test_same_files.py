"""Readers on ranks that see several copies of a file: equal ones are read, others refused."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import weft
from weft.checkpoint import CheckpointError, Checkpoints, SafetensorsReader, SafetensorsWriter
from weft.errors import ShapeError, WeftError
from weft.layout import Layout
from weft.models import compose, from_pretrained, save_pretrained
from weft.threads import on_threads

LAYOUT = Layout.parse("rows: ring=2")


def _weights(folder, number):
    save_pretrained(compose("tabular", seed=number), folder / "w.safetensors")


def _checkpoint(folder, number):
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, number)
    Checkpoints(folder, Layout.single()).save(3, model)


#: By what is read: how it is written, and read by a rank of a layout.
READERS = {
    "weights": (_weights, lambda folder, on: from_pretrained(folder / "w.safetensors", on)),
    "checkpoint": (_checkpoint, lambda folder, on: Checkpoints(folder, on).load(nn.Linear(2, 2))),
}


def _read(folders, read) -> list[Exception | None]:
    def rank(on: Layout) -> Exception | None:
        try:
            read(folders[on.rank], on)
        except WeftError as error:
            return error
        return None

    return on_threads(LAYOUT, rank)


@pytest.mark.parametrize("kind", READERS)
def test_a_stale_copy_on_one_rank_is_refused_on_all(tmp_path, kind):
    write, read = READERS[kind]
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        write(folder, number)
    for error in _read(folders, read):
        assert isinstance(error, CheckpointError | ShapeError)
        assert "must be the same on every rank" in str(error)
        assert "sha256" in str(error)


@pytest.mark.parametrize("kind", READERS)
def test_equal_copies_are_read(tmp_path, kind):
    write, read = READERS[kind]
    folders = [tmp_path / "a", tmp_path / "b"]
    folders[0].mkdir()
    write(folders[0], 1)
    shutil.copytree(*folders)
    assert _read(folders, read) == [None, None]


def test_every_file_of_a_folder_is_verified_by_some_rank(tmp_path):
    """Each of two ranks reads the digest of its share: together, those are all files."""
    weights = nn.Linear(8, 8)
    four = Layout.parse("rows: ring=4")
    on_threads(four, lambda on: Checkpoints(tmp_path, on).save(3, weights))
    files = sorted((tmp_path / "step-000003").glob("rank-*"))
    assert len(files) == 4
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        for error in _read([tmp_path] * 2, lambda f, on: Checkpoints(f, on).load(nn.Linear(8, 8))):
            assert f"{file.name} " in str(error)
        file.write_bytes(content)


def test_a_rank_verifies_all_files_of_its_own_copy(tmp_path):
    """Of a folder that ranks share, each verifies a part; a copy is nobody else's to verify."""
    folders = [tmp_path / "a", tmp_path / "b"]

    weights = nn.Linear(2, 2)
    on_threads(LAYOUT, lambda on: Checkpoints(folders[0], on).save(3, weights))
    shutil.copytree(*folders)
    for file in sorted((folders[1] / "step-000003").glob("rank-0000*")):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        errors = _read(folders, READERS["checkpoint"][1])
        assert all("hash" in str(error) for error in errors), errors
        data[-1] ^= 1
        file.write_bytes(data)
    assert _read(folders, READERS["checkpoint"][1]) == [None, None]


def test_a_file_that_one_rank_lacks_is_refused_on_all(tmp_path):
    _weights(tmp_path, 0)
    errors = _read([tmp_path, tmp_path / "b"], READERS["weights"][1])
    assert all("there is no file" in str(error) for error in errors)


def test_folders_of_dcp_that_differ_are_refused_by_the_coordinator(tmp_path):
    plans = []
    for name in ("a", "b"):
        state = {"w": torch.full((2,), float(ord(name)))}
        dcp.save(state, storage_writer=SafetensorsWriter(tmp_path / name), no_dist=True)
        reader = SafetensorsReader(tmp_path / name)
        plans.append(reader.prepare_local_plan(dcp.planner.LoadPlan([])))
    assert reader.prepare_global_plan(plans[1:]) == plans[1:]
    with pytest.raises(CheckpointError, match="must be the same on every rank"):
        reader.prepare_global_plan(plans)


def test_runs_whose_arguments_differ_are_refused_on_all():
    spec = weft.models.ModelSpec.load("tabular")

    def rank(on: Layout) -> str:
        with pytest.raises(ShapeError, match=r"seed 0 \(rank 0\), 1 \(rank 1\)") as caught:
            weft.train.fit(spec, on, seed=on.rank, quiet=True, steps=2)
        return str(caught.value)

    assert len({*on_threads(LAYOUT, rank)}) == 1
