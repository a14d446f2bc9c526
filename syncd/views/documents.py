"""A job as plain data: what `status --json` prints. docs/json.md documents every field."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from syncd.daemon.chains import Lengths, change_figures
from syncd.daemon.snapshot import Module, Snapshot, lag_of
from syncd.errors import CorruptDataError
from syncd.protocol.documents import Fields
from syncd.protocol.engine_state import EngineReport, EngineState, engine_of
from syncd.protocol.mirror_report import mirror_of_presence
from syncd.protocol.presence import Presence, RunningStatus
from syncd.protocol.read_bytes import read_bytes_of
from syncd.protocol.rolling import Wave, at_gate
from syncd.protocol.step import Step, StepState
from syncd.protocol.version import GoodVersion, pair_document
from syncd.stall.host_state import HostFile
from syncd.views import problem_groups
from syncd.views.job_view import Heart, JobView
from syncd.views.problems import LONGEST, by_step, is_followed, is_mirror, problems

Document = dict[str, Any]

STATUS_SCHEMA = 2  # the `schema_version` of what `status` and the page show


def status(view: JobView) -> Document:
    snapshot = view.snapshot
    document = {
        "job": view.job.root,
        "state_dir": view.job.state,
        "at": view.at,
        "version": _version(view),
        "marker": picked(snapshot.marker, "step text problem"),
        "newest_complete": newest_complete(snapshot),
        "steps": _counts(snapshot),
        "filling": [_filling(step) for step in by_step(snapshot) if step.state is StepState.FILLING],
        "explorers": [
            _explorer(view, name) for name in sorted(snapshot.explorers) if not is_mirror(view, name)
        ],
        "trainers": [_trainer(view, name) for name in sorted(snapshot.trainers)],
        "daemon": _daemon(view),
        "rolling": rolling(view),
        "mirror_of": view.mirror_of.source if view.mirror_of else None,
        "mirrors": [_mirror(view, name) for name in sorted(snapshot.explorers) if is_mirror(view, name)],
        "disk": _disk(view),
        "requests": [picked(item, "kind step reason") for item in snapshot.requests],
        "finished": view.end and picked(view.end, "step reason"),
        "problems": [{"name": name, "detail": detail} for name, detail in problems(view)],
    }
    groups = problem_groups.problem_groups(document)
    return {
        **document,
        "problem_groups": groups,
        "next": problem_groups.next_command(document, view.job_file),
    }


def newest_complete(snapshot: Snapshot) -> int | None:
    """Return the newest step that can be loaded, published or not."""
    complete = (step.step for step in snapshot.steps.values() if step.state is StepState.COMPLETE)
    return max(complete, default=None)


def _mirror(view: JobView, name: str) -> Document:
    module = view.snapshot.explorers[name]
    report = mirror_of_presence(module.presence)
    assert report is not None  # `is_mirror` has said so
    shared = _module(view, module, view.hearts[f"explorer/{name}"])
    shown = report.document()
    texts = {key: shown[key][:LONGEST] for key in ("source", "target", "state", "detail")}
    return {**{key: value for key, value in shared.items() if key != "status"}, **shown, **texts}


def has_engine_trouble(explorer: Mapping[str, Any]) -> bool:
    """Return whether the engine of an explorer, as `status` shows it, needs a person's attention."""
    engine = explorer["engine"]
    return engine is not None and EngineState(engine["state"]).is_trouble


def _engine(view: JobView, name: str) -> EngineReport | None:
    """Return what an explorer reports of its engine; one whose explorer is dead is not ready."""
    report = engine_of(view.snapshot.explorers[name].presence)
    return report and replace(report, ready=report.ready and is_followed(view, name))


def last_report(report: HostFile | None, root: str, at: float) -> Document:
    """Return what is known of a job whose mount does not answer: the last report of a daemon of this host, if any.

    `at` is now, in seconds since the epoch.
    """
    if report is None:
        return {"job": root, "at": at, "known": None}
    age = round(max(at - report.at, 0.0), 3)
    said = {
        **report.document,
        "at": report.at,
        "age": age,
        "pid": report.process.pid,
        "runs": report.is_current,
    }
    return {"job": root, "at": at, "known": said}


def _version(view: JobView) -> Document | None:
    version = view.snapshot.version
    if version is None:
        return None
    return {
        **picked(version, "generation step kind"),
        "path": version.path if version.kind == "remote" else f"{view.job.root}/{version.path}",
        **picked(version, "layout digest published_at"),
        **changes_of(view.snapshot, view.snapshot.steps.get(version.step)),
        "age": _age(view, version.published_at),
        "previous": pair_document(version.previous),
        "held": version.held_marker is not None and version.held_marker == view.snapshot.marker.text,
        "term": version.term,
        "quarantine": [entry._asdict() for entry in version.quarantine],
        "last_good": picked(good, "generation step path digest") if (good := version.last_good) else None,
    }


def picked(item: object, names: str) -> Document:
    return {name: getattr(item, name) for name in names.split()}


