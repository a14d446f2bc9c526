"""Sixteen explorers in processes of their own: one is killed and one stopped for a while, each within a load."""

import contextlib
import json
import os
import signal
import time
from collections import defaultdict

import numpy as np
import pytest
from programs.light_engine import read_journal
from support import checker, forked

from syncd.protocol.layout import Job
from syncd.protocol.presence import path_of, read_presence
from syncd.synchronizer import Synchronizer

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NAMES = [f"e{number}" for number in range(16)]
KILLED, STOPPED = "e3", "e7"
OTHERS = [name for name in NAMES if name not in (KILLED, STOPPED)]
TTL = 10.0
HANG_AT = 3
_LONG = 120.0


class Run:
    """A job with a daemon, a trainer in this process and sixteen explorers."""

    def __init__(self, place, stack):
        self.place, self.root = place, f"{place}/job"
        os.mkdir(self.root)
        self.job, self.step, self.lies = Job.at(self.root), 0, []
        settings = ("--keep-last", "1", "--trash-grace", "0", "--ttl", str(TTL))
        self.daemon = self._start(stack, "daemon", "-m", "syncd", "watch", self.root, *settings)
        self.trainer = stack.enter_context(Synchronizer.open(self.root, "trainer", poll=0.01))
        self.explorers = {name: self._explore(stack, name) for name in NAMES}

    def _explore(self, stack, name):
        more = ("--hang-at", str(HANG_AT)) if name in (KILLED, STOPPED) else ("--hold", "0.05")
        program = (f"{TESTS}/programs/explore.py", self.root, name, self.path(name))
        return self._start(
            stack, name, *program, "--ttl", str(TTL), "--poll", "0.05", "--limit", "100", *more
        )

    def _start(self, stack, name, *argv):
        made = forked.start(f"{self.place}/{name}.log", {}, *argv)
        stack.callback(made.end)
        return made

    def path(self, name):
        return f"{self.place}/{name}.journal"

    def lines(self, name, event):
        return [line for line in read_journal(self.path(name)) if line["event"] == event]

    def publish(self):
        """Publish the next step, and look whether anybody says more than is true."""
        self.step += 1
        self.trainer.set_model_state_dict({"w": np.full((64, 64), self.step, np.float32)}, self.step)
        self.until(lambda: (checker.pair(self.root) or (0, 0))[1] == self.step)
        self.lies += [wrong for name in NAMES if (wrong := self.lie(name))]

    def lie(self, name):
        """Return a version that an explorer says that it runs and that its engine has never had."""
        presence = self.presence(name)
        applied = presence and presence.applied
        had = [tuple(line["pair"]) for line in self.lines(name, "runs")]  # read later than what is said
        return f"{name}: {applied}, had {had}" if applied and applied not in had else None

    def presence(self, name):
        with contextlib.suppress(FileNotFoundError):
            return read_presence(self.job.disk, path_of(self.job.explorers, name))
        return None

    def events(self, name=None, **fields):
        with open(f"{self.root}/.syncd/events.jsonl", encoding="utf-8") as file:
            found = [json.loads(line) for line in file]
        return [
            event
            for event in found
            if name in (None, event["event"]) and all(event.get(key) == fields[key] for key in fields)
        ]

    def until(self, condition):
        deadline = time.monotonic() + _LONG
        while not condition():
            assert time.monotonic() < deadline, self.report()
            assert self.daemon.poll() is None, self.report()
            time.sleep(0.02)

    def report(self):
        ends = [f"daemon ended with {self.daemon.poll()}"]
        for name in ("daemon", *NAMES):
            with open(f"{self.place}/{name}.log", encoding="utf-8", errors="replace") as file:
                ends.append(f"--- {name}\n{file.read()[-600:]}")
        return "\n".join(ends)


@pytest.mark.slow
@pytest.mark.fault("a step is pruned while it is read")
@pytest.mark.fault("a dead explorer counts for ever")
def test_a_killed_and_a_stopped_explorer_do_not_delay_the_other_fourteen(tmp_path, record_line):
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.until(lambda: all(run.presence(name) for name in NAMES))
        dead, asleep = strike(run)
        last_of(run, dead, asleep)
        os.kill(run.explorers[STOPPED].pid, signal.SIGCONT)
        finish(run)
        check(run, record_line)


