"""The steps of a job as plain data: what `ls --json` prints. docs/json.md documents every field."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from syncd.daemon.policy import Policy
from syncd.daemon.retention import Decision
from syncd.daemon.snapshot import Snapshot
from syncd.protocol.step import Step
from syncd.views.look import Look

Document = dict[str, Any]


def listing(look: Look, decisions: Iterable[Decision], policy: Policy) -> Document:
    """Return everything that `syncd ls` shows.

    Args:
        look: The look.
        decisions: What retention decides of each step.
        policy: By which policy.
    """
    snapshot = look.snapshot
    decided = {decision.step: decision for decision in decisions}
    rows = [_row(snapshot, snapshot.steps[number], decided[number]) for number in sorted(snapshot.steps)]
    return {
        "job": look.job.root,
        "at": look.at,
        "policy": {**asdict(policy.retention), "prune": policy.prune, "prune_foreign": policy.prune_foreign},
        "steps": rows,
    }


def _row(snapshot: Snapshot, step: Step, decision: Decision) -> Document:
    return {
        "step": step.step,
        "directory": step.directory,
        "layout": step.layout,
        "state": step.state.value,
        "kind": step.kind,
        "full": step.full,
        "present": step.present,
        "expected": step.expected,
        "shards": step.shards[0] if step.shards else step.present,
        "shards_expected": step.shards[1] if step.shards else step.expected,
        "bytes": step.size,
        "digest": step.digest,
        "parent": step.parent,
        "published": _published(snapshot, step.step),
        "leases": list(snapshot.leases.get(step.step, ())),
        "pinned": step.step in snapshot.pins,
        "problem": step.problem,
        "keep": decision.keep,
        "rule": decision.rule,
        "detail": decision.detail,
    }


def _published(snapshot: Snapshot, step: int) -> str | None:
    version = snapshot.version
    if version is None:
        return None
    places: Mapping[int | None, str] = {
        version.previous[1] if version.previous else None: "previous",
        version.step: "newest",
    }
    return places.get(step)
