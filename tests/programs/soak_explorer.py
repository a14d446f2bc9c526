"""An explorer without a model that goes on and on: soak_explorer.py JOB NAME JOURNAL [OPTION ...]

Each version that it loads it reads twice, under its lease, and compares with the manifest. It ends by SIGTERM. Its
journal has a line for each load, `runs` or `failed`, with when it began and ended on this host's clock, and one for
each version that was refused.
"""

import argparse
import json
import signal
import sys
import threading
import time

import xxhash

from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hooks.callback import CallbackHook
from syncd.errors import SyncdError


class Engine:
    """Takes a version in as a whole or not at all."""

    def __init__(self, journal, hold):
        self._journal, self._hold = journal, hold
        self.label, self._weights = None, []

    def load(self, target):
        began, reason = time.monotonic(), ""
        try:
            for pause in (self._hold, 0.0):
                self._weights = [self._read(target, record) for record in target.shards]
                time.sleep(pause)
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            event = "failed" if reason else "runs"
            self.note(event, target.version.pair, began, sum(r.size for r in target.shards), reason)
        self.label = target.label

    def abort(self, last_good):
        if last_good is not None and last_good.label != self.label:
            self.load(last_good)

    def note(self, event, pair, began, size=0, reason=""):
        line = {"event": event, "pair": pair, "began": began, "ended": time.monotonic(), "bytes": size}
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "reason": reason}) + "\n")

    def _read(self, target, record):
        with open(f"{target.path}/{record.name}", "rb") as file:
            data = file.read()
        if f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}" != record.digest:
            raise OSError(f"{target.path}/{record.name} is not what its manifest says")
        return record.digest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("name")
    parser.add_argument("journal")
    parser.add_argument("--stage")
    parser.add_argument("--ttl", type=float, default=60.0)
    parser.add_argument("--hold", type=float, default=0.1)
    options = parser.parse_args()
    stop, engine = threading.Event(), Engine(options.journal, options.hold)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    hook = CallbackHook(engine.load, lambda: engine.label, abort=engine.abort)
    follow = FollowOptions(stage=options.stage, poll=0.1, ttl=options.ttl, check_every=2.0, stay=True)

    def hear(outcome):
        print(outcome.kind, outcome.pair, outcome.reason, file=sys.stderr, flush=True)
        if outcome.kind == "refused":
            engine.note("refused", outcome.pair, time.monotonic(), reason=outcome.reason)

    with Follower.open(options.job, hook, options.name, follow) as follower:
        follower.run(stop.is_set, hear)


if __name__ == "__main__":
    try:
        main()
    except SyncdError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    except OSError as error:
        raise SystemExit(74) from error
