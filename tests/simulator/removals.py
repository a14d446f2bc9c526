"""I3: what may not be removed, checked at the moment a daemon moves a step to the trash."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from simulator.record import JOB, STATE
from simulator.server import names_in, read_json, step_directories
from simulator.tree import Change, Directory, File, Node, walk
from simulator.world import Process, World
from syncd.config import DaemonConfig
from syncd.daemon.retention import RIVAL_GRACE
from syncd.protocol.layout import FULL_CHECKPOINT, MANIFEST, TRACKER, parse_attempt_name, step_name
from syncd.protocol.receipt import receipts_directory

_PINS = f"{STATE}/pins"
_MARGIN = 0.001


@dataclass
class _Seen:
    """What a presence file says, and since when."""

    directory: str
    changed_at: float
    leases: dict[int, float] = field(default_factory=dict)


class Removals:
    """Judges each removal by what the daemon could have seen when it last looked.

    Args:
        world: The world.
        config: What the daemons were told.
    """

    def __init__(self, world: World, config: DaemonConfig) -> None:
        self._world, self._config = world, config
        self._presences: dict[str, _Seen] = {}
        self._answered: dict[int, float] = {}
        self._gone: dict[int, float] = {}
        """When each step was last taken away."""

    def broken(
        self, process: Process, step: int, directory: Directory, published: dict[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield each rule that a removal breaks, and how."""
        self._gone[step] = self._world.now
        yield from (
            (rule, how) for rule, how in self._rules(process, step, directory, published).items() if how
        )
        for child, node in sorted(_changes_of(step, directory, step_directories(self._world.tree))):
            for rule, how in self._rules(process, child, node, published).items():
                if how:
                    yield "a link of a kept chain stays", f"{rule}: step {child}: {how}"

    def attempt_broken(self, process: Process, name: str, directory: Directory) -> str:
        """Return what speaks against removing an attempt to write a step, empty for nothing."""
        # The attempt itself is asked for by the rename, too: its receipts are by who examines it.
        step, looked = parse_attempt_name(name) or 0, visited(process, receipts_directory(f"{JOB}/{name}"))
        is_sealed = self._world.tree.find(f"{JOB}/{step_name(step)}/{MANIFEST}") is not None
        if is_sealed or self._gone.get(step, float("-inf")) > looked:
            return ""
        changed = max([directory.changed_at, *(_changed_at(node) for _, node in walk(directory))])
        idle, least = looked - changed, min(RIVAL_GRACE, self._config.partial_grace)
        return f"changed {idle:.1f} s before" if idle < least - _MARGIN else ""

    def presence(self, where: str, change: Change) -> None:
        """Take note of a change in a directory of presences."""
        name = change.name.removesuffix(".json")
        if change.name.startswith(".") or not isinstance(change.after, File):
            if not change.name.startswith("."):
                self._presences.pop(name, None)
            return
        now, leases = self._world.now, json.loads(change.after.data)["leases"]
        before = self._presences.get(name, _Seen(where, now)).leases
        self._presences[name] = _Seen(where, now, {step: before.get(step, now) for step in leases})

    def answered(self, change: Change) -> None:
        """Take note of a request that goes: who has just read it may still act on it."""
        if change.after is None and isinstance(change.before, File) and change.name[0] != ".":
            self._answered[json.loads(change.before.data)["step"]] = self._world.now

    def forget(self) -> None:
        """Forget all leases: the power was cut, and everybody starts anew."""
        self._presences.clear()

    def _rules(
        self, process: Process, step: int, directory: Directory, published: dict[str, Any]
    ) -> dict[str, str]:
        """Return what each rule says against removing a step, empty for nothing."""
        return {
            "the newest version stays": _newest(step, directory, published),
            "the last good version stays": _last_good(step, directory, published),
            "the previous version stays": self._previous(process, step, directory, published),
            "a pinned step stays": self._pinned(process, step),
            "a leased step stays": self._leased(process, step),
            "a full checkpoint inside its policy stays": self._full(process, step, directory, published),
            "a step being written stays": self._written(process, step, directory, published),
        }

    def _previous(self, process: Process, step: int, directory: Directory, published: dict[str, Any]) -> str:
        previous, looked = published.get("previous"), visited(process, f"{STATE}/requests")
        # A step is vacated with what is stored as changes of it.
        chain = self._chain(step, directory)
        asked = any(self._answered.get(link, float("-inf")) > looked for link in chain) or any(
            request["kind"] == "vacate" and request["step"] in chain for request in self._requests()
        )
        return f"{previous}" if previous and previous["step"] == step and not asked else ""

    def _chain(self, step: int, directory: Directory) -> set[int]:
        """Return a step that was in a directory, and what it is stored as changes of."""
        file, found = directory.children.get(MANIFEST), {step}
        manifest = json.loads(file.data) if isinstance(file, File) else None
        while manifest and manifest["delta"]:
            found.add(manifest["delta"]["parent"])
            manifest = read_json(
                self._world.tree, f"{JOB}/{step_name(manifest['delta']['parent'])}/{MANIFEST}"
            )
        return found

    def _pinned(self, process: Process, step: int) -> str:
        file = self._world.tree.find(f"{_PINS}/global_step_{step}.json")
        if not isinstance(file, File):
            return ""
        return "pinned" if file.linked_at < visited(process, _PINS) else ""

    def _leased(self, process: Process, step: int) -> str:
        for name, seen in self._presences.items():
            looked = visited(process, seen.directory)
            since = seen.leases.get(step, float("inf"))
            # What came after the look is looked at once more after the rename, and put back.
            if since < looked and 0 <= looked - seen.changed_at < self._config.ttl:
                return f"{name} since {since:.4f}, beat {seen.changed_at:.4f}, looked {looked:.4f}"
        return ""

    def _full(self, process: Process, step: int, directory: Directory, published: dict[str, Any]) -> str:
        looked = visited(process, f"{JOB}/global_step_{step}")
        # What changed after the last look is looked at once more after the rename, and put back.
        if FULL_CHECKPOINT not in directory.children or directory.changed_at > looked:
            return ""
        tracker = self._world.tree.find(f"{JOB}/{TRACKER}")
        if isinstance(tracker, File) and tracker.data == str(step).encode() and tracker.linked_at < looked:
            return "the trainer resumes from it"
        keep, abandoned = self._config.keep_full, {number for number, _ in published["abandoned"]}
        if keep and step in abandoned:
            return ""
        there = step_directories(self._world.tree).items()
        later = [number for number, node in there if FULL_CHECKPOINT in node.children and number > step]
        return f"later ones are {later}, {keep} are kept" if not keep or len(later) < keep else ""

    def _written(self, process: Process, step: int, directory: Directory, published: dict[str, Any]) -> str:
        if MANIFEST in directory.children:
            return ""
        if step > published["step"]:
            return "later than the newest version"
        idle = visited(process, f"{JOB}/global_step_{step}") - directory.changed_at
        return f"changed {idle:.1f} s before" if 0 < idle < self._config.partial_grace - _MARGIN else ""

    def _requests(self) -> list[dict[str, Any]]:
        place = f"{STATE}/requests"
        found = [read_json(self._world.tree, f"{place}/{name}") for name in names_in(self._world.tree, place)]
        return [request for request in found if request]


