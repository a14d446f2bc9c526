"""The observer who sees the server itself: checks each change of it against what must always hold.

Nothing here calls the code under test; it parses the few fields it needs by itself.
"""

import json
from typing import Any

from simulator.explorer import Loaded
from simulator.record import AWAY, JOB, STATE, Attempt, Record
from simulator.removals import Removals, visited
from simulator.remover import REMOVER
from simulator.sealed import changes_of_sealed
from simulator.server import read_json
from simulator.tree import Change, Directory, File, path_of
from simulator.world import Process, Program, World
from syncd.config import DaemonConfig
from syncd.protocol.disk import is_temporary
from syncd.protocol.layout import MANIFEST, MARKER, parse_attempt_name, parse_step_name, step_name
from syncd.protocol.leadership import BEAT
from syncd.protocol.manifest import Manifest
from syncd.protocol.version import Pair, Version

_TRASH = f"{STATE}/trash/"
_EXPLORERS = f"{STATE}/explorers"
_TRAINERS = f"{STATE}/trainers"
_REQUESTS = f"{STATE}/requests"
_AMENDED = {"quarantine", "last_good", "term"}
"""The fields that a daemon may change without a publish."""

_FORGOTTEN = 86400.0
"""Seconds of silence after which an explorer's file may go."""


