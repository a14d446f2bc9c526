"""The steps of a job as plain data: what `ls --json` prints. docs/json.md documents every field."""

from collections.abc import Iterable

from syncd.config import DaemonConfig
from syncd.daemon.retention import Decision
from syncd.daemon.snapshot import Snapshot
from syncd.protocol.step import Step
from syncd.views.documents import Document, changes_of, picked
from syncd.views.job_view import JobView

_POLICY = "keep_last keep_every keep_full max_bytes partial_grace keep_previous prune prune_foreign"


def listing(view: JobView, decisions: Iterable[Decision], policy: DaemonConfig) -> Document:
    snapshot = view.snapshot
    row = _Rows(snapshot)
    decided = {decision.step: decision for decision in decisions}
    rows = [row.of(snapshot.steps[number], decided[number]) for number in sorted(snapshot.steps)]
    return {
        "job": view.job.root,
        "at": view.at,
        "policy": picked(policy, _POLICY),
        "steps": rows,
    }


class _Rows:
    """Makes the rows of a listing; what concerns all steps is read once."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot, self._leases = snapshot, snapshot.leases
        self._quarantine_reasons = {entry.step: entry.reason for entry in snapshot.put_aside}
        self._chains = dict[int, int | None]()

    def of(self, step: Step, decision: Decision) -> Document:
        return {
            **picked(step, "step directory layout"),
            "state": step.state.value,
            **picked(step, "kind full present expected"),
            "shards": step.shards[0] if step.shards else step.present,
            "shards_expected": step.shards[1] if step.shards else step.expected,
            "bytes": step.size,
            **picked(step, "digest parent"),
            **changes_of(self._snapshot, step, self._chains),
            "published": _published(self._snapshot, step.step),
            "leases": list(self._leases.get(step.step, ())),
            "pinned": step.step in self._snapshot.pins,
            "problem": step.problem,
            "quarantined": self._quarantine_reasons.get(step.step),
            **picked(decision, "keep rule detail"),
        }


def _published(snapshot: Snapshot, step: int) -> str | None:
    version = snapshot.version
    if version is not None and step == version.step:
        return "newest"
    return "previous" if version is not None and version.previous and version.previous[1] == step else None
