"""Retention: which steps are kept and which are removed, and by which rule. A pure function of a snapshot.

The rules that keep are asked in order, and the first that holds is reported; a step that no rule keeps is removed.
docs/retention.md has the table.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from syncd.config import DaemonConfig
from syncd.daemon.chains import catching_up, is_obscure, links, may_have_deltas
from syncd.daemon.snapshot import Snapshot
from syncd.protocol.request import Request
from syncd.protocol.step import Step, StepState


@dataclass(frozen=True, slots=True)
class Decision:
    step: int
    keep: bool  # whether it is kept
    rule: str  # the rule that decided, a stable name
    detail: str = ""  # why, for people to read


Rule = Callable[[Step], Decision | None]

RIVAL_GRACE = 60.0
"""Seconds without a change after which a later attempt to write the same step replaces an attempt."""


def decide(snapshot: Snapshot, policy: DaemonConfig) -> tuple[Decision, ...]:
    steps = sorted(snapshot.steps.values(), key=lambda step: step.step)
    if snapshot.version is None:
        why = snapshot.version_problem or "nothing is published yet"
        return tuple(_keep(step.step, "unpublished", why) for step in steps)
    strong = _strong_rule(snapshot, policy)
    decided = {step.step: strong(step) for step in steps}
    weak = [step for step in steps if decided[step.step] is None]
    decided.update({item.step: item for item in _weak(weak, steps, snapshot, policy)})
    kept = {step: decision for step, decision in decided.items() if decision and decision.keep}
    decided.update({item.step: item for item in _chains(kept, snapshot.steps)})
    decided.update({item.step: item for item in _maybe_links(decided, snapshot, policy)})
    return tuple(decision for _, decision in sorted(decided.items()) if decision)


def removable(decisions: Iterable[Decision], steps: Mapping[int, Step]) -> list[Decision]:
    """Return the decisions that remove, oldest chain first, each delta before what it is stored as changes of."""
    roots: dict[int, int] = {}
    for number in sorted(steps):
        parent = steps[number].parent
        roots[number] = number if parent is None or parent >= number else roots.get(parent, parent)
    removed = (decision for decision in decisions if not decision.keep)
    return sorted(removed, key=lambda decision: (roots.get(decision.step, decision.step), -decision.step))


def lost_attempts(snapshot: Snapshot, policy: DaemonConfig) -> tuple[Step, ...]:
    """Return the attempts that will not become their step: another save has sealed it, or a later one is writing it.

    No reader ever reads an attempt, so no lease protects one. The next call of a writer that still writes it fails.
    """
    return tuple(
        attempt
        for attempt in snapshot.rivals
        if policy.prune and _is_lost(attempt, snapshot.steps[attempt.step])
    )


def _is_lost(attempt: Step, other: Step) -> bool:
    return other.state is StepState.COMPLETE or attempt.unchanged_for >= RIVAL_GRACE


def is_abandoned(step: Step, snapshot: Snapshot) -> bool:
    """Return whether an earlier generation wrote the step and the trainer has gone back below it."""
    return snapshot.version is not None and (step.step, step.digest) in snapshot.version.abandoned


def is_quarantined(step: Step, snapshot: Snapshot) -> bool:
    return snapshot.version is not None and (step.step, step.digest) in snapshot.version.quarantined


def vacating(snapshot: Snapshot) -> frozenset[int]:
    """Return the steps that a trainer that has gone back below them wants to write again, and what changes them.

    While the old step is there, all that is stored as changes of it is of before, too.
    """
    named = snapshot.hint
    asked = (
        request for request in snapshot.requests if request.kind == "vacate" and is_meant(request, snapshot)
    )
    going = frozenset(request.step for request in asked if named is not None and request.step > named)
    if not going:
        return going
    with_changed = set(going)
    for number in sorted(snapshot.steps):
        if snapshot.steps[number].parent in with_changed:
            with_changed.add(number)
    return frozenset(with_changed)


def is_meant(request: Request, snapshot: Snapshot) -> bool:
    """Return whether the step that a request wants vacated still exists, and was not written again."""
    step = snapshot.steps.get(request.step)
    return step is not None and step.state is not StepState.FILLING and request.digest in ("", step.digest)


def _keep(step: int, rule: str, detail: str) -> Decision:
    return Decision(step, keep=True, rule=rule, detail=detail)


def _remove(step: int, rule: str, detail: str) -> Decision:
    return Decision(step, keep=False, rule=rule, detail=detail)


def _strong_rule(snapshot: Snapshot, policy: DaemonConfig) -> Rule:
    """Return the rule that protects steps: no limit ever removes what it keeps."""
    version, leases, unreadable = snapshot.version, snapshot.leases, snapshot.unreadable
    newest = version.step if version else -1
    previous = version.previous[1] if version and version.previous else None
    full = _kept_full(snapshot, policy.keep_full)
    going = vacating(snapshot)

    def kept(step: Step) -> Iterator[tuple[bool, str, str]]:
        # A generator, so that the rules read as one table and are asked in this order.
        yield not policy.prune, "pruning_off", "pruning is switched off"
        yield not step.is_native and not policy.prune_foreign, "foreign", f"written by {step.layout}"
        yield step.step == newest and not is_abandoned(step, snapshot), "newest_version", ""
        yield bool(unreadable), "unreadable_presence", "; ".join(unreadable)
        yield bool(snapshot.unlisted), "unreadable_directory", "; ".join(snapshot.unlisted)
        yield step.unreadable, "unreadable_step", step.problem
        yield step.step in leases, "leased", ", ".join(leases.get(step.step, ()))
        yield step.step in snapshot.pins, "pinned", _reason(snapshot, step.step)
        yield step.step == snapshot.tracker, "resumed_from", "the trainer's tracker names it"
        yield step.full and bool(snapshot.tracker_problem), "resumed_from", snapshot.tracker_problem
        yield step.later, "later_protocol", step.problem
        yield step.full and step.step in full, "full_checkpoint", _full_detail(policy)
        if step.step in going:
            return
        yield _is_last_good(step, snapshot), "last_good", "the newest version that an engine has shown to run"
        yield _is_rolled_out(step, snapshot), "rolled_out", "engines load it, or will, in their turn"
        is_previous, is_stale = step.step == previous, _is_stale(step, newest, policy)
        is_filling, is_damaged = step.state is StepState.FILLING, step.state is StepState.DAMAGED
        yield is_previous and (policy.keep_previous or not step.full), "previous_version", ""
        yield is_filling and not is_stale, "being_written", step.problem
        yield is_damaged and not is_stale, "damaged_lately", step.problem
        yield step.arriving, "just_sealed", "its writer may be about to resume from it"
        yield not is_filling and _is_ahead(step, newest, snapshot), "not_yet_published", ""
        is_announced = _may_be_announced(step, snapshot, policy)
        yield is_announced, "may_be_announced", "not earlier than the step the marker names"

    def rule(step: Step) -> Decision | None:
        reason = next(((name, detail) for holds, name, detail in kept(step) if holds), None)
        return _keep(step.step, *reason) if reason else None

    return rule


def _is_last_good(step: Step, snapshot: Snapshot) -> bool:
    good = snapshot.version.last_good if snapshot.version else None
    return good is not None and (good.step, good.digest) == (step.step, step.digest)


def _is_rolled_out(step: Step, snapshot: Snapshot) -> bool:
    return snapshot.wave is not None and snapshot.wave.needed().get(step.step) == step.digest


def _reason(snapshot: Snapshot, step: int) -> str:
    pin = snapshot.pins.get(step)
    return pin.reason if pin else ""


def _full_detail(policy: DaemonConfig) -> str:
    return f"one of the newest {policy.keep_full}" if policy.keep_full else "all full checkpoints are kept"


def _kept_full(snapshot: Snapshot, keep: int) -> set[int]:
    """Return the full checkpoints inside the policy; a limit does not count what the trainer has gone back from."""
    full = [step for step in snapshot.steps.values() if step.full]
    if not keep:
        return {step.step for step in full}
    return set(sorted(step.step for step in full if not is_abandoned(step, snapshot))[-keep:])


def _is_ahead(step: Step, newest: int, snapshot: Snapshot) -> bool:
    return step.step > newest and not is_abandoned(step, snapshot)


def _may_be_announced(step: Step, snapshot: Snapshot, policy: DaemonConfig) -> bool:
    """Return whether the trainer names it or may be about to: it may have gone back and sealed this step since.

    The files of a step above the marker do not tell whether it was left behind or has just been written. Once the
    trainer has passed it, or has not moved for long, it was left behind.
    """
    named = snapshot.hint
    # A marker that exists and names no step may be about to name any of them.
    from_here = 0 if named is None and snapshot.marker.problem != "missing" else named
    if from_here is None or step.step < from_here or step.state is not StepState.COMPLETE:
        return False
    return step.step == named or snapshot.marker_stable_for < policy.partial_grace


def _is_stale(step: Step, newest: int, policy: DaemonConfig) -> bool:
    """Return whether nobody will finish or repair a step: a newer one is published, and it is long unchanged."""
    return step.step < newest and step.unchanged_for >= policy.partial_grace


def _weak(
    weak: list[Step], steps: list[Step], snapshot: Snapshot, policy: DaemonConfig
) -> Iterator[Decision]:
    """Decide what no strong rule keeps; the byte budget then removes the oldest of what these rules would leave."""
    last, going = _last_sync(steps, snapshot, policy.keep_last), vacating(snapshot)
    needed = catching_up(snapshot)
    decided = [
        _remove(step.step, "vacated", "the trainer writes it again")
        if step.step in going
        else _weak_decision(step, last, needed, snapshot, policy)
        for step in weak
    ]
    yield from _within_budget(weak, decided, snapshot, policy) if policy.max_bytes else decided


def _within_budget(
    weak: list[Step], decided: list[Decision], snapshot: Snapshot, policy: DaemonConfig
) -> Iterator[Decision]:
    """Return the decisions with those of the budget: the oldest that were to be kept are removed first."""
    going = sum(step.size for step, decision in zip(weak, decided, strict=True) if not decision.keep)
    excess = snapshot.job_size - going - policy.max_bytes
    for step, decision in zip(weak, decided, strict=True):
        if decision.keep and excess > 0:
            yield _remove(step.step, "byte_budget", f"{excess} bytes over {policy.max_bytes}")
            excess -= step.size
        else:
            yield decision


def _last_sync(steps: list[Step], snapshot: Snapshot, keep: int) -> set[int]:
    newest, put_aside = -1, frozenset[tuple[int, str]]()
    if snapshot.version is not None:
        newest, put_aside = snapshot.version.step, snapshot.version.quarantined
    sync = [
        step.step
        for step in steps
        if step.state is StepState.COMPLETE
        and not step.full
        and step.step <= newest
        and not is_abandoned(step, snapshot)
        and (step.step, step.digest) not in put_aside
    ]
    return set(sync[-max(keep, 1) :])


def _weak_decision(
    step: Step, last: set[int], needed: Mapping[int, str], snapshot: Snapshot, policy: DaemonConfig
) -> Decision:
    if is_abandoned(step, snapshot):
        return _remove(step.step, "abandoned", "the trainer resumed from an earlier step")
    if step.state is not StepState.COMPLETE:
        rule = "stale_partial" if step.state is StepState.FILLING else "damaged"
        return _remove(step.step, rule, step.problem)
    if step.step in last:
        return _keep(step.step, "keep_last", f"one of the newest {policy.keep_last} sync steps")
    if policy.keep_every and step.step % policy.keep_every == 0 and not step.full:
        return _keep(step.step, "keep_every", f"a multiple of {policy.keep_every}")
    if step.step in needed:
        return _keep(step.step, "catch_up", needed[step.step])
    return _left_over(step, snapshot, policy)


def _left_over(step: Step, snapshot: Snapshot, policy: DaemonConfig) -> Decision:
    if is_quarantined(step, snapshot):
        return _remove(step.step, "quarantined", "it is in quarantine")
    if step.full:
        return _remove(step.step, "keep_full", f"older than the newest {policy.keep_full}")
    return _remove(step.step, "superseded", f"older than the newest {policy.keep_last}")


def _chains(kept: Mapping[int, Decision], steps: Mapping[int, Step]) -> Iterator[Decision]:
    """Keep every link that a kept delta needs, whatever removed it."""
    seen = set(kept)
    for number, decision in sorted(kept.items(), reverse=True):
        for link in links(number, steps):
            if link in seen:
                break  # what it is stored as changes of has had its turn, or will
            seen.add(link)
            if link in steps:
                yield _keep(link, "chain", f"step {number} ({decision.rule}) is stored as changes of it")


def _maybe_links(
    decided: Mapping[int, Decision | None], snapshot: Snapshot, policy: DaemonConfig
) -> Iterator[Decision]:
    """Keep the steps below a kept one whose manifest cannot be read, in a job that may have deltas.

    A mount in trouble looks like damage. Once nothing has changed for `partial_grace` seconds, it is damage.
    """
    obscure = [
        step.step
        for step in snapshot.steps.values()
        if is_obscure(step) and step.unchanged_for < policy.partial_grace and _is_kept(decided, step.step)
    ]
    highest = max(obscure, default=-1)
    if highest < 0 or not may_have_deltas(snapshot):
        return
    for number in snapshot.steps:
        if number < highest and not _is_kept(decided, number):
            text = f"step {highest} cannot be read now, and may be stored as changes of it"
            yield _keep(number, "chain", text)


def _is_kept(decided: Mapping[int, Decision | None], step: int) -> bool:
    decision = decided.get(step)
    return decision is not None and decision.keep
