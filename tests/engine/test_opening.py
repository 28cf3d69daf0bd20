"""Links, pipes and devices where weft reads and writes files, in folders that others can change."""

import faulthandler
import os
import socket
from pathlib import Path

import pytest
from torch import nn

import weft
from benchmarks.fuzz import run_command
from weft._opening import PARTIAL, open_to_lock, open_to_read, read_bytes, replacing
from weft.checkpoint import CheckpointError, Checkpoints
from weft.checkpoint.folder import INDEX
from weft.inspect.picture import writing
from weft_models.models import compose, from_pretrained, save_pretrained

LIMIT = 60


@pytest.fixture(autouse=True)
def _in_time():
    """A pipe that is waited for ends the test, and not the night."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def odd_files(folder: Path) -> dict[str, Path]:
    """Every kind of thing that a name can have besides a regular file."""
    folder.mkdir(exist_ok=True)
    (folder / "precious").write_text("precious")
    names = ("link", "dangling", "pipe", "folder", "device", "socket")
    paths = {name: folder / name for name in names}
    paths["link"].symlink_to("precious")
    paths["dangling"].symlink_to("nowhere")
    os.mkfifo(paths["pipe"])
    paths["folder"].mkdir()
    paths["device"] = Path("/dev/zero")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(paths["socket"]))
    return paths


ODD = ("link", "dangling", "pipe", "folder", "device", "socket")


@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_opened(kind, tmp_path):
    path = odd_files(tmp_path)[kind]
    for opens in (open_to_read, open_to_lock):
        with pytest.raises(OSError, match=r"a link|no regular file|Is a directory"):
            opens(path)
    with pytest.raises(OSError, match=r"a link|no regular file"), replacing(path) as partial:
        partial.write_text("other")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_link_that_the_user_names_is_read(tmp_path):
    assert read_bytes(odd_files(tmp_path)["link"], 8, links=True) == b"precious"


def test_a_file_of_30_gigabytes_is_refused_unread(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(30 << 30)
    with pytest.raises(OSError, match="larger than 1,000 bytes"):
        read_bytes(path, 1000)


def test_a_lock_keeps_the_content_of_its_file(tmp_path):
    path = tmp_path / "lock"
    path.write_text("precious")
    open_to_lock(path).close()
    assert path.read_text() == "precious"


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def stop() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stop()
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"
    with replacing(path, synced=True) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    with pytest.raises(OSError, match="is not overwritten"), replacing(path, new=True):
        pass


def test_a_new_file_takes_no_name_that_appeared_meanwhile(tmp_path):
    path = tmp_path / "a.toml"

    def write() -> None:
        with replacing(path, new=True) as partial:
            partial.write_text("mine")
            path.write_text("theirs")

    with pytest.raises(OSError, match="exists"):
        write()
    assert path.read_text() == "theirs"


def test_pictures_and_traces_are_not_written_through_links(tmp_path):
    path = odd_files(tmp_path)["link"].rename(tmp_path / "link.json")
    with pytest.raises(weft.WeftError, match="cannot be written: it is a link"), writing(path):
        pass
    kind, text = run_command(
        ["check", "ring-2", "--threads", "--length", "8", "--trace", str(path)]
    )
    assert kind == "refused"
    assert "a link" in text
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("command", ["plan", "rates"])
@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
def test_written_declarations_replace_nothing(kind, command, tmp_path):
    path = tmp_path / "plan.toml"
    kept = tmp_path / "kept.toml"
    if kind == "file":
        path.write_text("precious")
    else:
        path.symlink_to(kept)
    if kind == "link":
        kept.write_text("precious")
    words = {
        "plan": ["plan", "call", "--devices", "2", "--hardware", "h100-8", "--tokens", "64"],
        "rates": ["rates", "ring-2"],
    }[command]
    outcome, text = run_command([*words, "--write", str(path)])
    assert outcome == "refused"
    assert "exists, and is not overwritten" in text
    assert kind == "dangling" or (path.read_text() == "precious")
    assert kept.exists() == (kind == "link")


# -- checkpoints, caches and weights ---------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A run with the checkpoint of one step, and a folder elsewhere of somebody's files."""
    folder = tmp_path / "run"
    model = nn.Linear(3, 2)
    Checkpoints(folder, weft.Layout.single()).save(1, model)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("precious", INDEX, "rank-00000-aa.safetensors"):
        (elsewhere / name).write_text("precious")
    return Checkpoints(folder, weft.Layout.single()), model, elsewhere


