"""`syncd wait`: until there is a newer version, for shell scripts."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from syncd.arguments import job_argument
from syncd.cli import options
from syncd.errors import ConfigError, CorruptDataError, ProtocolTooNewError, TimedOutError, storage_error
from syncd.protocol.layout import MAX_STEP, Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.version import Version, read_version
from syncd.stall.calls import MOUNT_HINT
from syncd.stall.verbs import MountVerb, stalled
from syncd.stall.worker import CallWait

_POLL = 0.25
_PAIR = re.compile(r"(?:(\d{1,16})\.)?(\d{1,16})", re.ASCII)


@dataclass(frozen=True, slots=True)
class NewerThan:
    generation: int | None  # the generation, None where only a step was given
    step: int

    def __str__(self) -> str:
        if self.generation is None:
            return f"a step newer than {self.step}"
        return f"a version newer than {self.generation}.{self.step}"

    def is_met_by(self, version: Version) -> bool:
        if self.generation is None:
            return version.step > self.step
        return version.pair > (self.generation, self.step)


def _parse(_: click.Context, __: click.Parameter, value: str | None) -> NewerThan | None:
    if value is None:
        return None
    match = _PAIR.fullmatch(value)
    if match is None or int(match[2]) > MAX_STEP:
        raise click.BadParameter(f"{value!r} is neither a step nor GENERATION.STEP, such as 120 or 2.120")
    return NewerThan(int(match[1]) if match[1] else None, int(match[2]))


def _late(values: Mapping[str, Any], wait: CallWait) -> TimedOutError | None:
    """Return the error of a wait whose time is up; until then a mount that does not answer may come back."""
    if wait.elapsed < values["timeout"]:
        return None
    return _timed_out(values["newer_than"], values["timeout"], stalled(wait), wait.call.path, MOUNT_HINT)


@click.command(cls=MountVerb, on_stall=_late)
@job_argument
@click.option(
    "--newer-than",
    callback=_parse,
    metavar="VERSION",
    show_default="any version",
    help="Wait for more than this step, or GENERATION.STEP as this command prints it.",
)
@options.timeout_option(3600.0)
@click.option(
    "--print",
    "shown",
    type=click.Choice(["version", "step", "path"]),
    default="version",
    help="Print GENERATION.STEP, the step, or the directory to load.",
)
@options.state_dir_option
@options.json_option
def wait(
    job: str,
    *,
    newer_than: NewerThan | None,
    timeout: float,
    shown: str,
    state_dir: str | None,
    as_json: bool,
) -> None:
    r"""Wait until JOB has a version newer than VERSION, and print it.

    To wait for the next version, pass what this command printed last: GENERATION.STEP grows even when the trainer
    rolls back to an earlier step, a step alone does not. The job need not exist yet, and the mount may hang.

    \b
    Exit codes:
      4   the time is up
      65  the version is a remote address with characters that cannot be printed; --json escapes them

    \b
    Example:
      seen=0.0
      while seen=$(syncd wait /ckpt/job --newer-than $seen --timeout 600); do
        evaluate "$seen"
      done
    """
    opened = options.find_job(job, state_dir)
    version = wait_for(opened, newer_than, timeout)
    if as_json:
        options.print_json(_document(opened.root, version))
    else:
        click.echo(_text(opened.root, version, shown))


def wait_for(job: Job, than: NewerThan | None, timeout: float) -> Version:
    """Return the first version that is newer than `than`, or any if that is None; the job need not exist yet.

    Args:
        timeout: Seconds to wait at most; the job is read once at least.
    """
    clock = SystemClock()
    ends = clock.monotonic() + timeout
    while True:
        version, reason = _read(job)
        if version is not None and (than is None or than.is_met_by(version)):
            return version
        left = ends - clock.monotonic()
        if left <= 0:
            current = f"current: {_current(version, than)}" if version else reason
            raise _timed_out(than, timeout, current, job.root, f"syncd status {job.root}")
        clock.sleep(min(_POLL, left))


def _read(job: Job) -> tuple[Version | None, str]:
    """Return the version, or why there is none; an error that may pass does not end the wait."""
    try:
        job.disk.refresh(job.state)
        return read_version(job), "nothing is published yet"
    except FileNotFoundError:
        return None, "no daemon has ever led this job"
    except ProtocolTooNewError:
        raise
    except CorruptDataError as error:
        return None, str(error)
    except OSError as error:
        return None, str(storage_error(error, job.version))


def _timed_out(than: NewerThan | None, timeout: float, why: str, path: str, hint: str) -> TimedOutError:
    wanted = "a version" if than is None else str(than)
    return TimedOutError(f"timed out after {timeout:g} s waiting for {wanted} ({why})", path=path, hint=hint)


def _current(version: Version, than: NewerThan | None) -> str:
    """Return the current version in the form in which the wait was asked for."""
    pair = f"{version.generation}.{version.step}"
    return pair if than is None or than.generation is not None else f"step {version.step}, version {pair}"


def _uri(version: Version) -> str:
    """Return the URI of a remote version as a script may take it."""
    if not version.path.isprintable():
        raise CorruptDataError(
            f"the URI of version {version.generation}.{version.step} has characters that do not print",
            path=version.path,
            hint="syncd wait JOB --json spells them out",
        )
    return version.path


def _document(root: str, version: Version) -> dict[str, object]:
    return {
        "generation": version.generation,
        "step": version.step,
        "kind": version.kind,
        "layout": version.layout,
        "path": version.path if version.kind == "remote" else f"{root}/{version.path}",
        "digest": version.digest,
        "published_at": version.published_at,
    }


def _spelt(path: str) -> bytes:
    """Return the bytes of a path if the output can spell it: a script must not get another one."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        return path.encode(encoding, "surrogateescape")
    except UnicodeEncodeError:
        message = f"the output's encoding, {encoding}, cannot spell the path of the version"
        raise ConfigError(message, path=path, hint="export PYTHONIOENCODING=utf-8") from None


def _text(root: str, version: Version, shown: str) -> str | bytes:
    if shown == "path":
        return _spelt(_uri(version) if version.kind == "remote" else f"{root}/{version.path}")
    return str(version.step) if shown == "step" else f"{version.generation}.{version.step}"
