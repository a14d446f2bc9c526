"""`syncd verify`: checks the files of a step."""

from typing import TYPE_CHECKING, Any

import click

from syncd.arguments import job_argument, step_argument
from syncd.cli.options import (
    delta_tool,
    json_option,
    open_job,
    print_json,
    state_dir_option,
)
from syncd.errors import ConfigError, CorruptDataError, NotReadyError, UsageError, plain
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.step import StepState
from syncd.protocol.version import Version
from syncd.stall.verbs import MountVerb

if TYPE_CHECKING:
    from syncd.daemon.snapshot import Snapshot
    from syncd.protocol.step import Step


@click.command(cls=MountVerb)
@job_argument
@step_argument(required=False)
@click.option("--deep", is_flag=True, help="Read every byte, and compare each file with its digest.")
@state_dir_option
@json_option
def verify(job: str, step: int | None, deep: bool, state_dir: str | None, as_json: bool) -> None:
    r"""Check STEP of JOB, by default the newest version: manifest, sizes and headers; with --deep every byte.

    Prints one line for each wrong file. Steps of other frameworks have no digests: only their structure and headers
    are checked.

    Of a delta, the chain back to its keyframe is checked. With --deep every change is applied, and the result is
    compared with the digests of the whole files; this needs the extra `delta`. The shortcut of a step that is stored
    whole is checked in the same way: if it is wrong, the step itself is still whole.

    \b
    Exit codes:
      2   there is no such step
      3   nothing is published, or the step is not complete
      65  the step is damaged, or nobody can use its shortcut

    \b
    Examples:
      syncd verify /ckpt/job
      syncd verify /ckpt/job 120 --deep
    """
    opened = open_job(job, state_dir)
    examined, level, problems = _verify(opened, step, deep=deep)
    shortcut = None if problems else _verified_shortcut(opened, examined, level)
    if as_json:
        print_json(_document(examined, level, problems, shortcut))
    else:
        _show(examined, level, problems, shortcut)
    if problems or (shortcut and shortcut["problems"]):
        hint = f"syncd ls {job}"
        what = "is damaged" if problems else "is complete, but its shortcut cannot be used"
        raise CorruptDataError(f"step {examined.step} {what}", path=examined.directory, hint=hint)


def _verify(job: Job, number: int | None, *, deep: bool) -> tuple["Step", str, list[str]]:
    """Return the step, how closely it was checked, and what is wrong with it."""
    from syncd.daemon.examine import VerifyLevel, problems_of  # noqa: PLC0415
    from syncd.daemon.scan import examine_all  # noqa: PLC0415

    snapshot = examine_all(job, SystemClock())
    step = _chosen(job, snapshot, number)
    level = "content" if deep and step.is_native and step.kind != "remote" else "header"
    if step.state is StepState.FILLING:
        return step, level, [_loss(job, step, snapshot.version)]
    if step.state is StepState.DAMAGED:
        problems = _missing(job, step) or [step.problem]
    else:
        problems = problems_of(job, step, VerifyLevel(level))
        if not problems and level == "content" and step.kind == "delta":
            problems = delta_tool("prove")(job, step.step)
    if number is None and snapshot.version is not None and step.digest != snapshot.version.digest:
        problems.append(
            f"{step.directory}: its digest differs from the published one: the step was written again"
        )
    return step, level, problems


def _verified_shortcut(job: Job, step: "Step", level: str) -> dict[str, Any] | None:
    from syncd.daemon.examine import VerifyLevel, shortcut_problem_of  # noqa: PLC0415
    from syncd.protocol.manifest import damaged_records, read_manifest  # noqa: PLC0415

    if step.shortcut is None:
        return None
    problem = shortcut_problem_of(job, step, VerifyLevel(level))
    problems, unproved = [problem] if problem else [], "" if level == "content" else "--deep applies it"
    if level == "content" and not problems:
        path = job.step(step.step)
        problems = damaged_records(job.disk, path, read_manifest(job.disk, path).containers)
        unproved = "" if problems else _why_not_applied(job, step)
        if not problems and not unproved:
            problems = delta_tool("prove")(job, step.step, shortcut=True)
    return {
        "parent": step.shortcut.parent,
        "bytes": step.shortcut.size,
        "problems": problems,
        "unproved": unproved,
    }


def _why_not_applied(job: Job, step: "Step") -> str:
    from syncd.protocol.disk import exists  # noqa: PLC0415

    parent = step.shortcut.parent if step.shortcut else None
    if parent is None or not exists(job.disk, job.step(parent)):
        return f"step {parent} is no longer there"
    try:
        delta_tool("prove")
    except ConfigError as error:
        return f"{error.message}: {error.hint}"
    return ""


def _chosen(job: Job, snapshot: "Snapshot", number: int | None) -> "Step":
    hint = f"syncd ls {job.root}"
    if number is None:
        if snapshot.version is None:
            raise NotReadyError(
                snapshot.version_problem or "nothing is published yet", path=job.root, hint=hint
            )
        number = snapshot.version.step
    if number not in snapshot.steps:
        if _is_published(number, snapshot.version):
            raise CorruptDataError(f"step {number} is published but does not exist", path=job.root, hint=hint)
        raise UsageError(f"there is no step {number}", path=job.root, hint=hint)
    return snapshot.steps[number]


def _is_published(step: int, version: Version | None) -> bool:
    """Return whether a step must be complete, because it is the newest version or the one before.

    After a rewind the version before is a later step, which the trainer may be writing again.
    """
    if version is None:
        return False
    previous = version.previous[1] if version.previous else version.step
    return step == version.step or step == previous < version.step


def _loss(job: Job, step: "Step", version: Version | None) -> str:
    """Return how a published step that is incomplete is damaged."""
    if _is_published(step.step, version):
        return f"{step.directory}: it is published but no longer complete: {step.problem}"
    raise NotReadyError(f"step {step.step} is not complete: {step.problem}", hint=f"syncd ls {job.root}")


def _missing(job: Job, step: "Step") -> list[str]:
    """Return every file that is wrong; the scanner names only the first."""
    from syncd.protocol.disk import MISSING  # noqa: PLC0415
    from syncd.protocol.manifest import missing_files, read_manifest  # noqa: PLC0415

    path = f"{job.root}/{step.directory}"
    try:
        return missing_files(job.disk, path, read_manifest(job.disk, path)) if step.is_native else []
    except (*MISSING, CorruptDataError):
        return []


def _document(
    step: "Step", level: str, problems: list[str], shortcut: dict[str, Any] | None
) -> dict[str, object]:
    return {
        "step": step.step,
        "layout": step.layout,
        "level": level,
        "ok": not problems,
        "bytes": step.size,
        "digest": step.digest,
        "problems": problems,
        "shortcut": shortcut,
    }


def _show(step: "Step", level: str, problems: list[str], shortcut: dict[str, Any] | None) -> None:
    for problem in problems:
        click.echo(plain(problem))
    if not problems:
        proved = "every byte that its chain makes" if step.kind == "delta" else "every byte"
        correct = "structure, sizes and headers are correct"
        what = f"{proved} matches its digest" if level == "content" else correct
        counts = f"{step.present} of {step.expected}, {step.size} bytes, {step.layout}"
        click.echo(f"step {step.step}: {what} ({counts})")
    if shortcut:
        reasons = shortcut["problems"] or [shortcut["unproved"] and f"not applied: {shortcut['unproved']}"]
        result = reasons[0] or "its changes make every byte of the step"
        click.echo(plain(f"shortcut from step {shortcut['parent']}, {shortcut['bytes']} bytes: {result}"))
