"""The names and paths of a job: the one module that knows what its files are called.

A `Job` is the directory that all hosts share. What the daemon and the explorers write lies below its state
directory, `JOB/.syncd` unless the job directory is not theirs to write (`--state-dir`).
"""

import functools
import os
import re
from dataclasses import dataclass, field
from typing import Literal

from syncd.errors import ConfigError, CorruptDataError, UsageError
from syncd.protocol.disk import MISSING, Disk, is_below
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.mount import mount_of_resolved
from syncd.protocol.permissions import UMASK, Modes, modes_in, parse_config

MARKER = "latest_state_dict_iteration.txt"
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
FULL_CHECKPOINT = ".full_checkpoint"
ACTOR = "actor"
SHORTCUT = "delta"
RECEIPTS = ".receipts"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
STATE = ".syncd"
OWNER = "job.json"
CONFIG = "config.toml"
STEP_PREFIX = "global_step_"

MAX_STEP = 10**15
"""Beyond any run and below 2**53, so that a step is exact in every JSON reader."""

_CONFIG_LIMIT = 1 << 20  # the largest configuration that is read, in bytes

_PATH_LIMIT = 1024
_NAME_LIMIT = 255  # what file systems take, in bytes: no name in a document may make a look at it fail

_STEP = re.compile(rf"{STEP_PREFIX}(0|[1-9][0-9]{{0,15}})", re.ASCII)
_IDENTITY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)
_ATTEMPT = re.compile(rf"\.({STEP_PREFIX}[0-9]+)\.({_IDENTITY.pattern})", re.ASCII)


def step_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"{STEP_PREFIX}{step}"


def parse_step_name(name: str) -> int | None:
    """Return the step of a directory name, None for any name that is not exactly one."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step <= MAX_STEP else None


def attempt_name(step: int, attempt: str) -> str:
    """Return the directory name of one attempt to write a step. Tools that look for steps pass over it."""
    return f".{step_name(step)}.{attempt}"


def parse_attempt_name(name: str) -> int | None:
    """Return the step that an attempt's directory is to become, None for any name that is not an attempt's."""
    match = _ATTEMPT.fullmatch(name)
    return parse_step_name(match[1]) if match else None


def shard_name(writer: int, world_size: int) -> str:
    """Return the Hugging Face name of a writer's shard; writers count from 1."""
    return f"model-{writer:05d}-of-{world_size:05d}.safetensors"


def delta_name(writer: int, world_size: int) -> str:
    """Return the name of a writer's container of changes; writers count from 1."""
    return f"delta-{writer:05d}-of-{world_size:05d}.safetensors"


def receipt_name(writer: int, world_size: int) -> str:
    """Return the name of a writer's receipt; writers count from 1."""
    return f"{writer:05d}-of-{world_size:05d}.json"


def is_identity(name: str) -> bool:
    """Return whether a name may identify an explorer, a trainer or a group in a file name."""
    return _IDENTITY.fullmatch(name) is not None


def check_identity(name: str) -> str:
    """Return the name.

    Raises:
        UsageError: It could not be a file name everywhere.
    """
    if not is_identity(name):
        raise UsageError(
            f"not a usable identity: {name[:120]!r}",
            hint="letters, digits, '.', '_' and '-', 100 at most, none of '.' and '-' first",
        )
    return name


class JobPath:
    """The path of one file or directory of each job.

    Args:
        base: What it lies in: the `root` of the job, or its `state`.
        name: Its name there.
    """

    def __init__(self, base: Literal["root", "state"], name: str) -> None:
        self._base, self._name = base, name

    def __get__(self, job: "Job", kind: type["Job"]) -> str:
        return f"{getattr(job, self._base)}/{self._name}"