class Observer:
    """Watches one world.

    Args:
        world: The world; a violation is its failure.
        record: What was really written.
        config: What the daemons were told.
    """

    def __init__(self, world: World, record: Record, config: DaemonConfig) -> None:
        self._world, self._record, self._config = world, record, config
        self._removals = Removals(world, config)
        self.applied: dict[str, Pair] = {}
        self._publisher, self._published_at, self._term = "", float("inf"), 0
        self._forget_state()
        self._ahead = (float("-inf"), float("-inf"))
        self._own: dict[str, Pair] = {}
        world.tree.watchers.append(self.watch)
        world.after_power_cut.append(self._after_power_cut)

    def watch(self, changes: tuple[Change, ...]) -> None:
        """Check one operation on the server."""
        process = self._world.current
        by_daemon = process is not None and process.program.name.startswith("daemon")
        for change in changes:
            where = path_of(change.directory)
            for how in changes_of_sealed(self._world.tree, change):
                self._fail("I9 what is sealed does not change", f"{process.name if process else '-'}: {how}")
            if where == JOB and f"{JOB}/{change.name}" == STATE and change.before is not None:
                self._forget_state()
                self._removals.forget()
            if where == STATE and change.name == "daemon.lock" and change.after is None:
                self._forget_terms()
            if by_daemon:
                self._check_place(change, where, changes)
            if where == STATE:
                self._in_state(process, change)
            elif where in (_EXPLORERS, _TRAINERS):
                self._removals.presence(where, change)
            elif where == _REQUESTS:
                self._removals.answered(change)
            elif where == JOB and process is not None:
                self._in_job(process, change, changes)

    def confirmed(self, process: Process, version: Version, manifest: Manifest, loaded: Loaded) -> None:
        """Check what an explorer says it has loaded."""
        self._world.counts["loads"] += 1
        attempt = (manifest.step, manifest.attempt)
        if version.step != manifest.step or self._record.contents.get(attempt) != loaded:
            self._fail(
                "I4 confirmed bytes are what was written",
                f"{process.name}: {version.pair} {manifest.attempt}",
            )
        if self._published and version.pair > _pair(self._published):
            return  # it began to load what has been forgotten since
        before = self.applied.get(process.name, (0, 0))
        if version.pair < before:
            self._fail("I2 the pair never decreases", f"{process.name} applies {version.pair} after {before}")
        self.applied[process.name] = version.pair

    def forget_job(self) -> None:
        """Take note that another job is in the place of this one."""
        self._forget_state()
        self._removals.forget()
        self._ahead = (float("-inf"), float("-inf"))
        self.applied.clear()
        self._own.clear()

    def _forget_state(self) -> None:
        """Take note that the state directory has gone: terms begin again, and nobody can know the last version."""
        self._published: dict[str, Any] = {}
        self._forget_terms()
        self._remembering = {program.process for program in self._world.programs if self._remembers(program)}

    def _forget_terms(self) -> None:
        self._highest_term = 0
        self._leaders: dict[int, str] = {}

    def _remembers(self, program: Program) -> bool:
        """Say whether a process has published the last version, or has read of it in the leader's heartbeat."""
        process = program.process
        if process is None or process.name == self._publisher:
            return process is not None
        heartbeat = f"{STATE}/daemon.lock/{self._term:010d}/leader.json"
        return visited(process, heartbeat) > self._published_at + BEAT

    def _fail(self, invariant: str, detail: str) -> None:
        self._world.fail(invariant, detail)

    # --- publishing ---

    def _in_state(self, process: Process | None, change: Change) -> None:
        if change.name != "version.json":
            return
        if process is not None and process.program.name == REMOVER:
            self._forget_state()
            return
        if not isinstance(change.after, File) or process is None:
            self._fail("I6 only what may go is removed", "version.json")
            return
        version = json.loads(change.after.data)
        if self._published and _pair(version) == _pair(self._published):
            self._amended(process, version)
            return
        self._world.counts["publishes"] += 1
        self._check_complete(process, version)
        self._check_order(process, version)
        self._check_term(process, version["term"], "publishes")
        self._published = version
        self._publisher, self._published_at, self._term = process.name, self._world.now, version["term"]

    def _amended(self, process: Process, version: dict[str, Any]) -> None:
        """I10: what is written between two publishes is still the same version."""
        before = self._published
        changed = {name for name in version if version[name] != before.get(name)}
        self._world.counts["amendments"] += 1
        if not changed or not changed <= _AMENDED:
            self._fail("I10 an amended version is the same version", f"{process.name} changes {changed}")
        self._check_term(process, version["term"], "amends")
        self._published = version
        self._term = version["term"]

    def _check_complete(self, process: Process, version: dict[str, Any]) -> None:
        """I1, I8: what is announced is whole, and not abandoned."""
        attempt = self._whole_attempt(version)
        if attempt is None:
            detail = f"{process.name} publishes step {version['step']}"
            self._fail("I1 a published step is complete", detail)
            return
        abandoned_at = self._record.abandoned.get(attempt, float("inf"))
        read_at = visited(process, f"{JOB}/{MARKER}")
        # A marker that was ahead of its step made those below look announced: that was the trainer's fault.
        was_ahead = self._ahead[0] <= read_at <= self._ahead[1]
        if read_at > abandoned_at and version["held_marker"] is None and not was_ahead:
            self._fail("I8 an abandoned step is not newest", f"{process.name} publishes {attempt}")

    def _marked(self, change: Change) -> None:
        """Take note whether the marker is ahead of its step, and since when."""
        step = change.after.data.decode("ascii", "replace") if isinstance(change.after, File) else ""
        if self._world.tree.find(f"{JOB}/global_step_{step}/{MANIFEST}") is None:
            self._ahead = (self._world.now, float("inf"))
        else:
            self._ahead = (self._ahead[0], min(self._ahead[1], self._world.now))

    def _whole_attempt(self, version: dict[str, Any]) -> Attempt | None:
        """Return the attempt that a version names, None if not all of it is there as it was written."""
        step = version["step"]
        manifest = self._json(f"{JOB}/{step_name(step)}/{MANIFEST}")
        if manifest is None or manifest["digest"] != version["digest"]:
            return None
        attempt = (step, manifest["attempt"])
        return attempt if self._is_intact(manifest) else None

    def _is_intact(self, manifest: dict[str, Any]) -> bool:
        """Return whether a step, and each link of its chain, holds what was written into it."""
        directory = self._world.tree.find(f"{JOB}/{step_name(manifest['step'])}")
        if not isinstance(directory, Directory):
            return False
        if not self._record.is_intact(directory, (manifest["step"], manifest["attempt"])):
            return False
        if manifest["delta"] is None:
            return True
        parent = self._json(f"{JOB}/{step_name(manifest['delta']['parent'])}/{MANIFEST}")
        is_parent = parent is not None and parent["digest"] == manifest["delta"]["parent_digest"]
        return is_parent and self._is_intact(parent or {})

    def _check_order(self, process: Process, version: dict[str, Any]) -> None:
        """I2."""
        if not self._published and process not in self._remembering:
            # No daemon that is left has seen what was published before the state directory was removed.
            self._world.forgotten_at = self._world.now
            self.applied.clear()
        before, own = self._published, self._own.get(process.name, (0, -1))
        if _pair(version) <= own:
            self._fail("I2 the pair always grows", f"{process.name}: {_pair(version)} after its own {own}")
        self._own[process.name] = _pair(version)
        if before and _pair(version) <= _pair(before):
            self._fail("I2 the pair always grows", f"{_pair(version)} after {_pair(before)}")
        if before and version["previous"] != {"generation": before["generation"], "step": before["step"]}:
            self._fail("I2 a version names the previous one", f"{version['previous']} after {_pair(before)}")

    def _check_term(self, process: Process, term: int, what: str) -> None:
        """I5."""
        leader = self._leaders.setdefault(term, process.name)
        if leader != process.name:
            self._fail("I5 a term has one leader", f"{process.name} {what} in term {term} of {leader}")
        if term < self._highest_term:
            self._fail(
                "I5 a deposed leader does nothing", f"term {term} {what} after term {self._highest_term} did"
            )
        self._highest_term = max(term, self._highest_term)

    # --- removing ---

    def _check_place(self, change: Change, where: str, changes: tuple[Change, ...]) -> None:
        """I6: a daemon changes only what is its own, moves whole steps, and tidies what writers left long ago."""
        if self._is_left_behind(change) or (where == _EXPLORERS and self._is_long_silent(change)):
            return
        # A host that remembers names still writes into what was moved away: nobody reads it there.
        if where == AWAY or where.startswith(f"{AWAY}/"):
            return
        if where in (_EXPLORERS, _TRAINERS) or (where == STATE and change.name in ("explorers", "trainers")):
            if change.after is None or change.before is not None:
                self._fail("I6 only what may go is removed", f"{where}/{change.name} by a daemon")
        elif where != STATE and not where.startswith(f"{STATE}/"):
            is_step = where == JOB and _is_of_step(change.name)
            is_state = where == JOB and change.name == ".syncd"
            if not (is_step and len(changes) > 1) and not (is_state and change.before is None):
                self._fail("I6 only what may go is removed", f"{where}/{change.name} changed by a daemon")

    def _is_long_silent(self, change: Change) -> bool:
        if change.after is not None or not isinstance(change.before, File):
            return False
        return self._world.now - change.before.linked_at >= _FORGOTTEN

    def _is_left_behind(self, change: Change) -> bool:
        if change.after is not None or not isinstance(change.before, File) or not is_temporary(change.name):
            return False
        return self._world.now - change.before.linked_at >= self._config.partial_grace

    def _in_job(self, process: Process, change: Change, changes: tuple[Change, ...]) -> None:
        if change.name == MARKER:
            self._marked(change)
        if (
            not isinstance(change.before, Directory)
            or change.after is not None
            or not _is_of_step(change.name)
        ):
            return
        if process.program.name.startswith("daemon"):
            self._taken(process, change, change.before, changes)

    def _taken(
        self, process: Process, change: Change, directory: Directory, changes: tuple[Change, ...]
    ) -> None:
        """I3, I5, I6: what a daemon takes goes to its trash, and may go."""
        target = path_of(changes[-1].directory)
        if target.startswith(f"{AWAY}/trash/"):
            return  # its host remembers the state directory that was moved away: nobody removes it from there
        if not target.startswith(_TRASH):
            self._fail("I6 only what may go is removed", f"{change.name} to {target}")
            return
        self._check_term(process, int(target.removeprefix(_TRASH).partition("/")[0]), "removes")
        step = parse_step_name(change.name)
        if step is None:
            self._world.counts["attempts removed"] += 1
            if broken := self._removals.attempt_broken(process, change.name, directory):
                self._fail(
                    "I3 an attempt being written stays", f"{process.name} removes {change.name}: {broken}"
                )
            return
        self._world.counts["prunes"] += 1
        for rule, broken in self._removals.broken(process, step, directory, self._published):
            self._fail(f"I3 {rule}", f"{process.name} removes step {step}: {broken}")

    def _after_power_cut(self) -> None:
        """Check that what is still announced is still whole."""
        self._published = self._json(f"{STATE}/version.json") or {}
        if self._published and self._whole_attempt(self._published) is None:
            self._fail("I1 a published step is complete", f"not after a power cut: {_pair(self._published)}")
        self._removals.forget()

    def _json(self, path: str) -> dict[str, Any] | None:
        return read_json(self._world.tree, path)


def _is_of_step(name: str) -> bool:
    """Say whether a directory of the job is a step, or an attempt to write one."""
    return parse_step_name(name) is not None or parse_attempt_name(name) is not None


def _pair(version: dict[str, Any]) -> Pair:
    return version["generation"], version["step"]
