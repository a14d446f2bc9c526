"""Looks at the version all the time, and at every byte of each one that it sees. It knows only docs/protocol.md."""

import contextlib
import threading
import time

from support import checker

EVERY = 0.03
_LOOKS = 3


class Versions:
    """Sees every version of a job, but those that are overtaken within milliseconds.

    Args:
        job: The job directory.
    """

    def __init__(self, job: str) -> None:
        self._job, self._stop = job, threading.Event()
        self.seen = self.overtaken = self.terms = self.generation = 0
        self.wrong: list[str] = []
        self._last: dict | None = None
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, patience: float) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join(patience)

    @property
    def pair(self) -> checker.Pair | None:
        """Return the newest pair that was seen."""
        return (self._last["generation"], self._last["step"]) if self._last else None

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - a checker that has ended finds nothing wrong any more
                self.wrong.append(f"the checker of versions failed: {error!r}")
                return

    def _look(self) -> None:
        try:
            found = checker.version(self._job)
        except ValueError as error:
            self.wrong.append(f"version.json is damaged: {error}")
            return
        if found is None:
            self.wrong += ["version.json has gone"] if self._last else []
        elif found != self._last:
            before, self._last = self._last, found
            self.seen += not is_amended(before, found)
            self.wrong += why_not_after(before, found)
            self._check(found)

    def _check(self, found: dict) -> None:
        """Read every byte of the step that has just been published."""
        pair = found["generation"], found["step"]
        why = None
        for _ in range(_LOOKS):
            why = self._why_not(found)
            if why is None:
                return
            now = None
            with contextlib.suppress(ValueError):
                now = checker.version(self._job)
            if now is None or (now["generation"], now["step"]) != pair:
                self.overtaken += 1  # it may be on its way out by now
                return
            time.sleep(EVERY)
        self.wrong.append(f"version {pair} is announced: {why}")

    def _why_not(self, found: dict) -> str | None:
        if why := checker.why_not_whole(self._job, found["step"]):
            return why
        same = checker.manifest(self._job, found["step"])["digest"] == found["digest"]
        return None if same else "its digest is not that of the manifest"


_AMENDMENTS = ("quarantine", "last_good")
"""Fields that a daemon changes without a new version; its term comes with them."""


def is_amended(before: dict | None, found: dict) -> bool:
    """Return whether it is the same version with other facts about steps."""
    if before is None or all(before.get(name) == found.get(name) for name in _AMENDMENTS):
        return False
    names = (before.keys() | found.keys()) - {*_AMENDMENTS, "term"}
    return all(before.get(name) == found.get(name) for name in names)


def why_not_after(before: dict | None, found: dict) -> list[str]:
    """Return what forbids that one version comes after another, each as it is on disk."""
    if before is None:
        return []
    old, new = ((one["generation"], one["step"]) for one in (before, found))
    wrong = []
    if new <= old and not is_amended(before, found):
        wrong.append(f"the version went from {old} to {new}" if new < old else f"version {new} came twice")
    if found["term"] < before["term"]:
        wrong.append(f"term {found['term']} published {new} after term {before['term']} had published {old}")
    return wrong
