"""An engine without a model: it holds the digests of the bytes that it has read, and writes down what it does.

Its journal has a JSON line for each event: `load` (a version is being read, under its lease), `runs` (the engine has
it now), `kept` (a load failed before it had changed anything).
"""

import json
import os
import time

import xxhash

HANG = 60.0


class LightEngine:
    """Takes a version in as a whole or not at all.

    Args:
        journal: The file that is appended to.
        hold: Seconds between the two times that it reads each leased file.
        hang_at: The load, counted from 1, that goes on only once `<journal>.go` is there.
    """

    def __init__(self, journal, hold=0.0, hang_at=None):
        self._journal, self._hold, self._hang_at = journal, hold, hang_at
        self._loads = 0
        self.label, self.weights = None, ["start"]

    def load(self, target):
        """Read every byte, and once more while the lease still holds; then it is what this engine runs."""
        self._note("load", target)
        self._loads += 1
        found = self._read(target)
        self._wait()
        if self._read(target) != found or found != [record.digest for record in target.shards]:
            raise OSError(f"{target.path} is not what its manifest says")
        self.label, self.weights = target.label, found
        self._note("runs", target)

    def abort(self, last_good):
        """Go on with what it runs: a load that failed has changed nothing."""
        if last_good is not None and last_good.label != self.label:
            self.load(last_good)

    def _read(self, target):
        found = []
        for record in target.shards:
            with open(f"{target.path}/{record.name}", "rb") as file:
                found.append(f"xxh3_128:{xxhash.xxh3_128_hexdigest(file.read())}")
        return found

    def _wait(self):
        time.sleep(self._hold)
        deadline = time.monotonic() + HANG
        while self._loads == self._hang_at and not os.path.exists(f"{self._journal}.go"):
            if time.monotonic() > deadline:
                raise TimeoutError("nobody said go")
            time.sleep(0.02)

    def _note(self, event, target):
        line = {"event": event, "pair": target.version.pair, "path": target.path, "at": time.time()}
        with open(self._journal, "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


def read_journal(path):
    """Return the lines of a journal; the last one may be half written."""
    try:
        with open(path, encoding="ascii") as file:
            return [json.loads(line) for line in file.read().split("\n")[:-1]]
    except FileNotFoundError:
        return []