def _newest(step: int, directory: Directory, published: dict[str, Any]) -> str:
    if not published:
        return "nothing is published"
    return "it is" if published["step"] == step and _digest(directory) == published["digest"] else ""


def _last_good(step: int, directory: Directory, published: dict[str, Any]) -> str:
    good = published.get("last_good")
    return "it is" if good and good["step"] == step and _digest(directory) == good["digest"] else ""


def _changes_of(step: int, directory: Directory, steps: dict[int, Directory]) -> list[tuple[int, Directory]]:
    """Return the deltas that are stored as changes of a step, and of each other."""
    found, links = [], {(step, _digest(directory))}
    for number, node in sorted(steps.items()):
        manifest = node.children.get(MANIFEST)
        document = json.loads(manifest.data) if isinstance(manifest, File) else {}
        delta = document.get("delta")
        if delta and (delta["parent"], delta["parent_digest"]) in links:
            links.add((number, document["digest"]))
            found.append((number, node))
    return found


def _digest(directory: Directory) -> str | None:
    manifest = directory.children.get(MANIFEST)
    return json.loads(manifest.data)["digest"] if isinstance(manifest, File) else None


def _changed_at(node: Node) -> float:
    return node.changed_at if isinstance(node, Directory) else node.linked_at


def visited(process: Process, path: str) -> float:
    """Return when a process last asked for a path."""
    return process.visited.get(path, float("-inf"))
