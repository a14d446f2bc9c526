"""The simulator can fail: each known bug, put into production code, is caught by a bounded number of schedules."""

import contextlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from simulator import chain_explorer, explorer, follower
from simulator.deeds import Deed
from simulator.disk import SimDisk
from simulator.schedule import run_schedule

from syncd.daemon import plan as planning
from syncd.daemon import retention, scan, scan_steps, service
from syncd.daemon.leader import DaemonLeader
from syncd.daemon.snapshot import Snapshot
from syncd.daemon.trash import Trash
from syncd.protocol import takeover, version
from syncd.protocol.disk import remove_tree
from syncd.protocol.step import StepState
from syncd.protocol.writer import StepWriter

pytestmark = pytest.mark.slow

BOUND = 2500


def assert_caught(*invariants: str, first: int, deeds: frozenset[Deed] = frozenset()) -> None:
    """Run schedules until one of these invariants fails; others may fail before.

    Args:
        *invariants: How their texts begin.
        first: The seed that caught it the last time, only to save time: all are tried if it does no more.
        deeds: What the schedules contain beyond faults of single calls.
    """
    seen = Counter()
    for seed in (first, *range(1, BOUND + 1)):
        failure = run_schedule(seed, deeds=deeds).failure
        if failure is not None and failure[0].startswith(invariants):
            return
        seen[failure] += 1
    pytest.fail(f"not caught in {BOUND} schedules, but {seen}")


def test_publishing_an_incomplete_step_is_caught(monkeypatch):
    def examine(disk, root, number, directory):
        step = original(disk, root, number, directory)
        if step is None:
            return None
        return replace(step, state=StepState.COMPLETE, payload=f"{step.directory}/actor", digest="sha256:00")

    original = scan_steps.examine_attempt
    monkeypatch.setattr(scan_steps, "examine_attempt", examine)
    monkeypatch.setattr(service, "problems_of", lambda *_: [])
    monkeypatch.setattr(SimDisk, "sync_directory", lambda *_: None)
    assert_caught("I1", first=2)


def test_trusting_the_marker_blindly_is_caught(monkeypatch):
    def plan(snapshot, policy, mirrored=None):
        step = snapshot.steps.get(snapshot.hint)
        if step is not None and step.state is StepState.FILLING:
            step = replace(
                step, state=StepState.COMPLETE, payload=f"{step.directory}/actor", digest="sha256:00"
            )
            snapshot = replace(snapshot, steps={**snapshot.steps, step.step: step})
        return original(snapshot, policy, mirrored)

    original = planning.plan
    monkeypatch.setattr(service, "plan", plan)
    monkeypatch.setattr(service, "problems_of", lambda *_: [])
    assert_caught("I1", first=17)


def test_pruning_a_leased_step_is_caught(monkeypatch):
    monkeypatch.setattr(Snapshot, "leases", property(lambda _: {}))
    monkeypatch.setattr(Trash, "_claimed", lambda *_: None)
    assert_caught("I3 a leased step stays", first=1)


def test_pruning_the_previous_version_is_caught(monkeypatch):
    def decide(snapshot, policy):
        if snapshot.version is not None:
            snapshot = replace(snapshot, version=replace(snapshot.version, previous=None))
        return original(snapshot, policy)

    original = retention.decide
    monkeypatch.setattr(planning, "decide", decide)
    assert_caught("I3 the previous version stays", first=7)


def test_pruning_the_last_good_version_is_caught(monkeypatch):
    monkeypatch.setattr(retention, "_is_last_good", lambda *_: False)
    assert_caught("I3 the last good version stays", first=9)


def test_an_amendment_that_names_another_version_is_caught(monkeypatch):
    def amend(self, before, given):
        return original(self, before, replace(given, digest="sha256:00"))

    original = DaemonLeader.amend
    monkeypatch.setattr(DaemonLeader, "amend", amend)
    assert_caught("I10", first=1)


def test_pruning_a_step_that_the_trainer_writes_again_is_caught(monkeypatch):
    """A request to vacate that also means what is written in the place of the step it was made for."""
    monkeypatch.setattr(retention, "is_meant", lambda request, snapshot: request.step in snapshot.steps)
    monkeypatch.setattr(planning, "is_meant", lambda request, snapshot: request.step in snapshot.steps)
    monkeypatch.setattr(Trash, "_changed", lambda *_: None)
    assert_caught("I3", "I7", first=361)


def test_removing_a_step_on_an_outdated_scan_is_caught(monkeypatch):
    """Removing a step without looking once more what it is: it may have become a full checkpoint."""
    monkeypatch.setattr(Trash, "_changed", lambda *_: None)
    assert_caught("I3 a full checkpoint inside its policy stays", "I3 a step being written stays", first=361)


def test_leading_without_fencing_is_caught(monkeypatch):
    monkeypatch.setattr(takeover, "fence_below", lambda *_: ())
    assert_caught("I5 a deposed leader does nothing", first=29)