def strike(run):
    """Publish until both victims are in the middle of a load; kill one, stop the other; return what they lease."""

    def hangs(name):
        return len(run.lines(name, "load")) >= HANG_AT

    def has_met(name):
        loads = run.lines(name, "load")
        return hangs(name) or (loads and loads[-1]["pair"][1] == run.step)

    while not (hangs(KILLED) and hangs(STOPPED)):
        run.publish()
        run.until(lambda: has_met(KILLED) and has_met(STOPPED))
    run.explorers[KILLED].kill()
    run.explorers[KILLED].wait()
    os.kill(run.explorers[STOPPED].pid, signal.SIGSTOP)
    return tuple(run.lines(name, "load")[-1]["pair"][1] for name in (KILLED, STOPPED))


def last_of(run, dead, asleep):
    """Publish on until what the victims leased is gone; the others go on meanwhile."""
    applied = {name: len(run.lines(name, "runs")) for name in OTHERS}

    def is_over():
        run.publish()
        time.sleep(0.7)
        return not {dead, asleep} & set(checker.steps(run.root))

    run.until(is_over)
    run.until(
        lambda: all(len(run.lines(name, "runs")) > applied[name] + 2 or run.publish() for name in OTHERS)
    )


def finish(run):
    """Let the stopped one go on with its load; publish the last version, and end."""
    with open(f"{run.path(STOPPED)}.go", "w", encoding="ascii"):
        pass
    run.publish()
    run.trainer.close()
    codes = {name: run.explorers[name].wait(_LONG) for name in NAMES}
    assert codes == {**dict.fromkeys(NAMES, 0), KILLED: -signal.SIGKILL}, run.report()
    run.daemon.terminate()
    assert run.daemon.wait(_LONG) == 0


def check(run, record_line):
    assert not run.lies
    newest = checker.pair(run.root)
    for name in [*OTHERS, STOPPED]:
        ran = [tuple(line["pair"]) for line in run.lines(name, "runs")]
        assert ran == sorted(set(ran)), f"{name} went back"
        assert ran[-1] == newest == run.presence(name).applied
        assert name == STOPPED or not run.lines(name, "kept")
    events = run.events()
    check_nothing_leased_was_removed(run, events)
    check_time_outs(run, events, record_line)


def check_nothing_leased_was_removed(run, events):
    """Between an engine's `load` and its `runs` its explorer holds a lease, unless it counts as dead."""
    removed = defaultdict(list)
    for event in events:
        if event["event"] == "step_pruned":
            removed[event["step"]].append(event["at"])
    assert len(removed) > 5
    for name in OTHERS:
        begun = run.lines(name, "load")
        done = {tuple(line["pair"]): line["at"] for line in run.lines(name, "runs")}
        # What is not there was overtaken between the choice and the lease; a load that had begun always ended well.
        assert {tuple(line["pair"]) for line in begun} == set(done), run.report()
        for line in begun:
            generation, step = line["pair"]
            held = (line["at"], done[generation, step])
            assert not [at for at in removed[step] if held[0] <= at <= held[1]], (name, step)


def check_time_outs(run, events, record_line):
    """What the dead leased went once they counted as dead, and not before."""
    order = [(event["event"], event.get("explorer", event.get("step"))) for event in events]
    for name in (KILLED, STOPPED):
        step = next(line["pair"][1] for line in run.lines(name, "load")[HANG_AT - 1 :])
        assert order.index(("explorer_died", name)) < order.index(("step_pruned", step))
    load = run.lines(STOPPED, "load")[HANG_AT - 1]["at"]
    died = {name: run.events("explorer_died", explorer=name)[0]["at"] for name in (KILLED, STOPPED)}
    assert died[STOPPED] - load >= TTL
    published = [one for one in run.events("version_published") if load < one["at"] < died[STOPPED]]
    assert published, "others went on before the stopped one counted as dead"
    record_line(
        f"16 explorers, {run.step} versions: the killed one counted as dead after {died[KILLED] - load:.1f} s, "
        f"the stopped one after {died[STOPPED] - load:.1f} s (ttl {TTL:g} s); {len(published)} versions meanwhile"
    )
