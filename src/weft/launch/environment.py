"""The rank and world of this process, from the variables of torchrun or SLURM."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import DeclarationError, shown


@dataclass(frozen=True)
class Place:
    """This process's rank and the number of ranks, as torchrun or SLURM set them."""

    rank: int
    world_size: int
    local_rank: int
    launcher: str


def number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    """A launcher's variable as a number; `otherwise` where it is not set, or empty.

    >>> number({"RANK": "3"}, "RANK", 0), number({}, "LOCAL_RANK", 3)
    (3, 3)
    """
    text = environ.get(name) or str(otherwise)
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise DeclarationError(
            f"the environment has {name}={shown(text)}, and a launcher sets it to a number; start"
            " ranks with torchrun or srun, or unset it"
        )
    return int(text)


#: Seconds that any wait for another rank may last.
LIMIT = 300.0
#: Environment variable with another limit, in seconds.
TIMEOUT = "WEFT_TIMEOUT"
#: Environment variable that names the file in which ranks of one machine meet, of weft's launcher.
STORE = "WEFT_STORE"


def wait_limit(timeout: float | None = None, environ: Mapping[str, str] | None = None) -> float:
    """Seconds that a wait may last: as an argument says, else the environment, else `LIMIT`.

    >>> wait_limit(environ={}), wait_limit(environ={"WEFT_TIMEOUT": "1800"}), wait_limit(20)
    (300.0, 1800.0, 20.0)
    """
    env = os.environ if environ is None else environ
    given = (env.get(TIMEOUT) or LIMIT) if timeout is None else timeout
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0.0 < seconds < 1e9:
        name = TIMEOUT if timeout is None else "timeout"
        raise DeclarationError(
            f"{name}={shown(str(given))}: give the seconds that a wait for another rank may last,"
            " a number above 0"
        )
    return seconds


def already_launched(environ: Mapping[str, str] | None = None) -> Place | None:
    """This process's place if torchrun or SLURM started it as one of several ranks, else None.

    SLURM_NTASKS does not tell: a batch script and an interactive shell see it too, though no step
    of srun has started their other tasks.

    >>> already_launched({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).rank
    1
    >>> already_launched({}) is None
    True
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = number(env, "RANK", 0)
        return _placed(rank, number(env, "WORLD_SIZE", 1), number(env, "LOCAL_RANK", rank))
    tasks = number(env, "SLURM_STEP_NUM_TASKS", 1)
    if "SLURM_PROCID" in env and tasks > 1:
        place = number(env, "SLURM_PROCID", 0), tasks, number(env, "SLURM_LOCALID", 0)
        return _placed(*place, launcher="slurm")
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if "SLURM_PROCID" not in env and number(env, name, 1) > 1:
            raise DeclarationError(
                f"mpirun started {env[name]} processes ({name}), and each would be a world of its"
                " own: start them with torchrun or srun, or set RANK, WORLD_SIZE, LOCAL_RANK,"
                " MASTER_ADDR and MASTER_PORT in each"
            )
    return None


def _placed(rank: int, world_size: int, local_rank: int, launcher: str = "torchrun") -> Place:
    if rank >= world_size:
        raise DeclarationError(
            f"the environment has rank {rank} in a world of {world_size} ranks, which are counted"
            " from 0; start ranks with torchrun or srun"
        )
    return Place(rank, world_size, local_rank, launcher)


def tell_torch() -> None:
    """Sets torch's variables where srun started this process as one of several ranks."""
    place = already_launched()
    if place is not None and place.launcher == "slurm":
        os.environ.update(slurm_variables(os.environ))


def restarted(environ: Mapping[str, str] | None = None) -> bool:
    """True if a launcher started this rank again: torchrun after a failure, SLURM after a requeue.

    >>> restarted({"TORCHELASTIC_RESTART_COUNT": "1"}), restarted({})
    (True, False)
    """
    env = os.environ if environ is None else environ
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(number(env, name, 0) > 0 for name in counts)


def launch_id(environ: Mapping[str, str] | None = None) -> str | None:
    """The name of a launch, the same in all its restarts: torchrun's `--rdzv-id`, if it has one.

    >>> launch_id({"TORCHELASTIC_RUN_ID": "job-7"}), launch_id({"TORCHELASTIC_RUN_ID": "none"})
    ('job-7', None)
    """
    env = os.environ if environ is None else environ
    name = env.get("TORCHELASTIC_RUN_ID", "")
    return name if name not in ("", "none") else None  # torchrun's default is "none"


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """torch's variables from SLURM's; those that are set already stay.

    Steps of a job may run at a time: the first host of the step is the master, and the port is made
    from the numbers of the job and the step.

    >>> slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
    >>> slurm |= {"SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_STEP_NODELIST": "gpu[08-09]"}
    >>> slurm_variables(slurm)["MASTER_ADDR"]
    'gpu08'
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "localhost")
    job, step = (number(environ, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": str(_port(job, step)),
    }
    return {name: value for name, value in variables.items() if name not in environ}


def _port(job: int, step: int) -> int:
    """A port from 20000 to 31999, below those that Linux gives out itself (32768 and up).

    Steps of a job differ; jobs of adjacent numbers get distant ports for their later steps.

    >>> [_port(71234, step) for step in (0, 1)], _port(71235, 0)
    ([26578, 26579], 21995)
    """
    return 20000 + (7417 * job + step) % 12000


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list.

    >>> [first_host(x) for x in ("a,b", "gpu[07-09,12]", "rack1-[3,5]-ib", "solo")]
    ['a', 'gpu07', 'rack1-3-ib', 'solo']
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist.strip())
    first = match.group() if match else ""
    return re.sub(r"\[([^\]]*)\]", lambda m: re.split(r"[-,]", m.group(1))[0], first)


def ranks_here(ranks: int, environ: Mapping[str, str] | None = None) -> int:
    """The number of `ranks` on this machine, as its launcher says; without a launcher all.

    >>> ranks_here(16, {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
    8
    >>> step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "16"}
    >>> ranks_here(16, step | {"SLURM_TASKS_PER_NODE": "4(x4)"})
    4
    >>> ranks_here(4, {})
    4
    """
    env = os.environ if environ is None else environ
    if already_launched(env) is None:
        return ranks
    if env.get("LOCAL_WORLD_SIZE"):
        return number(env, "LOCAL_WORLD_SIZE", ranks)
    name = "SLURM_TASKS_PER_NODE"
    counts = (env.get(name) or str(ranks)).split(",")
    return max(number({name: part.split("(")[0]}, name, ranks) for part in counts)


def shown_one_gpu_each(ranks: int, environ: Mapping[str, str] | None = None) -> bool:
    """True if srun shows each of `ranks` tasks on this node another GPU, if each sees one.

    Each may see its own as number 0, so SLURM's count for the node tells whether there are several.

    >>> step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "CUDA_VISIBLE_DEVICES": "0"}
    >>> shown_one_gpu_each(4, step | {"SLURM_GPUS_ON_NODE": "4"})
    True
    >>> shown_one_gpu_each(4, step | {"SLURM_GPUS_ON_NODE": "1"}), shown_one_gpu_each(4, {})
    (False, False)
    """
    env = os.environ if environ is None else environ
    place = already_launched(env)
    if place is None or place.launcher != "slurm" or "CUDA_VISIBLE_DEVICES" not in env:
        return False
    return number(env, "SLURM_GPUS_ON_NODE", ranks) >= ranks
