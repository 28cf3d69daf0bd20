"""How groups on GPUs are made, seen without one: by what torch is asked for."""

from __future__ import annotations

import ast
import datetime
import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from weft import _torch as private
from weft import layout
from weft.comm import ProcessTransport, Shuffle, Transport, world
from weft.comm.consistency import compare_weights
from weft.errors import DeclarationError, ShapeError

LIMIT = datetime.timedelta(seconds=7)


def nccl() -> SimpleNamespace:
    """NCCL's process group, or one whose options have what torch declares of them, and no more."""
    if dist.is_nccl_available():
        return dist.ProcessGroupNCCL
    page = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
    classes = {n.name: n for n in ast.parse(page.read_text()).body if isinstance(n, ast.ClassDef)}
    names: set[str] = set()
    for owner in ("Backend", "ProcessGroupNCCL"):
        (options,) = (n for n in classes[owner].body if getattr(n, "name", "") == "Options")
        names |= {n.target.id for n in options.body if isinstance(n, ast.AnnAssign)}
        names |= {n.name for n in options.body if isinstance(n, ast.FunctionDef)}
    return SimpleNamespace(Options=type("Options", (), {"__slots__": sorted(names - {"__init__"})}))


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

    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl(), raising=False)
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    return found


def test_a_process_that_sees_one_gpu_takes_it(asked) -> None:
    world.init_process_group("cuda", LIMIT)
    assert asked["device"][0] == (torch.device("cuda", 0),)
    named = asked["group"][1]
    assert named["device_id"] == torch.device("cuda", 0)
    assert named["timeout"] == LIMIT
    assert named["pg_options"].is_high_priority_stream


def test_every_mesh_dim_has_a_group_with_the_limit(asked) -> None:
    world.world_mesh("cuda", {"ring": 8}, LIMIT)
    own = asked["mesh"][1]["backend_override"]
    assert list(own) == ["ring"]
    backend, options = own["ring"]
    assert backend == "nccl"
    assert (options.is_high_priority_stream, options._timeout) == (True, LIMIT)


def _builds() -> None:
    with pytest.MonkeyPatch.context() as patched, private.fake_ranks(0, 8):
        patched.setattr(dist, "ProcessGroupNCCL", nccl(), raising=False)
        patched.setattr(world, "is_fake", lambda group: False)
        patched.setattr(world, "_meshes", {})
        patched.setattr(world, "init_device_mesh", lambda *_, **named: SimpleNamespace(**named))
        later = LIMIT * 2
        first, again, other = (
            world.world_mesh("cuda", {"ring": 8}, limit) for limit in (LIMIT, LIMIT, later)
        )
        assert again is first
        limits = [mesh.backend_override["ring"][1]._timeout for mesh in (first, other)]
        assert limits == [LIMIT, later]
        on_cpu = [world.world_mesh("cpu", {"ring": 8}, limit) for limit in (LIMIT, later)]
        assert on_cpu[0] is on_cpu[1]  # their waits have limits of their own


def test_builds_of_one_mesh_share_groups_of_equal_limits(apart) -> None:
    apart(_builds)


def _limits() -> dict[str, str]:
    texts: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patched, private.fake_ranks(0, 2):
        patched.setattr(layout, "is_fake", lambda group: False)
        patched.setattr(
            layout, "compare_over_world", lambda what, text, limit: texts.setdefault(place, text)
        )
        patched.setattr(layout, "init_process_group", lambda *_: None)
        patched.setattr(layout, "world_mesh", lambda *_: None)
        patched.setattr(layout.Layout, "_bound_to", lambda *_: None)
        for place in ("cpu", "cuda"):
            layout.Layout.parse("tokens: ring=2").build(place, timeout=7)
    return texts


def test_limits_that_differ_between_ranks_on_gpus_refused_before_groups(apart) -> None:
    texts = apart(_limits)
    assert texts["cuda"] == f"{texts['cpu']}, timeout 7 s"


class OnGpus(ProcessTransport):
    """One of two ranks of a layout on GPUs, which nobody waits for."""

    def __init__(self) -> None:
        Transport.__init__(self, {"ring": 2}, 0)
        self.fake, self.title, self._on_gpu, self._gpu_only = False, "mine", True, True

    def _all_gather_text(self, text: str, mesh_dims: tuple[str, ...]) -> dict[int, str]:
        return {0: text, 1: text}

    def _vote(self, mesh_dims: tuple[str, ...], digest: int, name: int):
        return lambda: True

    def next_pass(self, mesh_dims: tuple[str, ...]) -> int:
        return 0

    def note_call(self, *_) -> None: ...


