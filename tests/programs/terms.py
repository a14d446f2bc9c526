"""Processes that want to lead one job, for tests/unit/test_leadership.py. Prints one JSON object a line.

terms.py race JOB TERMS      claims so many terms as if every leader had died, publishes and removes in each
terms.py lead JOB            claims once, then obeys its input: publish, take, beat, release
"""

import json
import os
import sys
import time

from syncd.errors import FencedError, LockHeldError
from syncd.protocol.layout import Job
from syncd.protocol.leadership import Term
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.takeover import Candidate


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


LONGEST = 120.0
"""Seconds after which a race ends in any case."""


def race(root: str, terms: int) -> None:
    job = Job.at(root)
    candidate = Candidate(job, SystemClock(), gone=lambda _: True)
    while not os.path.exists(f"{root}/go"):
        time.sleep(0.001)
    until = time.monotonic() + LONGEST
    while terms > 0 and time.monotonic() < until:
        candidate.holder()
        try:
            term = candidate.claim()
        except LockHeldError:
            continue
        say(what="claimed", token=term.token, at=time.monotonic())
        terms -= 1
        try:
            act(term, until)
        except FencedError:
            say(what="fenced", token=term.token)


def act(term: Term, until: float) -> None:
    """Publish and remove as the leader until a newer one has taken over."""
    for number in range(1_000_000):
        before = time.monotonic()
        if before > until:
            return
        term.publish(f"{term.job.root}/published", b"%d %d" % (term.token, number))
        say(what="published", token=term.token, began=before, ended=time.monotonic())
        before = time.monotonic()
        name = f"{term.token}.{number}"
        term.job.disk.make_directory(f"{term.job.root}/step.{name}")
        term.move_to_trash(f"{term.job.root}/step.{name}", name)
        say(what="took", token=term.token, began=before, name=name)
        if number % 3 == 2:
            return


def lead(root: str) -> None:
    job = Job.at(root)
    candidate = Candidate(job, SystemClock())
    candidate.holder()
    term = candidate.claim()
    say(token=term.token, pid=os.getpid())
    orders = {
        "publish": lambda: term.publish(f"{root}/published", b"%d" % term.token),
        "take": lambda: term.move_to_trash(f"{root}/step", "step"),
        "beat": lambda: term.beat((term.token, 0)),
        "release": term.release,
    }
    for line in sys.stdin:
        try:
            orders[line.strip()]()
        except Exception as error:  # noqa: BLE001 - the test wants its name
            say(error=type(error).__name__)
        else:
            say(error=None)


if __name__ == "__main__":
    race(sys.argv[2], int(sys.argv[3])) if sys.argv[1] == "race" else lead(sys.argv[2])
