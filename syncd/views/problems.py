"""What is wrong with a job, each with a stable name: what daemon and presences report, and what one reading shows."""

from collections.abc import Iterator

from syncd.daemon.plan import ROOM
from syncd.daemon.snapshot import Snapshot
from syncd.daemon.symptoms import symptoms
from syncd.protocol.engine_state import engine_of
from syncd.protocol.mirror_report import mirror_of_presence
from syncd.protocol.mount import MountState, mount_trouble
from syncd.protocol.read_bytes import read_bytes_of
from syncd.protocol.step import Step, StepState
from syncd.views.job_view import Heart, JobView

LONGEST = 4096  # the most characters of a text in a presence file that are shown

_FEWEST_INODES = 16  # files that a publish and a heartbeat need at once, and some more


def problems(view: JobView) -> list[tuple[str, str]]:
    problem_list = list(symptoms(view.snapshot))
    damaged = [step for step in by_step(view.snapshot) if step.state is StepState.DAMAGED]
    problem_list += [("damaged_step", f"step {step.step}: {step.problem}") for step in damaged]
    put_aside = view.snapshot.put_aside
    problem_list += [("quarantined_step", f"step {entry.step}: {entry.reason}") for entry in put_aside]
    problem_list += list(view.problems.items())
    problem_list += _rolling_problems(view.snapshot)
    problem_list += _engine_problems(view)
    problem_list += _over_budget(view)
    problem_list += [
        ("dead", name)
        for name, heart in sorted(view.hearts.items())
        if heart is Heart.DEAD and not is_mirror(view, name.removeprefix("explorer/"))
    ]
    problem_list += _mirror_problems(view)
    problem_list += [("mount", trouble)] if (trouble := _mount_trouble(view)) else []
    heart = view.lead.heart if view.lead else Heart.LEFT
    if heart in (Heart.DEAD, Heart.LEFT):
        problem_list.append(("daemon", "no daemon leads this job"))
    return problem_list


def _mirror_problems(view: JobView) -> Iterator[tuple[str, str]]:
    """Yield the mirrors that have ended without a word, and those that cannot go on."""
    for name in sorted(view.snapshot.explorers):
        report = mirror_of_presence(view.snapshot.explorers[name].presence)
        if report is None:
            continue
        between = f"{report.source[:LONGEST]} to {report.target[:LONGEST]}"
        if view.hearts[f"explorer/{name}"] is Heart.DEAD:
            yield "mirror_dead", between
        elif report.state == "failing":
            yield "mirror_failing", f"{between}: {report.document()['detail']}"


def _engine_problems(view: JobView) -> Iterator[tuple[str, str]]:
    """Yield the engines that run no version, or not the newest one, for a reason."""
    for name in sorted(view.snapshot.explorers):
        engine = engine_of(view.snapshot.explorers[name].presence)
        if engine is not None and engine.state.is_trouble and is_followed(view, name):
            yield f"engine_{engine.state.value}", f"{name}: {engine.reason}"


def _over_budget(view: JobView) -> Iterator[tuple[str, str]]:
    """Yield the explorers whose other hosts were lost, slow or wrong, so that they read their bytes as well."""
    for name, module in sorted(view.snapshot.explorers.items()):
        read = read_bytes_of(module.presence.info)
        if read is not None and read.over_budget and is_followed(view, name):
            text = f"explorer {name} read more of the last version from the file system than its share"
            yield "origin_budget", text


def _rolling_problems(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield that canaries have stopped the published version, and who does not wait for its turn."""
    wave, version = snapshot.wave, snapshot.version
    if wave is None:
        return
    for item in wave.stopped:
        if version is not None and item.pair == version.pair:
            yield "rolling_stopped", f"{item.generation}.{item.step}: {item.reason}"
    yield from (("rolling_old", name) for name in wave.old)


def _mount_trouble(view: JobView) -> str:
    """Return what a daemon of this host reports about the mount, or that it is full; empty if nothing is wrong."""
    mount = (
        view.host_report.document.get("mount")
        if view.host_report is not None and view.host_report.is_current
        else None
    )
    if isinstance(mount, dict) and mount.get("state") != MountState.OK:
        return f"{mount.get('state')}: {mount.get('detail')}; {mount.get('hint')}"
    state = MountState.OK
    if view.snapshot.free is not None and view.snapshot.free < ROOM:
        state = MountState.FULL
    elif view.inodes is not None and view.inodes < _FEWEST_INODES:
        state = MountState.NO_INODES
    if state is MountState.OK:
        return ""
    trouble = mount_trouble(state, view.job.root)
    return f"{trouble.state}: {trouble.message}; {trouble.hint}"


def by_step(snapshot: Snapshot) -> list[Step]:
    return [snapshot.steps[number] for number in sorted(snapshot.steps)]


def is_mirror(view: JobView, name: str) -> bool:
    """Return whether an explorer's presence is that of a mirror, which leases steps and reports."""
    module = view.snapshot.explorers.get(name)
    return module is not None and mirror_of_presence(module.presence) is not None


def is_followed(view: JobView, name: str) -> bool:
    """Return whether an explorer's follower lives, or may."""
    return view.hearts[f"explorer/{name}"] not in (Heart.DEAD, Heart.LEFT)