def test_a_rewind_without_a_new_generation_is_caught(monkeypatch):
    def publish(self, given):
        with contextlib.suppress(Exception):
            current = version.read_version(self._job)
            given = replace(given, generation=current.generation if current else given.generation)
        stamped = replace(given, term=self.term.token, published_at=0.0)
        self.term.publish(self._job.version, version.encode_version(stamped))
        return stamped

    monkeypatch.setattr(DaemonLeader, "publish", publish)
    assert_caught("I2", first=1)


def test_sealing_over_a_sealed_step_is_caught(monkeypatch):
    """A writer that clears the way for its rename."""

    def become_step(self):
        remove_tree(self.job.disk, self.sealed_path)
        original(self)

    original = StepWriter._become_step
    monkeypatch.setattr(StepWriter, "_become_step", become_step)
    assert_caught("I9 what is sealed does not change", first=9, deeds=frozenset({Deed.ZOMBIE}))


def test_removing_an_attempt_being_written_is_caught(monkeypatch):
    monkeypatch.setattr(planning, "lost_attempts", lambda snapshot, _: tuple(unsealed(snapshot)))
    assert_caught("I3 an attempt being written stays", first=2)


def unsealed(snapshot):
    return [step for step in (*snapshot.steps.values(), *snapshot.rivals) if step.is_attempt]


def test_following_an_abandoned_step_is_caught(monkeypatch):
    """A trainer's marker that goes back is ignored."""

    def against(newest, published, snapshot, policy):
        return original(newest, published, snapshot, policy) if newest.step > published.step else None

    original = planning._against
    monkeypatch.setattr(planning, "_against", against)
    assert_caught("I7 everything comes right", first=52)


def test_a_missing_directory_sync_is_caught(monkeypatch):
    def sync_directory(self, path):
        if "global_step_" not in path:
            original(self, path)

    original = SimDisk.sync_directory
    monkeypatch.setattr(SimDisk, "sync_directory", sync_directory)
    assert_caught("I1 a published step is complete", first=129)


def test_a_missing_file_sync_is_caught(monkeypatch):
    monkeypatch.setattr(SimDisk, "_write", unsynced)
    assert_caught("I1 a published step is complete", first=5)


def unsynced(self, path, data):
    """Write as `SimDisk` does, but sync nothing of a step."""
    made = []
    self._change("create", path, lambda directory, name: made.append(self._tree.create(directory, name)))
    for part in (data,) if isinstance(data, bytes) else data:
        self._machine.step("write", path)
        self._tree.write(made[0], made[0].data + part)
    if "global_step_" not in path:
        made[0].durable = made[0].data


def test_writing_shards_into_a_sealed_step_is_caught(monkeypatch):
    """Shards that get their names in the step itself, whoever writes them."""

    def write(self, name, data, tensors=0):
        content = data if isinstance(data, bytes) else b"".join(data)
        with contextlib.suppress(OSError):
            self.job.disk.read(f"{self.sealed_path}/manifest.json")
            self.job.disk.replace(f"{self.sealed_path}/{name}", content)
        return original(self, name, content, tensors)

    original = StepWriter.write
    monkeypatch.setattr(StepWriter, "write", write)
    assert_caught("I9 what is sealed does not change", first=13, deeds=frozenset({Deed.ZOMBIE}))


class Anything(str):
    """A digest that every other one equals."""

    __slots__ = ()

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = str.__hash__


def test_a_reader_that_ignores_digests_is_caught(monkeypatch):
    for reader in (explorer, follower):
        monkeypatch.setattr(reader, "digest_bytes", lambda _: Anything())
    assert_caught("I4 confirmed bytes", first=79, deeds=frozenset({Deed.CORRUPT_READS}))


def by_number_alone(monkeypatch):
    """Let all claims have one identity: what tells a term from another is its number alone."""
    monkeypatch.setattr(takeover, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32)))


def test_comparing_terms_by_number_after_a_removed_state_is_caught(monkeypatch):
    by_number_alone(monkeypatch)
    assert_caught("I5 a term has one leader", first=58, deeds=frozenset({Deed.STATE_REMOVED}))


def test_comparing_directories_by_inode_in_a_recreated_job_is_caught(monkeypatch):
    by_number_alone(monkeypatch)
    # Before a directory's birth was compared there was no such function, and this was how it was.
    monkeypatch.setattr(scan, "_is_another", lambda *_: False, raising=False)
    assert_caught("I5 a term has one leader", "I2", first=156, deeds=frozenset({Deed.JOB_REPLACED}))


def test_pruning_a_link_of_a_kept_chain_is_caught(monkeypatch):
    monkeypatch.setattr(retention, "_chains", lambda *_: iter(()))
    monkeypatch.setattr(retention, "_maybe_links", lambda *_: iter(()))
    assert_caught("I3 a link of a kept chain stays", first=49, deeds=frozenset({Deed.DELTAS}))


def test_a_reader_that_applies_nothing_and_proves_nothing_is_caught(monkeypatch):
    monkeypatch.setattr(chain_explorer, "apply", lambda *_: None)
    monkeypatch.setattr(chain_explorer, "digest_bytes", lambda _: Anything())
    assert_caught("I4 confirmed bytes", first=6, deeds=frozenset({Deed.DELTAS}))
