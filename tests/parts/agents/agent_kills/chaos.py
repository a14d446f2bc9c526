"""Kills: who dies next, and when, follows from a seed and from how far the run has come."""

import contextlib
import json
import os
import random
import signal
import time

from agent_kills.parts import SIZE

VICTIMS = ("agent", "gateway", "engine", "writer")
TURNS = 3.3
"""Turns of a rollout, about."""

STALLED = 180.0
"""Seconds without a turn after which a run has failed."""


class StalledError(Exception):
    """Nothing happens any more."""


class JournalTail:
    """Reads what is appended to the gateway's journal; what a start has rewritten is not new."""

    def __init__(self, path):
        self._path, self._inode, self._at = path, 0, 0
        self.turns = 0
        self.moved_at = time.monotonic()

    def read(self):
        """Count new turns, and return the kind of the last record, empty if nothing is new."""
        kind = ""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._at = inode, file.seek(0, os.SEEK_END)
            file.seek(self._at)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            for line in whole.splitlines():
                kind = json.loads(line[: line.find(b",")] + b"}")["kind"]
                self.turns += kind == "turn"
                self.moved_at = time.monotonic()
        return kind


class Chaos:
    """Kills parts of a run until it has ended.

    Args:
        parts: The run.
        kills: How often.
        seed: Of who and when.
    """

    def __init__(self, parts, kills, seed):
        self._parts, self._left, self._chance = parts, kills, random.Random(f"kills {seed}")
        self._tail, self._rollouts = JournalTail(parts.journal), SIZE * len(parts.tasks)
        self.done = dict.fromkeys(VICTIMS, 0)

    def run(self):
        """Kill, and return once the run has ended by itself."""
        while self._left and not self._is_over():
            victim = self._chance.choice(VICTIMS)
            if self._await_moment(victim) and self._kill(victim):
                self.done[victim] += 1
                self._left -= 1
        while not self._is_over():
            self._look(0.02)

    def _is_over(self):
        return self._parts.player.has_ended()

    def _await_moment(self, victim):
        """Wait until some turns were taken, and for the writer until a batch is about to be written."""
        gap = max(TURNS * 0.7 * (self._rollouts - self._parts.written()) / self._left, 1)
        if victim == "gateway" and self._chance.random() < 0.1:
            time.sleep(self._chance.random() / 2)  # also while it starts
            return not self._is_over()
        until = self._tail.turns + self._chance.random() * 2 * gap
        while self._tail.turns < until:
            if self._is_over():
                return False
            self._look(0.005)
        time.sleep(self._chance.random() / 20)
        while victim == "writer" and self._look(0.001) != "batch":
            if self._is_over():
                return False
        if victim == "writer":
            time.sleep(self._chance.random() / 50)
        return True

    def _look(self, pause):
        time.sleep(pause)
        kind = self._tail.read()
        if time.monotonic() - self._tail.moved_at > STALLED:
            raise StalledError(f"no record for {STALLED:g} s")
        return kind

    def _kill(self, victim):
        if victim == "agent":
            return self._kill_agent()
        part = self._parts.engine if victim == "engine" else self._parts.explorer
        if part.has_ended():  # it has ended by itself, which `is_over` or the judge sees
            return False
        part.end()
        part.start()
        return True

    def _kill_agent(self):
        agents = self._parts.player.children()
        if not agents:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._chance.choice(agents), signal.SIGKILL)
            return True
        return False
