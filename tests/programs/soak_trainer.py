"""A trainer without a model that goes on and on: soak_trainer.py JOB JOURNAL [--pause S] [--back N] [--size BYTES]

It goes on where the marker is, or N steps before that; what is in its way there it has taken away. Saves that fail
are tried again. It ends by SIGTERM. Its journal says what it announced, and each attempt that failed.
"""

import argparse
import json
import signal
import threading
import time

from support import checker
from write_steps import write_step

from syncd.errors import SyncdError
from syncd.protocol.version import read_marker
from syncd.synchronizer import Synchronizer

TRY_AGAIN = 0.5
PATIENCE = 20.0


class Trainer:
    """Announces step after step."""

    def __init__(self, sync, options, stop):
        self._sync, self._options, self._stop = sync, options, stop
        self._journal = options.journal

    def run(self):
        if self._options.back:
            self._insist(self._go_back)
        step = self._newest()
        while not self._stop.is_set():
            step += 1
            self._insist(lambda step=step: self._make_way(step))
            self._insist(lambda step=step: self._bring_out(step))
            self._stop.wait(self._options.pause)

    def _newest(self):
        return read_marker(self._sync.job.disk, self._sync.job.marker).step or 0

    def _go_back(self):
        newest = self._newest()
        older = [step for step in checker.sealed(self._sync.job.root) if step < newest][-self._options.back :]
        if older:
            self._sync.set_model_state_dict(None, older[0], rewind=True)
            self._note("rewound", older[0])

    def _make_way(self, step):
        self._sync.vacate(step, timeout=PATIENCE)
        self._ready = None

    def _bring_out(self, step):
        if self._ready is None:
            self._ready = write_step(self._sync.job, step, 2, self._options)
        self._sync.set_model_state_dict(None, step)
        self._note("announced", step)

    def _insist(self, work):
        """Do something until it works."""
        while not self._stop.is_set():
            try:
                return work()
            except (SyncdError, OSError) as error:
                self._note("failed", None, reason=f"{type(error).__name__}: {error}")
                self._stop.wait(TRY_AGAIN)
        return None

    def _note(self, event, step, **more):
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "step": step, "at": time.monotonic(), **more}) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("journal")
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--back", type=int, default=0)
    parser.add_argument("--size", type=int, default=1 << 16)
    parser.add_argument("--ttl", type=float, default=60.0)
    options = parser.parse_args()
    options.broken, stop = None, threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Synchronizer.open(options.job, "trainer", poll=0.1, ttl=options.ttl) as sync:
        Trainer(sync, options, stop).run()


if __name__ == "__main__":
    try:
        main()
    except SyncdError as error:
        raise SystemExit(error.exit_code) from error
    except OSError as error:
        raise SystemExit(74) from error
