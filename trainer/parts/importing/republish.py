"""Republishes steps of another trainer's job as safetensors in a job of ours beside it, so that hooks can serve them.

Files of FSDP's ranks and Megatron's distributed checkpoints are read by `trainer export`, which unpickles tensors
alone; followers of the second job never meet a pickle.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from signal import SIGTERM

from syncd.client.client import Client
from syncd.client.follow import Leased, missing_job
from syncd.client.state_dict import foreign_shards
from syncd.errors import CorruptDataError, NotReadyError, TimedOutError, TryAgainError, UsageError
from syncd.jobfile.model import JobFile
from syncd.protocol.disk import DOCUMENT_LIMIT, MISSING, exists, is_below
from syncd.protocol.documents import encode, parse_json
from syncd.protocol.layout import MANIFEST, Job, parse_step_name
from syncd.protocol.step import NATIVE
from syncd.protocol.version import Version, write_marker
from trainer.export import export
from trainer.launch.daemon import DaemonProcess
from trainer.launch.die_with_parent import dying_with_parent
from trainer.stopping import StopSignals

RECORD = "imported.json"
"""In the second job: the digest of each step of the first one that it holds."""

NAME = "import"
"""The identity in both jobs: explorer of the first, trainer of the second."""

_POLL = 0.5
_FIRST = 120.0
"""Seconds that `once` waits for a version."""

_VACATED = 60.0
"""Seconds that readers of a step have to end before another try to replace it."""

Say = Callable[[str], None]


def republish_steps(
    job_dir: str,
    out: str,
    say: Say,
    *,
    state_dir: str | None = None,
    dtype: str | None = None,
    once: bool = False,
) -> None:
    """Follow a job, and publish each version of it in a second one until a signal asks to stop.

    Args:
        out: The second job's directory; made if it is not there.
        state_dir: Where the state of the first job is, if not in its directory.
        dtype: What floating-point weights become that are no safetensors; as `trainer export` takes it.
        once: Whether to end after the newest version.
    """
    if is_below(os.path.realpath(out), os.path.realpath(job_dir)):
        raise UsageError("the second job is in the first", path=out, hint="name a directory beside it")
    if not os.path.isdir(job_dir):
        raise missing_job(job_dir)
    os.makedirs(out, exist_ok=True)
    with (
        StopSignals() as signals,
        _daemons((job_dir, state_dir), (out, None)) as check,
        Client.open(job_dir, "explorer", NAME, state_dir=state_dir) as source,
        Client.open(out, "trainer", NAME) as target,
    ):
        copier = StepCopier(source, target, say, dtype)
        ends = time.monotonic() + _FIRST
        while signals.requested is None:
            check()
            version = source.latest_version()
            if version is not None and copier.is_new(version) and _copy(copier, version, once=once) and once:
                return
            if once and time.monotonic() > ends:
                reason = copier.refused or "no version was published"
                raise NotReadyError(reason, path=job_dir, hint=f"syncd ls {job_dir}")
            time.sleep(_POLL)


def _copy(copier: "StepCopier", version: Version, *, once: bool) -> bool:
    """Copy a version; one that is damaged is passed over, unless it is the only one that is asked for."""
    try:
        return copier.copy(version)
    except CorruptDataError as error:
        if once:
            raise
        copier.pass_over(version, error)
        return False


@contextlib.contextmanager
def _daemons(*jobs: tuple[str, str | None]) -> Iterator[Callable[[], None]]:
    """Run a daemon of each job while none leads it; give the function that checks on them."""
    with contextlib.ExitStack() as stack:
        running = []
        for directory, state in jobs:
            section = {"dir": os.path.abspath(directory), "state_dir": state or ""}
            config = JobFile.model_validate({"job": section, "model": {"path": "-"}})
            running.append(DaemonProcess(config))
            stack.callback(running[-1].close)

        def check() -> None:
            for daemon in running:
                daemon.check()

        yield check


class StepCopier:
    """Copies versions of one job into another as steps of the same number.

    It is an explorer of the first, whose leases keep a step while it is read, and the trainer of the second.
    """

    def __init__(self, source: Client, target: Client, say: Say, dtype: str | None) -> None:
        self._source, self._target, self._say, self._dtype = source, target, say, dtype
        self._record = f"{target.job.root}/{RECORD}"
        parent, name = os.path.split(target.job.root)
        self._scratch = f"{parent}/.{name}.{NAME}"
        self._copied = _read_record(target.job, self._record)
        self._done: Version | None = None
        self.refused = ""
        """Why the newest version was not copied, empty if it was."""

    def is_new(self, version: Version) -> bool:
        return self._done is None or (self._done.pair, self._done.digest) != (version.pair, version.digest)

    def copy(self, version: Version) -> bool:
        """Have the second job publish a version; false, and `refused`, if it cannot be copied now."""
        root = self._source.job.root
        if version.kind == "remote":
            raise UsageError(f"step {version.step} is no files but {version.path}", path=root)
        if version.layout == NATIVE:
            raise UsageError(
                "the first job is one of ours", path=root, hint=f"syncd follow {root} --hook HOOK"
            )
        if self._copied.get(str(version.step)) == version.digest and self._is_there(version.step):
            if self._target.announced_step() != version.step:
                self._target.publish(None, version.step, rewind=True)
                self._say(f"step {version.step}: announced again")
        elif not self._write(version):
            return False
        self._done, self.refused = version, ""
        self._source.confirm(version.pair)
        return True

    def pass_over(self, version: Version, error: CorruptDataError) -> None:
        """Say why a version is not copied, and wait for the next one."""
        self._refuse(f"step {version.step}: {error}; the next step follows")
        self._done = version

    def _is_there(self, step: int) -> bool:
        return exists(self._target.job.disk, f"{self._target.job.step(step)}/{MANIFEST}")

    def _write(self, version: Version) -> bool:
        shutil.rmtree(self._scratch, ignore_errors=True)  # of a process that was killed
        try:
            below = self._below(version.step) if self._is_in_the_way(version.step) else None
            with self._source.lease(version) as leased:
                directory = self._readable(leased)
                if below is not None:
                    self._make_way(version.step, below)
                self._remember(version)  # before: a step that is there then is this one, also after a kill
                self._publish(version.step, directory)
        except (TryAgainError, TimedOutError) as error:
            self._refuse(f"step {version.step}: {error}")
            return False
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return True

    def _refuse(self, reason: str) -> None:
        if reason != self.refused:  # once, and not at each try
            self._say(reason)
        self.refused = reason

    def _is_in_the_way(self, step: int) -> bool:
        return self._is_there(step) and str(step) in self._copied

    def _below(self, step: int) -> int:
        """Return what the marker names while a step is replaced: an earlier step; none if a later one is served."""
        job, served = self._target.job, self._target.latest_version()
        names = (parse_step_name(entry.name) for entry in job.disk.list(job.root))
        earlier = [name for name in names if name is not None and name < step and self._is_there(name)]
        if not earlier and (step == 0 or served is None or served.step <= step):
            text = (
                "it was written again, but there is no earlier step to serve meanwhile; the next step follows"
            )
            raise TryAgainError(text, path=job.root)
        return max(earlier, default=step - 1)

    def _make_way(self, step: int, below: int) -> None:
        """Have the daemon remove a step, which it does once the trainer has gone back below it."""
        job, named = self._target.job, self._target.announced_step()
        if named is None or named >= step:
            write_marker(job.disk, job.marker, below)
        self._target.vacate(step, _VACATED)

    def _remember(self, version: Version) -> None:
        self._copied[str(version.step)] = version.digest
        content = encode({"protocol": 1, "from": self._source.job.root, "steps": self._copied})
        self._target.job.disk.replace(self._record, content)

    def _readable(self, leased: Leased) -> str:
        if foreign_shards(self._source.job.disk, leased.path):
            return leased.path
        directory = f"{self._scratch}/step"
        export(self._source.job.root, leased.version.step, directory, self._dtype)
        return directory

    def _publish(self, step: int, directory: str) -> None:
        """Publish a directory by the command that checks, hashes and seals it."""
        newest = self._target.announced_step()
        rewind = ["--rewind"] if newest is not None and newest > step else []
        command = ["syncd", "publish", self._target.job.root, str(step), directory, *rewind]
        own = dying_with_parent(SIGTERM, [sys.executable, "-P", "-m", *command])
        done = subprocess.run(own, stdin=subprocess.DEVNULL, check=False)  # noqa: S603 - our own command
        if done.returncode:
            text = f"step {step} could not be published: exit code {done.returncode}"
            raise CorruptDataError(text, path=self._target.job.root, hint=shlex.join(command))


def _read_record(job: Job, path: str) -> dict[str, str]:
    try:
        return dict(parse_json(job.disk.read(path, DOCUMENT_LIMIT))["steps"])
    except MISSING:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        hint = f"rm {path}  # its steps are then written again"
        raise CorruptDataError("not a record of imported steps", path=path, hint=hint) from error