def _age(view: JobView, at: float) -> float:
    """Return the age of a time that another host noted, as far as the two clocks agree."""
    return round(max(view.at - at, 0.0), 3)


def _counts(snapshot: Snapshot) -> Document:
    states = Counter(step.state.value for step in snapshot.steps.values())
    return {
        "total": len(snapshot.steps),
        **{state.value: states[state.value] for state in StepState},
        "bytes": snapshot.job_size,
        "pinned": sorted(snapshot.pins),
    }


def _filling(step: Step) -> Document:
    return {**picked(step, "step present expected"), "bytes": step.size, **picked(step, "layout problem")}


def _module(view: JobView, module: Module, heart: Heart) -> Document:
    presence = module.presence
    return {
        "id": presence.identity,
        "status": presence.status.value,
        "heart": heart.value,
        "alive": {Heart.ALIVE: True, Heart.UNKNOWN: None}.get(heart, False),
        "beat_age": _age(view, presence.updated_at),
        **picked(presence, "host pid"),
    }


def _explorer(view: JobView, name: str) -> Document:
    module, engine = view.snapshot.explorers[name], _engine(view, name)
    presence = module.presence
    return {
        **_module(view, module, view.hearts[f"explorer/{name}"]),
        "applied": pair_document(presence.applied),
        "loading": pair_document(presence.loading),
        "lag": lag_of(view.snapshot, module),
        "engine": engine and engine.document(),
        "leases": list(presence.leases),
        "read": read.document() if (read := read_bytes_of(presence.info)) else None,
    }


def _trainer(view: JobView, name: str) -> Document:
    module = view.snapshot.trainers[name]
    return {
        **_module(view, module, view.hearts[f"trainer/{name}"]),
        "step": module.presence.step,
        "waiting": _waiting(module.presence),
    }


def _waiting(trainer: Presence) -> Document | None:
    """Return what a trainer reports that it waits for, None if it reports nothing usable."""
    if trainer.status is RunningStatus.STOPPED:
        return None
    try:
        waiting = Fields(trainer.info, "info").record("waiting")
        shown = {key: waiting.text(key)[:LONGEST] for key in ("for", "path")}
        return {**shown, "since": waiting.number("since")}
    except CorruptDataError:
        return None


def _daemon(view: JobView) -> Document | None:
    if view.lead is None:
        return None
    leader = view.lead.leader
    where = {"host": leader.host if leader else None, "pid": leader.process.pid if leader else None}
    return {"heart": view.lead.heart.value, "term": view.lead.term, **where}


def rolling(view: JobView) -> Document | None:
    """Return who may load which version, None where no versions are rolled out."""
    wave = view.snapshot.wave
    if wave is None:
        return None
    versions = {name: pair_document(version.pair) if version else None for name, version in _in_wave(wave)}
    return {
        **picked(wave, "phase"),
        **versions,
        **picked(wave, "by_word why limit unit patience"),
        "stopped": [picked(item, "generation step digest reason") for item in wave.stopped],
        "slots": [_slot(view, name) for name in wave.admitted],
        "waiting": list(wave.waiting),
        "old": list(wave.old),
    }


def _in_wave(wave: Wave) -> Iterator[tuple[str, GoodVersion | None]]:
    yield "candidate", wave.candidate
    yield "approved", wave.approved


def _slot(view: JobView, name: str) -> Document:
    wave, explorer = view.snapshot.wave, view.snapshot.explorers.get(name)
    assert wave is not None  # it has the slot
    slot, gate = wave.admitted[name], at_gate(explorer.presence.info) if explorer else None
    loads = gate is not None and gate.passed
    shown = picked(slot, "generation step since free")
    return {"explorer": name, **shown, "age": _age(view, slot.since), "loads": loads}


def _disk(view: JobView) -> Document:
    snapshot, mount = view.snapshot, view.mount
    location = {"mount": mount.point, "type": mount.type, "network": mount.is_network}
    return {"free": snapshot.free, "job_bytes": snapshot.job_size, **location}


def changes_of(snapshot: Snapshot, step: Step | None, chains: Lengths | None = None) -> Document:
    """Return the figures of a step's delta, and of its shortcut; null for what it has not."""
    changes: Document = {"delta": None, "shortcut": None}
    if step is None or (step.shortcut is None and step.kind != "delta"):
        return changes
    if step.shortcut is not None and step.shortcut.problem:
        shortcut = {**picked(step.shortcut, "parent density problem"), "bytes": step.shortcut.size}
        return {**changes, "shortcut": {**shortcut, "whole_bytes": step.whole_size}}
    figures = change_figures(snapshot.steps, step, chains)
    if figures is None:
        return changes
    shown = {
        **picked(figures, "parent density"),
        "bytes": figures.size,
        "whole_bytes": figures.whole_size,
    }
    if step.kind == "delta":
        return {**changes, "delta": {**shown, "chain": figures.chain}}
    return {**changes, "shortcut": {**shown, "problem": ""}}
