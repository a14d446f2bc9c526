"""`syncd wait`: until there is a newer version, for shell scripts."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import click

from syncd.cli.options import find_job, job_argument, json_option, state_dir_option, timeout_option
from syncd.errors import CorruptDataError, ProtocolTooNewError, TimedOutError
from syncd.protocol.layout import MAX_STEP, Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.version import Pair, Version, read_version
from syncd.stall.calls import IS_IT_UP
from syncd.stall.verbs import Attended, Seen

_POLL = 0.25
_PAIR = re.compile(r"(?:(\d{1,16})\.)?(\d{1,16})", re.ASCII)

Newer = Callable[[Version], bool]


Than = tuple[int | None, int] | None
"""(generation, step), the generation None where only a step was given; None for nothing."""


def _parse(_: click.Context, __: click.Parameter, value: str | None) -> Than:
    if value is None:
        return None
    match = _PAIR.fullmatch(value)
    if match is None or int(match[2]) > MAX_STEP:
        raise click.BadParameter(f"{value!r} is neither a step nor GENERATION.STEP, such as 120 or 2.120")
    return (int(match[1]) if match[1] else None), int(match[2])


def _late(given: Mapping[str, Any], seen: Seen) -> TimedOutError | None:
    """Return what a wait ends with once its time is up: until then a mount that does not answer may come back."""
    if seen.elapsed < given["timeout"]:
        return None
    return TimedOutError(
        f"{_named(given['newer_than'])} did not come within {given['timeout']:g} s ({seen})",
        path=seen.call.path,
        hint=IS_IT_UP,
    )


@click.command(cls=Attended, verdict=_late)
@job_argument
@click.option(
    "--newer-than",
    callback=_parse,
    metavar="V",
    help="A step, or GENERATION.STEP as this command prints it; any version will do without it.",
)
@timeout_option(3600.0)
@click.option(
    "--print",
    "shown",
    type=click.Choice(["version", "step", "path"]),
    default="version",
    show_default=True,
    help="What is printed: GENERATION.STEP, the step, or the directory to load.",
)
@state_dir_option
@json_option
def wait(
    job: str,
    *,
    newer_than: Than,
    timeout: float,
    shown: str,
    state_dir: str | None,
    as_json: bool,
) -> None:
    r"""Wait until JOB has a version newer than V, and print it; exit 4 when the time is up.

    GENERATION.STEP grows, too, when the trainer goes back to an earlier step; a step alone does not: give
    back what this command printed. Jobs whose trainer or daemon has not started yet are waited for as well.

    \b
    Example:
      seen=0.0
      while seen=$(syncd wait /ckpt/job --newer-than $seen --timeout 600); do
        evaluate "$seen"
      done
    """
    place = find_job(job, state_dir)
    version = wait_for(place, _newer(newer_than), timeout, _named(newer_than))
    if as_json:
        from syncd.views import json  # noqa: PLC0415

        click.echo(json.text(_document(place.root, version)))
    else:
        click.echo(_text(place.root, version, shown))


def wait_for(job: Job, newer: Newer, timeout: float, wanted: str = "a version") -> Version:
    """Return the first version found that is newer.

    Args:
        job: The job, which need not exist yet.
        newer: Says whether a version will do.
        timeout: Seconds to wait at most; one look is always taken.
        wanted: What is waited for, for people to read.

    Raises:
        TimedOutError: There was none in time.
    """
    clock = SystemClock()
    ends = clock.monotonic() + timeout
    while True:
        version, why = _look(job)
        if version is not None and newer(version):
            return version
        left = ends - clock.monotonic()
        if left <= 0:
            found = f"there is {version.generation}.{version.step}" if version else why
            raise TimedOutError(
                f"{wanted} did not come within {timeout:g} s ({found})",
                path=job.root,
                hint=f"syncd status {job.root}",
            )
        clock.sleep(min(_POLL, left))


def _look(job: Job) -> tuple[Version | None, str]:
    """Return the version, or why there is none; what passes or will be mended is no reason to give up."""
    try:
        job.disk.refresh(job.state)
        return read_version(job), "nothing is published yet"
    except FileNotFoundError:
        return None, "no daemon has ever led this job"
    except ProtocolTooNewError:
        raise
    except (CorruptDataError, OSError) as error:
        return None, str(error)


def _newer(than: Than) -> Newer:
    if than is None:
        return lambda _: True
    generation, step = than
    if generation is None:
        return lambda version: version.step > step
    pair: Pair = (generation, step)
    return lambda version: version.pair > pair


def _named(than: Than) -> str:
    if than is None:
        return "a version"
    generation, step = than
    return (
        f"a version newer than {step}" if generation is None else f"a version newer than {generation}.{step}"
    )


def _uri(version: Version) -> str:
    """Return the URI of a remote version as a script may take it.

    Raises:
        CorruptDataError: It holds what could steer a terminal, or end the line.
    """
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


def _text(root: str, version: Version, shown: str) -> str:
    if shown == "path":
        return _uri(version) if version.kind == "remote" else f"{root}/{version.path}"
    return str(version.step) if shown == "step" else f"{version.generation}.{version.step}"
