"""What to do about a snapshot: `plan(snapshot, policy) -> Plan`, pure.

The marker is a hint and the manifest is the truth. Forward, any complete step that the hint does not exclude may be
published. Explorers roll back only when the trainer says so: the marker names an earlier complete step and does not
change for a while, or a person requests a rollback.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from syncd.config import DaemonConfig
from syncd.daemon.chains import links
from syncd.daemon.quarantine import judged, released
from syncd.daemon.retention import (
    Decision,
    decide,
    is_abandoned,
    is_meant,
    is_quarantined,
    lost_attempts,
    removable,
)
from syncd.daemon.snapshot import Snapshot
from syncd.daemon.symptoms import LASTING, symptoms
from syncd.protocol.request import Request
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import MISSING_MARKER, Pair, Version

FIRST_GENERATION = 1

ROOM = 1 << 20
"""Bytes that must be free so that a publish is sure to find room: the version and a heartbeat are a few kilobytes."""


@dataclass(frozen=True, slots=True)
class Answer:
    request: Request
    done: bool  # whether it is completed; refused otherwise
    detail: str = ""  # why it is refused


@dataclass(frozen=True, slots=True)
class Plan:
    """What the leader carries out, in this order."""

    # The version to publish, None to publish nothing. Its date and term are for the leader to fill in.
    publish: Version | None
    reason: str  # why it is published: first, newer, rewind, rewritten, rollback, behind
    answers: tuple[Answer, ...]  # requests that are done or refused once the version is published
    decisions: tuple[Decision, ...]  # what happens to each step after that
    problems: tuple[tuple[str, str], ...]  # what is worth reporting, each state once: (stable name, detail)
    # Seconds after which another scan may publish although nothing changes, None if time alone changes
    # nothing.
    due_in: float | None = None
    # The published version with another quarantine or another last good version, None if both are the same.
    amend: Version | None = None
    # Removals that come before the publish, which lacks the room that they make.
    first: tuple[Decision, ...] = ()
    lost: tuple[Step, ...] = ()  # attempts to write a step that will not become one, to be removed


@dataclass(frozen=True, slots=True)
class Mirrored:
    """What a job that a mirror leads follows in place of its marker: its source decides, and this job repeats it."""

    version: Version | None = None  # the version of the source that may be published here, None for none yet


@dataclass(frozen=True, slots=True)
class _Choice:
    step: Step
    generation: int
    reason: str
    request: Request | None = None


def plan(snapshot: Snapshot, policy: DaemonConfig, mirrored: Mirrored | None = None) -> Plan:
    """Decide what to publish, answer and remove, from the snapshot alone; a job without `mirrored` decides itself."""
    if snapshot.version_unread:  # what was put aside or gone back from is in it, too
        return Plan(None, "", (), decide(snapshot, policy), tuple(symptoms(snapshot)))
    if mirrored is not None:
        choice, answers = _repeated(mirrored, snapshot), _refused_rollbacks(snapshot)
    else:
        choice, answers = _rollbacks(snapshot)
        choice = choice or _next_choice(snapshot, policy)
    version = _version(choice, snapshot) if choice else snapshot.version
    if version and (choice or not _is_short(snapshot)):
        version = judged(snapshot, version, reports=choice is None)
    after = replace(snapshot, version=version)
    decisions = decide(after, policy)
    return Plan(
        publish=version if choice else None,
        amend=version if not choice and version != snapshot.version else None,
        reason=choice.reason if choice else "",
        answers=(*answers, *_vacated(after, decisions)),
        decisions=decisions,
        problems=tuple(symptoms(snapshot)),
        due_in=min(_settling(after, policy), default=None),
        first=_first(snapshot, decisions, policy) if choice else (),
        lost=lost_attempts(after, policy),
    )


def _first(snapshot: Snapshot, after: tuple[Decision, ...], policy: DaemonConfig) -> tuple[Decision, ...]:
    """Return what is removed before the publish, where there may be no room for it."""
    if not _is_short(snapshot):
        return ()
    steps = snapshot.steps
    gone = {decision.step for decision in removable(after, steps)}
    before = removable(decide(snapshot, policy), steps)
    good = snapshot.version.last_good if snapshot.version else None
    named = good.step if good else None  # by the version file, until the publish
    return tuple(decision for decision in before if decision.step in gone and decision.step != named)


def _is_short(snapshot: Snapshot) -> bool:
    """Return whether there may be no room for a file."""
    return snapshot.crowded or (snapshot.free is not None and snapshot.free < ROOM)


def still_holds(decided: Plan, before: Snapshot, now: Snapshot, policy: DaemonConfig) -> bool:
    """Return whether a plan is also that of a later snapshot: only time has passed since, and no limit with it."""
    if decided.publish is not None or decided.amend is not None or decided.due_in is not None:
        return False
    limits = (policy.rewind_settle, LASTING, policy.partial_grace)
    is_past = [[looked.marker_stable_for >= limit for limit in limits] for looked in (before, now)]
    return is_past[0] == is_past[1] and before == replace(now, marker_stable_for=before.marker_stable_for)


def _repeated(mirrored: Mirrored, snapshot: Snapshot) -> _Choice | None:
    """Return the source's version under the source's pair, once its step is complete here with the same content."""
    wanted, version = mirrored.version, snapshot.version
    step = snapshot.steps.get(wanted.step) if wanted else None
    if wanted is None or step is None or step.state is not StepState.COMPLETE or step.digest != wanted.digest:
        return None
    floor = _floor(snapshot, version) if version else snapshot.floor
    if floor is not None and wanted.pair <= floor:
        return None
    reason = "first" if version is None else "newer" if wanted.step > version.step else "rewind"
    return _Choice(step, wanted.generation, reason)


def _refused_rollbacks(snapshot: Snapshot) -> tuple[Answer, ...]:
    detail = "the job is a mirror: roll back at its source"
    rollbacks = (request for request in snapshot.requests if request.kind == "rollback")
    return tuple(Answer(request, done=False, detail=detail) for request in rollbacks)


def _next_choice(snapshot: Snapshot, policy: DaemonConfig) -> _Choice | None:
    version = snapshot.version
    if _is_torn(snapshot) and snapshot.marker_stable_for < policy.rewind_settle:
        return None
    newest = max(_eligible(snapshot, policy), key=lambda step: step.step, default=None)
    if newest is None:
        return None
    if version is None:
        return _Choice(newest, snapshot.floor[0] + 1 if snapshot.floor else FIRST_GENERATION, "first")
    return _against(newest, version, snapshot, policy)


def _is_torn(snapshot: Snapshot) -> bool:
    """Return whether the marker names no step: it may be half written in place."""
    return snapshot.marker.problem not in ("", "missing")


def _against(newest: Step, version: Version, snapshot: Snapshot, policy: DaemonConfig) -> _Choice | None:
    floor = _floor(snapshot, version)
    if newest.step > version.step:
        return _Choice(newest, _generation_above(floor, newest.step), "newer")
    if newest.step == version.step:
        return _same_step(newest, version, floor, policy)
    # A marker that is written in place may be read half written: only one that stays rolls explorers back.
    if newest.step == snapshot.hint and snapshot.marker_stable_for >= policy.rewind_settle:
        return _Choice(newest, floor[0] + 1, "rewind")
    return None


def _same_step(newest: Step, version: Version, floor: Pair, policy: DaemonConfig) -> _Choice | None:
    if newest.digest != version.digest:
        return _Choice(newest, floor[0] + 1, "rewritten") if _settled(newest, policy) else None
    # Explorers never go back to a lower pair: if one has applied a higher pair, it would wait forever.
    return _Choice(newest, floor[0] + 1, "behind") if floor > version.pair else None


def _generation_above(floor: Pair, step: int) -> int:
    """Return the lowest generation in which a step is above every pair that anybody knows."""
    return floor[0] if (floor[0], step) > floor else floor[0] + 1


def _floor(snapshot: Snapshot, version: Version) -> Pair:
    return max(version.pair, snapshot.floor or version.pair)


def _eligible(snapshot: Snapshot, policy: DaemonConfig) -> Iterator[Step]:
    named = snapshot.hint
    for step in snapshot.steps.values():
        if step.state is not StepState.COMPLETE or _is_held(step, snapshot):
            continue
        if snapshot.version and step.step > snapshot.version.step and is_quarantined(step, snapshot):
            continue
        if is_abandoned(step, snapshot) and (step.step != named or _names_what_it_named(snapshot)):
            continue
        if _is_announced(step, named, policy):
            yield step


def _is_held(step: Step, snapshot: Snapshot) -> bool:
    """Return whether a rollback still excludes a step: its trainer has announced nothing since.

    A marker announces by changing. A trainer without one announces by completing a step that was not there at the
    rollback: what was there is abandoned, and a step that could not be examined then is abandoned without a digest.
    """
    version = snapshot.version
    if version is None or not _holds(version, snapshot):
        return False
    follows_marker = step.is_native or step.announced_by == "marker"
    if follows_marker and not _is_without_marker(snapshot):
        return True
    return (step.step, "") in version.abandoned


def _holds(version: Version, snapshot: Snapshot) -> bool:
    return version.held_marker is not None and version.held_marker == snapshot.marker.text


def _is_without_marker(snapshot: Snapshot) -> bool:
    return snapshot.marker.problem == MISSING_MARKER.problem


def _names_what_it_named(snapshot: Snapshot) -> bool:
    """Return whether the tracker, where it replaces the marker, has not moved since the last rollback."""
    version = snapshot.version
    if version is None or version.held_tracker is None:
        return False
    return _is_without_marker(snapshot) and version.held_tracker == snapshot.tracker


def _is_announced(step: Step, named: int | None, policy: DaemonConfig) -> bool:
    if step.announced_by == "itself":
        return named is None or step.step <= named or not step.is_native
    if step.announced_by == "marker":
        return named is not None and step.step <= named
    return _settled(step, policy)


def _settled(step: Step, policy: DaemonConfig) -> bool:
    return step.is_native or step.unchanged_for >= policy.settle


def _settling(snapshot: Snapshot, policy: DaemonConfig) -> Iterator[float]:
    """Return the seconds until each thing that must not change for a while has done so."""
    version, named = snapshot.version, snapshot.hint
    left = policy.rewind_settle - snapshot.marker_stable_for
    goes_back = version is not None and named is not None and named < version.step
    if (goes_back or _is_torn(snapshot)) and left > 0:
        yield left
    for step in snapshot.steps.values():
        if step.state is StepState.COMPLETE and not _settled(step, policy):
            yield policy.settle - step.unchanged_for


def _rollbacks(snapshot: Snapshot) -> tuple[_Choice | None, tuple[Answer, ...]]:
    """Return the first rollback that can be carried out, and the answers up to it; the next one waits."""
    answers = []
    for request in snapshot.requests:
        if request.kind != "rollback":
            continue
        choice, answer = _rollback(snapshot, request)
        answers.append(answer)
        if choice is not None:
            return choice, tuple(answers)
    return None, tuple(answers)


def _rollback(snapshot: Snapshot, request: Request) -> tuple[_Choice | None, Answer]:
    step, version = snapshot.steps.get(request.step), snapshot.version
    if version is None:
        return None, Answer(request, done=False, detail="nothing is published yet")
    if request.identity in (version.request, *version.carried_out):
        return None, Answer(request, done=True)
    if step is None or step.state is not StepState.COMPLETE:
        return None, Answer(request, done=False, detail=f"step {request.step} is not complete")
    choice = _Choice(step, _floor(snapshot, version)[0] + 1, "rollback", request)
    return choice, Answer(request, done=True)


def _version(choice: _Choice, snapshot: Snapshot) -> Version:
    step, before = choice.step, snapshot.version
    goes_back = choice.reason == "rollback"
    version = Version(
        generation=choice.generation,
        step=step.step,
        kind=step.kind,
        path=step.payload,
        digest=step.digest,
        layout=step.layout,
        parent=step.parent,
        previous=before.pair if before else None,
        held_marker=snapshot.marker.text if goes_back else None,
        held_tracker=_held_tracker(snapshot, goes_back=goes_back),
        request=choice.request.identity if choice.request else before.request if before else None,
        carried_out=_carried_out(snapshot),
        abandoned=_abandoned(choice, snapshot),
        quarantine=before.quarantine if before else (),
        released=before.released if before else (),
        last_good=before.last_good if before else None,
    )
    return released(snapshot, version, step) if goes_back else version


def _carried_out(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the completed requests whose files could not be removed: they must not be done twice."""
    before = snapshot.version
    done = {before.request, *before.carried_out} if before else set()
    return tuple(request.identity for request in snapshot.requests if request.identity in done)