def untouched(elsewhere: Path) -> bool:
    return {p.name: p.read_text() for p in elsewhere.iterdir()} == dict.fromkeys(
        ("precious", INDEX, "rank-00000-aa.safetensors"), "precious"
    )


@pytest.mark.parametrize("name", [".lock", f"step-000002/{INDEX}", f"step-000002/{INDEX}.tmp"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_odd_names_in_a_run_reach_no_file_elsewhere(kind, name, run):
    checkpoints, model, elsewhere = run
    path = checkpoints.folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(elsewhere / "precious")
    else:
        os.mkfifo(path)
    if name.endswith(".tmp"):  # a name that no writer uses
        assert checkpoints.save(2, model).name == "step-000002"
    else:
        with pytest.raises(CheckpointError, match=r"a link|no regular file"):
            checkpoints.save(2, model)
    assert untouched(elsewhere)


def test_step_that_is_a_link_is_neither_written_nor_read(run):
    checkpoints, model, elsewhere = run
    (checkpoints.folder / "step-000002").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"step-000002 cannot be made: it is a link"):
        checkpoints.save(2, model)
    with pytest.warns(UserWarning, match=r"step-000002 cannot be read: it is a link"):
        assert checkpoints.load(model).step == 1
    assert untouched(elsewhere)


@pytest.mark.parametrize("kind", ["link", "pipe", "hole"])
@pytest.mark.parametrize("name", [INDEX, "rank-*"])
def test_files_of_a_checkpoint_that_are_no_files_are_refused(name, kind, run, tmp_path):
    checkpoints, model, _ = run
    path = next((checkpoints.folder / "step-000001").glob(name))
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "copy").write_bytes(content)
        path.symlink_to(tmp_path / "copy")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(30 << 30)
    words = "it is a link|no regular file|larger than|has 32212254720 bytes"
    with pytest.raises(CheckpointError, match=words):
        checkpoints.load(model)


def test_what_a_killed_save_left_is_removed(run):
    checkpoints, model, _ = run
    step = checkpoints.folder / "step-000001"
    for name in (f"{PARTIAL}0123.safetensors", "rank-00000-00aa00aa.safetensors"):
        (step / name).write_text("half")
    (step / "rank-00001-0a.safetensors").mkdir()  # no file, and none of ours
    checkpoints.save(1, model)
    names = sorted(p.name for p in step.iterdir() if p.is_file())
    assert (len(names), names[0]) == (2, INDEX)


def test_weights_reach_no_file_elsewhere(tmp_path):
    model = compose("tabular")
    (tmp_path / "precious").write_text("precious")
    weights = tmp_path / "w.safetensors"
    weights.symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="it is a link"):
        save_pretrained(model, weights)
    assert (tmp_path / "precious").read_text() == "precious"


def test_weights_behind_a_users_link_are_read(tmp_path):
    model = compose("tabular")
    save_pretrained(model, tmp_path / "blob")
    (tmp_path / "w.safetensors").symlink_to("blob")
    assert from_pretrained(tmp_path / "w.safetensors").spec == model.spec


@pytest.mark.parametrize("kind", ["declaration", "run file", "configuration"])
def test_a_pipe_that_is_named_is_not_waited_for(kind, tmp_path):
    path = tmp_path / "pipe.toml"
    os.mkfifo(path)
    words = {
        "declaration": ["explain", "call", str(path)],
        "run file": ["train", "--config", str(path)],
        "configuration": ["verify", "LlamaForCausalLM", str(path), "ring-2"],
    }[kind]
    outcome, text = run_command(words)
    assert outcome == "refused", text
    assert "no regular file" in text or "there is no file" in text
