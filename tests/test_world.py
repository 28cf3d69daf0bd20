"""How groups on GPUs are made, seen without one: by what torch is asked for."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from weft import private
from weft.comm import world
from weft.errors import DeclarationError

LIMIT = datetime.timedelta(seconds=7)


class Forgetful(dict):
    """Meshes of another world: none is used again."""

    def get(self, *_):
        return object(), None


@pytest.fixture
def asked(monkeypatch):
    """What torch was asked for, by the name of its function."""
    found = {}

    def note(name: str):
        return lambda *args, **named: found.setdefault(name, (args, named))

    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(is_high_priority_stream=False))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", note("group"))
    monkeypatch.setattr(torch.cuda, "set_device", note("device"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(world, "init_device_mesh", note("mesh"))
    monkeypatch.setattr(world, "is_fake", lambda group: False)
    monkeypatch.setattr(world, "_meshes", Forgetful())
    monkeypatch.setattr(world.atexit, "register", lambda fn: None)
    for name in ("RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    return found


def test_a_process_that_sees_one_gpu_takes_it_and_connects_at_once(asked) -> None:
    world.init_process_group("cuda", LIMIT)
    assert asked["device"][0] == (torch.device("cuda", 0),)
    named = asked["group"][1]
    assert named["device_id"] == torch.device("cuda", 0)
    assert named["timeout"] == LIMIT
    assert named["pg_options"].is_high_priority_stream


def test_every_mesh_dim_has_a_group_with_our_limit_on_a_stream_of_high_priority(asked) -> None:
    world.world_mesh("cuda", {"ring": 8}, LIMIT)
    own = asked["mesh"][1]["backend_override"]
    assert list(own) == ["ring"]
    backend, options = own["ring"]
    assert backend == "nccl"
    assert (options.is_high_priority_stream, options._timeout) == (True, LIMIT)


def test_groups_on_cpus_are_torchs_own(asked) -> None:
    world.init_process_group("cpu", LIMIT)
    world.world_mesh("cpu", {"ring": 8}, LIMIT)
    assert asked["mesh"][1]["backend_override"] is None
    assert "device" not in asked
    assert "device_id" not in asked["group"][1]


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(DeclarationError, match="process 3 of this node sees 2 GPUs"):
        world.gpu_of({"LOCAL_RANK": "3"}, 2)


def test_options_of_nccl_where_torch_has_it(monkeypatch) -> None:
    nccl = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    options = private.nccl_options(LIMIT)
    assert (options.is_high_priority_stream, options._timeout) == (True, LIMIT)