def _held_tracker(snapshot: Snapshot, *, goes_back: bool) -> int | None:
    """Return what the tracker names at a rollback; it is kept for as long as the tracker says the same."""
    before = snapshot.version
    if not _is_without_marker(snapshot):
        return None
    if goes_back or (before is not None and before.held_tracker == snapshot.tracker):
        return snapshot.tracker
    return None


def _abandoned(choice: _Choice, snapshot: Snapshot) -> tuple[tuple[int, str], ...]:
    """Return the abandoned steps: those of before that still exist, and those above a step that was gone back to."""
    before = snapshot.version.abandoned if snapshot.version else ()
    there = {(step.step, step.digest) for step in snapshot.steps.values()}
    abandoned = {item for item in before if item in there}
    if choice.reason in ("rewind", "rollback", "rewritten"):
        abandoned |= {
            (step.step, step.digest)
            for step in snapshot.steps.values()
            if step.step > choice.step.step and step.state is not StepState.FILLING
        }
    return tuple(sorted(abandoned - {(choice.step.step, choice.step.digest)}))


def _vacated(snapshot: Snapshot, decisions: tuple[Decision, ...]) -> Iterator[Answer]:
    """Answer the requests to vacate: done when the step is removed, refused when it never will be, else they wait."""
    kept = {decision.step: decision for decision in decisions if decision.keep}
    for request in snapshot.requests:
        if request.kind != "vacate":
            continue
        if not is_meant(request, snapshot):
            yield Answer(request, done=True)
        elif decision := _final(request.step, kept, snapshot):
            yield Answer(request, done=False, detail=f"step {decision.step} is kept by rule {decision.rule}")


_FINAL = frozenset({"pruning_off", "foreign", "pinned", "resumed_from", "full_checkpoint", "later_protocol"})


def _final(step: int, kept: Mapping[int, Decision], snapshot: Snapshot) -> Decision | None:
    """Return the decision that keeps a step for good, its own or that of a step that is stored as changes of it."""
    decision = kept.get(step)
    if decision is None or decision.rule != "chain":
        return decision if decision and _is_final(decision, snapshot.hint) else None
    holders = (
        kept[number]
        for number in kept
        if step in links(number, snapshot.steps) and kept[number].rule != "chain"
    )
    return next((holder for holder in holders if _is_final(holder, snapshot.hint)), None)


def _is_final(decision: Decision, named: int | None) -> bool:
    """Return whether waiting cannot help: a lease ends, and a newest version may still be superseded."""
    if decision.rule == "newest_version":
        return named is None or named >= decision.step
    return decision.rule in _FINAL
