"""Which rank this process is and where ranks meet: from torchrun, srun, our own launch, or none of these.

torchrun's variables win over Slurm's, because torchrun is also run inside a Slurm step. A Slurm job's script, an
allocation's shell and a step of one task are not ranks: there `trainer train` starts its own.
"""

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Literal

from syncd.errors import ConfigError

Origin = Literal["alone", "trainer", "torchrun", "slurm"]

STARTED_BY = "TRAINER_STARTED_BY"
"""Environment variable that tells ranks started by `trainer train` from those of torchrun."""

LISTENING = "TRAINER_LISTENING_FD"
"""Environment variable of rank 0: the descriptor of the socket where ranks meet."""

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_VARIABLES = (*_TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
"""What torch reads, in the order of the fields of `RankEnv`."""

_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
)
_OLDER_NAMES = {
    "SLURM_JOB_ID": "SLURM_JOBID",
    "SLURM_STEP_NUM_TASKS": "SLURM_NTASKS",
    "SLURM_STEP_TASKS_PER_NODE": "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST": "SLURM_JOB_NODELIST",
}

_FIRST_PORT, _PORTS = 10240, 20000
"""Ports of Slurm steps end below those that the kernel gives to outgoing connections."""

_STRIDE = 7919  # a prime: neighbouring jobs are far apart, neighbouring steps side by side

_MAX_PORT = 65535
_REAL_STEPS = 1 << 31  # Slurm numbers batch scripts, interactive shells and its own helpers from above this

_RANGE = r"\d+(?:-\d+)?"
_NUMBERS = rf"\[{_RANGE}(?:,{_RANGE})*\]"
_ITEM = rf"(?:[^,\[\]]|{_NUMBERS})+"
_LIST = re.compile(rf"({_ITEM})(?:,{_ITEM})*", re.ASCII)
_FIRST_NUMBER = re.compile(r"\[(\d+)[^\]]*\]", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


@dataclass(frozen=True)
class RankEnv:
    rank: int = 0  # from 0; rank 0 decides
    local_rank: int = 0  # from 0 on this machine; the GPU it takes
    world_size: int = 1  # how many ranks there are
    local_world_size: int = 1  # how many of them are on this machine
    master_addr: str = ""  # host of rank 0, where ranks meet; empty when alone
    master_port: int = 0  # port there; 0 when alone
    origin: Origin = "alone"  # who started this process

    def variables(self) -> dict[str, str]:
        values = astuple(self)[: len(_VARIABLES)]
        return {name: str(value) for name, value in zip(_VARIABLES, values, strict=True)}


def read_rank_env(environ: Mapping[str, str]) -> RankEnv:
    if any(environ.get(name) for name in _TORCHRUN):
        return _checked(_from_torchrun(environ))
    if _is_task(environ):
        return _checked(_from_slurm(environ))
    return RankEnv()


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list, which runs rank 0: of `n[08-10,2],x` it is n08."""
    match = _LIST.fullmatch(nodelist)
    if match is None:
        raise ConfigError(
            f"not a Slurm node list: {nodelist!r}", hint="set MASTER_ADDR to the host of rank 0"
        )
    return _FIRST_NUMBER.sub(r"\1", match[1])


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node of a step: `4(x2),3` is 4, 4, 3."""
    matches = [_TASKS.fullmatch(item) for item in text.split(",")]
    if not all(matches):
        raise ConfigError(
            f"not a list of tasks per node: {text!r}", hint="torchrun can start the ranks instead"
        )
    return [int(match[1]) for match in matches if match for _ in range(int(match[2] or 1))]


def _from_torchrun(environ: Mapping[str, str]) -> RankEnv:
    ours = environ.get(STARTED_BY) == "trainer"
    hint = f"torchrun sets them all; to start alone: unset {' '.join(_TORCHRUN)}"
    _require(environ, _VARIABLES, hint)
    rank, local_rank, world_size, local_world_size = (_integer(environ, name) for name in _TORCHRUN)
    return RankEnv(
        rank,
        local_rank,
        world_size,
        local_world_size,
        master_addr=environ["MASTER_ADDR"],
        master_port=_port(environ),
        origin="trainer" if ours else "torchrun",
    )


def _is_task(environ: Mapping[str, str]) -> bool:
    """Return whether this is one of several tasks of a Slurm step."""
    if not environ.get("SLURM_STEP_ID") or _integer(environ, "SLURM_STEP_ID") >= _REAL_STEPS:
        return False
    tasks = _current_names(environ).get("SLURM_STEP_NUM_TASKS", "1")
    return tasks != "1"


def _from_slurm(environ: Mapping[str, str]) -> RankEnv:
    variables = _current_names(environ)
    _require(variables, _SLURM, "srun sets them all; torchrun can start the ranks instead")
    tasks, node = tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"]), _integer(variables, "SLURM_NODEID")
    if node >= len(tasks):
        raise ConfigError(f"SLURM_NODEID is {node}, of {len(tasks)} nodes in SLURM_STEP_TASKS_PER_NODE")
    job, step = _integer(variables, "SLURM_JOB_ID"), _integer(variables, "SLURM_STEP_ID")
    return RankEnv(
        rank=_integer(variables, "SLURM_PROCID"),
        local_rank=_integer(variables, "SLURM_LOCALID"),
        world_size=_integer(variables, "SLURM_STEP_NUM_TASKS"),
        local_world_size=tasks[node],
        master_addr=variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"]),
        master_port=_port(variables)
        if variables.get("MASTER_PORT")
        else _FIRST_PORT + (job * _STRIDE + step) % _PORTS,
        origin="slurm",
    )


def _current_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with Slurm's current names filled in from those of older versions."""
    return {name: environ[old] for name, old in _OLDER_NAMES.items() if environ.get(old)} | {
        name: value for name, value in environ.items() if value
    }


def _require(environ: Mapping[str, str], names: tuple[str, ...], hint: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = [name for name in names if environ.get(name)]
        raise ConfigError(f"{', '.join(there)} set, but not {', '.join(missing)}", hint=hint)


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r}, not a number")
    return int(text)


def _port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT")
    if not 0 < port <= _MAX_PORT:
        raise ConfigError(
            f"MASTER_PORT is {port}, not a port", hint="MASTER_PORT=<any free port of the host of rank 0>"
        )
    return port


def _checked(rank_env: RankEnv) -> RankEnv:
    ranks = rank_env.rank < rank_env.world_size and rank_env.local_rank < rank_env.local_world_size
    if not ranks or rank_env.local_world_size > rank_env.world_size:
        shown = ", ".join(f"{name}={value}" for name, value in list(rank_env.variables().items())[:4])
        raise ConfigError(f"no rank can be {shown}", hint="ranks count from 0")
    return rank_env