@dataclass(frozen=True)
class Job:
    """One training run's directory.

    Args:
        root: Absolute path of the job directory.
        state: Absolute path of the state directory.
        disk: The file system below both.
    """

    root: str
    state: str
    disk: Disk = field(default_factory=LocalDisk, compare=False, repr=False)

    @staticmethod
    def at(
        root: str | os.PathLike[str], state: str | os.PathLike[str] | None = None, disk: Disk | None = None
    ) -> "Job":
        """Return the job at a path, with links in the path itself resolved once and for all."""
        resolved = os.path.realpath(root)
        where = os.path.realpath(state) if state is not None else f"{resolved}/{STATE}"
        return Job(resolved, where, disk if disk is not None else job_disk(resolved, where))

    def step(self, step: int) -> str:
        """Return the path of a step's directory."""
        return f"{self.root}/{step_name(step)}"

    def attempt(self, step: int, attempt: str) -> str:
        """Return the path of the directory in which one attempt writes a step."""
        return f"{self.root}/{attempt_name(step, attempt)}"

    marker = JobPath("root", MARKER)
    tracker = JobPath("root", TRACKER)
    version = JobPath("state", "version.json")
    # Who may load which version, if versions are rolled out.
    rolling = JobPath("state", "rolling.json")
    # Whose the state directory is.
    owner = JobPath("state", OWNER)
    # The baseline: the probe of the model that the job started from.
    base_probe = JobPath("state", "base_probe.json")
    # Which kinds of engine have ended at a probe.
    ended_probes = JobPath("state", "ended_probes")
    # What was measured of kinds of engine on the start model.
    calibrations = JobPath("state", "calibrations")
    # On the job's own file system, where engines read versions too.
    exams = JobPath("root", f"{STATE}/exams")
    lock = JobPath("state", "daemon.lock")
    explorers = JobPath("state", "explorers")
    trainers = JobPath("state", "trainers")
    pins = JobPath("state", "pins")
    requests = JobPath("state", "requests")
    rendezvous = JobPath("state", "rendezvous")
    events = JobPath("state", "events.jsonl")
    # On the job's own file system: a trainer publishes by a rename from its lock, and one rename moves a step to the
    # trash.
    trainer_lock = JobPath("root", f"{STATE}/trainer.lock")
    trash = JobPath("root", f"{STATE}/trash")


def job_disk(root: str, state: str, modes: Modes | None = None) -> LocalDisk:
    """Return the disk of a job: no link leads it out of the job, and files get the permissions of the job's policy.

    Args:
        root: The job directory, without links in its path.
        state: The state directory, the same.
        modes: The policy; None for the one in `config.toml`, which is read before the first file is made.
    """
    # The state directory inside the job is no root of its own: it must be no link itself.
    roots = (root,) if is_below(state, root) else (root, state)
    policy = JobModes(root) if modes is None else lambda: modes
    no_delegations = any(mount_of_resolved(path).has_delegations for path in roots)
    return LocalDisk(roots, policy, no_delegations=no_delegations)


class JobModes:
    """The modes that `config.toml` of a job sets. While there is no file, it is looked for again at each call."""

    def __init__(self, root: str) -> None:
        self._path = f"{root}/{CONFIG}"
        self._modes: Modes | None = None

    def __call__(self) -> Modes:
        """Return them.

        Raises:
            ConfigError: The file or its policy is not usable.
        """
        if self._modes is None:
            try:
                data = read_config_file(self._path)
            except MISSING:
                return UMASK
            self._modes = modes_in(parse_config(data, self._path), self._path)
        return self._modes


def read_config_file(path: str) -> bytes:
    """Return the content of a configuration file, which may be a link to one that several jobs share.

    Raises:
        ConfigError: It is too large, or no regular file: reading a FIFO would never end.
        OSError: It cannot be read; a missing file stays `FileNotFoundError`.
    """
    try:
        return LocalDisk().read(os.path.realpath(path), _CONFIG_LIMIT)
    except CorruptDataError as error:
        raise ConfigError(error.message, path=path, hint=f"ls -lL {path}") from error


def is_relative_name(name: str) -> bool:
    """Return whether a name stays below the directory it is joined to and can be a name there."""
    return len(name) <= _PATH_LIMIT and _stays_below(name)


# A thousand steps have the same few names; what is longer than any path is not worth remembering.
@functools.lru_cache(maxsize=1024)
def _stays_below(name: str) -> bool:
    if not name.isprintable() or len(name.encode()) > _PATH_LIMIT:
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= _NAME_LIMIT for part in name.split("/"))