@pytest.mark.parametrize("call", ["gather", "weights", "shuffle"])
def test_what_lies_on_cpu_refused_here_and_blamed_on_nobody(call) -> None:
    mine, x = OnGpus(), torch.ones(4)
    calls = {
        "gather": lambda: layout.Layout.parse("tokens: ring=2").on(mine).gather(x, {"tokens": 0}),
        "weights": lambda: compare_weights({"w": torch.nn.Parameter(x)}, ["ring"], mine),
        "shuffle": lambda: mine.all_to_all(Shuffle("ring", "q", x, (2, 2), (2, 2))),
    }
    with pytest.raises(ShapeError, match=r"on cpu, but layout 'mine' is on GPUs.*build..cpu.."):
        calls[call]()


def test_groups_on_cpus_are_torchs_own(asked) -> None:
    world.init_process_group("cpu", LIMIT)
    world.world_mesh("cpu", {"ring": 8}, LIMIT)
    assert asked["mesh"][1]["backend_override"] is None
    assert "device" not in asked
    assert "device_id" not in asked["group"][1]


@pytest.mark.parametrize("count", [1, 2])
def test_more_processes_than_gpus_are_refused(count) -> None:
    with pytest.raises(DeclarationError, match=rf"process 3 .* one of 4 .* sees {count} GPU"):
        world.gpu_of({"LOCAL_RANK": "3"}, count)
    with pytest.raises(DeclarationError, match=rf"process 0 .* one of 4 .* sees {count} GPU"):
        world.gpu_of({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, count)


@pytest.mark.parametrize("gpus", ["aabc", "abab", "aaaa", "abcd"])
def test_ranks_that_share_gpu_refused_by_name_on_every_rank(gpus: str) -> None:
    """As where CUDA_VISIBLE_DEVICES=0 is set for all processes of a node."""
    store = dist.HashStore()
    store.set_timeout(LIMIT)

    def rank(number: int) -> str:
        try:
            world.refuse_shared_gpu(store, number, 4, f"host/{gpus[number]}")
        except DeclarationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):  # a process may end torch and start it again
            said = {*pool.map(rank, range(4))}
            if len({*gpus}) == 4:
                assert said == {""}
                continue
            (text,) = said
            sharing = [r for r in range(4) if f"one GPU, host/{gpus[r]}, " in text]
            assert f"ranks {sharing} share one GPU" in text
            assert "CUDA_VISIBLE_DEVICES" in text


def test_a_process_alone_on_its_node_takes_its_gpu() -> None:
    assert world.gpu_of({}, 1) == world.gpu_of({"LOCAL_RANK": "0"}, 2) == 0
    assert world.gpu_of({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 2) == 1


def test_options_of_nccl_are_those_that_torch_declares(monkeypatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl(), raising=False)
    options = private.nccl_options(LIMIT)
    assert (options.is_high_priority_stream, options._timeout) == (True, LIMIT)
    if not dist.is_nccl_available():
        with pytest.raises(AttributeError):
            options.is_high_priority = True


def _splits() -> list[tuple]:
    """What torch's `split_group` is given where the world has connected at once, as on GPUs."""
    given, signature = [], inspect.signature(dist.split_group)
    with pytest.MonkeyPatch.context() as patched, private.fake_ranks(5, 8):
        default = dist.group.WORLD

        def split(*args, **named):
            bound = signature.bind(*args, **named).arguments
            options = bound["pg_options"]
            given.append(
                (
                    bound["parent_pg"] is default,
                    bound["split_ranks"],
                    bound["timeout"] == options._timeout == LIMIT,
                    options.is_high_priority_stream,
                )
            )
            return default

        patched.setattr(dist, "ProcessGroupNCCL", nccl(), raising=False)
        patched.setattr(world, "is_fake", lambda group: False)
        patched.setattr(world, "_meshes", {})
        patched.setattr(device_mesh, "split_group", split)
        patched.setattr(torch.accelerator, "is_available", lambda: True)
        patched.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        backend = SimpleNamespace(name=lambda: "nccl")
        stand_in = SimpleNamespace(bound_device_id=torch.device("cuda", 0))
        stand_in._get_backend = lambda device: backend
        patched.setattr(device_mesh, "_get_default_group", lambda: stand_in)
        default = stand_in
        stand_in.group_name = dist.group.WORLD.group_name
        world.world_mesh("cuda", {"row": 2, "col": 4}, LIMIT)
    return given


def test_groups_are_split_off_world_with_our_limit_and_priority(apart) -> None:
    rows = [[0, 4], [1, 5], [2, 6], [3, 7]]
    columns = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert apart(_splits) == [(True, ranks, True, True) for ranks in (rows, columns)]
