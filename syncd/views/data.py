"""A look as plain data: what `status --json` prints. docs/json.md documents every field."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from syncd.daemon.report import lag_of
from syncd.daemon.snapshot import Module, Snapshot
from syncd.daemon.symptoms import symptoms
from syncd.protocol.mount import MountState
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import Version, pair_document
from syncd.stall.hostfile import HostFile
from syncd.views.look import Heart, Look

Document = dict[str, Any]

_LONGEST = 4096
"""Characters of what a presence says that are shown."""


def status(look: Look) -> Document:
    """Return everything that `syncd status` shows."""
    snapshot = look.snapshot
    return {
        "job": look.job.root,
        "state_dir": look.job.state,
        "at": look.at,
        "version": _version(look),
        "marker": {
            "step": snapshot.marker.step,
            "text": snapshot.marker.text,
            "problem": snapshot.marker.problem,
        },
        "newest_complete": newest_complete(snapshot),
        "steps": _counts(snapshot),
        "filling": [_filling(step) for step in _by_step(snapshot) if step.state is StepState.FILLING],
        "explorers": [_explorer(look, name) for name in sorted(snapshot.explorers)],
        "trainers": [_trainer(look, name) for name in sorted(snapshot.trainers)],
        "daemon": _daemon(look),
        "disk": _disk(look),
        "requests": [
            {"kind": item.kind, "step": item.step, "reason": item.reason} for item in snapshot.requests
        ],
        "problems": [{"name": name, "detail": detail} for name, detail in problems(look)],
    }


def newest_complete(snapshot: Snapshot) -> int | None:
    """Return the newest step that can be loaded, published or not."""
    complete = (step.step for step in snapshot.steps.values() if step.state is StepState.COMPLETE)
    return max(complete, default=None)


def problems(look: Look) -> list[tuple[str, str]]:
    """Return what is wrong with the job: a stable name, and what it is."""
    found = list(symptoms(look.snapshot))
    found += [("damaged_step", f"step {step.step}: {step.problem}") for step in _damaged(look.snapshot)]
    found += list(look.problems.items())
    found += [("dead", name) for name, heart in sorted(look.hearts.items()) if heart is Heart.DEAD]
    found += [("mount", trouble)] if (trouble := _mount_trouble(look.known)) else []
    heart = look.lead.heart if look.lead else Heart.LEFT
    if heart in (Heart.DEAD, Heart.LEFT):
        found.append(("daemon", "no daemon leads this job"))
    return found


def known(found: HostFile | None, root: str, at: float) -> Document:
    """Return what is known of a job whose mount does not answer: what a daemon of this host has said at last.

    Args:
        found: What it has said, None when there is none.
        root: The job directory.
        at: Now, seconds since the epoch.
    """
    if found is None:
        return {"job": root, "at": at, "known": None}
    age = round(max(at - found.at, 0.0), 3)
    said = {**found.document, "at": found.at, "age": age, "pid": found.process.pid, "runs": found.is_current}
    return {"job": root, "at": at, "known": said}


def _mount_trouble(known: HostFile | None) -> str:
    """Return what a daemon of this host says is wrong with the mount, empty when it says nothing."""
    mount = known.document.get("mount") if known is not None and known.is_current else None
    if not isinstance(mount, dict) or mount.get("state") == MountState.OK:
        return ""
    return f"{mount.get('state')}: {mount.get('detail')}; {mount.get('hint')}"


def _damaged(snapshot: Snapshot) -> list[Step]:
    return [step for step in _by_step(snapshot) if step.state is StepState.DAMAGED]


def _by_step(snapshot: Snapshot) -> list[Step]:
    return [snapshot.steps[number] for number in sorted(snapshot.steps)]


def _version(look: Look) -> Document | None:
    version = look.snapshot.version
    if version is None:
        return None
    return {
        "generation": version.generation,
        "step": version.step,
        "kind": version.kind,
        "path": _place(look, version),
        "layout": version.layout,
        "digest": version.digest,
        "published_at": version.published_at,
        "age": _age(look, version.published_at),
        "previous": pair_document(version.previous),
        "held": version.held_marker is not None and version.held_marker == look.snapshot.marker.text,
        "term": version.term,
    }


def _place(look: Look, version: Version) -> str:
    return version.path if version.kind == "remote" else f"{look.job.root}/{version.path}"


def _age(look: Look, at: float) -> float:
    """Return how long ago a date of another host was, as far as the two clocks agree."""
    return round(max(look.at - at, 0.0), 3)


def _counts(snapshot: Snapshot) -> Document:
    states = Counter(step.state.value for step in snapshot.steps.values())
    return {
        "total": len(snapshot.steps),
        **{state.value: states[state.value] for state in StepState},
        "bytes": snapshot.job_size,
        "pinned": sorted(snapshot.pins),
    }


def _filling(step: Step) -> Document:
    return {
        "step": step.step,
        "present": step.present,
        "expected": step.expected,
        "bytes": step.size,
        "layout": step.layout,
        "problem": step.problem,
    }


def _module(look: Look, module: Module, heart: Heart) -> Document:
    presence = module.presence
    return {
        "id": presence.identity,
        "status": presence.status.value,
        "heart": heart.value,
        "alive": {Heart.ALIVE: True, Heart.UNKNOWN: None}.get(heart, False),
        "beat_age": _age(look, presence.updated_at),
        "host": presence.host,
        "pid": presence.pid,
    }


def _explorer(look: Look, name: str) -> Document:
    module = look.snapshot.explorers[name]
    presence = module.presence
    return {
        **_module(look, module, look.hearts[f"explorer/{name}"]),
        "applied": pair_document(presence.applied),
        "loading": pair_document(presence.loading),
        "lag": lag_of(look.snapshot, module),
        "leases": list(presence.leases),
    }


def _trainer(look: Look, name: str) -> Document:
    module = look.snapshot.trainers[name]
    return {
        **_module(look, module, look.hearts[f"trainer/{name}"]),
        "step": module.presence.step,
        "waiting": _waiting(module.presence),
    }


def _waiting(trainer: Presence) -> Document | None:
    """Return what a trainer says it waits for, None where it says nothing usable."""
    told = trainer.info.get("waiting")
    if trainer.status is RunningStatus.STOPPED or not isinstance(told, Mapping):
        return None
    what, path, since = told.get("for"), told.get("path"), told.get("since")
    if not isinstance(what, str) or not isinstance(path, str) or not isinstance(since, int | float):
        return None
    return {"for": what[:_LONGEST], "path": path[:_LONGEST], "since": float(since)}


def _daemon(look: Look) -> Document | None:
    if look.lead is None:
        return None
    leader = look.lead.leader
    return {
        "heart": look.lead.heart.value,
        "term": look.lead.term,
        "host": leader.host if leader else None,
        "pid": leader.process.pid if leader else None,
    }


def _disk(look: Look) -> Document:
    mount = look.mount
    return {
        "free": look.snapshot.free,
        "job_bytes": look.snapshot.job_size,
        "mount": mount.point,
        "type": mount.type,
        "network": mount.is_network,
    }
