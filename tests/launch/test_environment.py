"""Variables of launchers: read as numbers, refused in words, and a store that nobody reaches."""

import datetime
import socket

import pytest

from weft.comm import world
from weft.errors import DeclarationError, RankError
from weft.launch.environment import already_launched, ranks_here, restarted, slurm_variables

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
#: `ranks_here` asks for the place first.
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}


@pytest.mark.few(12)
@pytest.mark.parametrize("value", ["abc", "-1", "1.0", "0x1", "1 2", "9" * 5000, "²", "\x1b[2J"])
@pytest.mark.parametrize("name", [*TORCHRUN, *SLURM])
def test_variables_that_are_no_numbers_are_refused_by_name(name, value):
    environ = (TORCHRUN if name in TORCHRUN else SLURM) | {name: value}
    with pytest.raises(DeclarationError, match=f"the environment has {name}=.*to a number"):
        ranks_here(4, environ)


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_counts_of_restarts_are_numbers(name):
    with pytest.raises(DeclarationError, match=f"{name}='x'"):
        restarted({name: "x"})
    with pytest.raises(DeclarationError, match="SLURM_JOB_ID='x'"):
        slurm_variables(SLURM | {"SLURM_JOB_ID": "x"})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_are_no_worlds_of_one(name):
    assert already_launched({name: "1"}) is None
    with pytest.raises(DeclarationError, match=f"mpirun started 4 processes .{name}."):
        already_launched({name: "4"})


@pytest.mark.parametrize("environ", [TORCHRUN | {"RANK": "4"}, SLURM | {"SLURM_PROCID": "9"}])
def test_a_rank_beyond_its_world_is_refused(environ):
    with pytest.raises(DeclarationError, match=r"rank [49] in a world of 4 ranks"):
        already_launched(environ)


@pytest.mark.parametrize("kept_by", ["rank 0", "a launcher", "nobody"])
def test_a_store_that_nobody_reaches_is_named(kept_by, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = str(closed.getsockname()[1])
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environ["TORCHELASTIC_USE_AGENT_STORE"] = str(kept_by == "a launcher")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if kept_by == "nobody":
        monkeypatch.delenv("MASTER_ADDR")
    where = f"{'[?]' if kept_by == 'nobody' else '127.0.0.1'}:{port}"
    with pytest.raises(RankError, match=f"rank 1 cannot reach the store .* at {where} .* 1 s: "):
        world._announced(datetime.timedelta(seconds=1))
