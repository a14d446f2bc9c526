"""`syncd follow` as its users run it: real processes over a real job, with an engine in a process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support import matrices
from support.cli import environment, spawn
from support.documents import checked
from support.fake_hook import HALF, RemoteEngine, digest_of
from support.jobs import start, steps_of, write_step
from support.paths import FAKE_HOOK, ROOT, TESTS
from support.waiting import until

from syncd.protocol.layout import Job
from syncd.protocol.manifest import read_manifest
from syncd.protocol.presence import RunningStatus, path_of, read_presence
from syncd.protocol.version import engine_label

pytestmark = pytest.mark.slow

LONG = 60.0
PATHS = os.pathsep.join(map(str, (ROOT, TESTS, FAKE_HOOK)))


class Remote(RemoteEngine):
    """The engine of a test, in a process of its own."""

    def __init__(self):
        command = [sys.executable, str(TESTS / "support" / "fake_hook.py")]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment(PYTHONPATH=PATHS)
        )
        super().__init__(int(self.process.stdout.readline()))
        self.address = f"fake=http://user:secret@127.0.0.1:{self._port}"

    def seen(self):
        return self.call("seen")

    def is_in(self, phase, times):
        return self.seen()["reached"].get(phase, 0) >= times

    def close(self):
        self.process.kill()
        self.process.communicate()


class Bed:
    """A job with its daemon, an engine, and the followers that are started."""

    def __init__(self, root):
        self.job = Job.at(root)
        self.engine = Remote()
        self.stack = contextlib.ExitStack()
        self.stack.callback(self.engine.close)

    def watch(self, *options):
        self.start("watch", self.job.root, "--poll", 0.02, "--log-level", "warning", *options)

    def follow(self, *options, name="e0"):
        hook = ("--hook", self.engine.address, "--timeout", 30)
        return self.start("follow", self.job.root, *hook, "--name", name, *options)

    def status(self, *options):
        """Return the exit code and the output of `syncd status`."""
        process = self.start("status", self.job.root, *options)
        out, _ = process.communicate(timeout=LONG)
        return process.returncode, out

    def start(self, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("support.cli.ROOT", PATHS)
            process = spawn(*arguments)
        self.stack.callback(process.communicate)
        self.stack.callback(process.kill)
        return process

    def presence(self, name="e0"):
        with contextlib.suppress(FileNotFoundError):
            return read_presence(self.job.disk, path_of(self.job.explorers, name))

    def applies(self, step, name="e0"):
        until(lambda: (p := self.presence(name)) and p.applied == (1, step), f"{name} applies {step}")

    def serves(self, step):
        seen = self.engine.seen()
        found = (seen["label"], seen["weights"], seen["paused"])
        assert found == (label_in(self.job, step), digest_of(f"{self.job.step(step)}/actor"), False)


def label_in(job, step):
    """Return what engines are told of the version of a step."""
    return engine_label((1, step), read_manifest(job.disk, job.step(step)).digest)


@pytest.fixture
def bed(tmp_path):
    (tmp_path / "job").mkdir()
    made = Bed(tmp_path / "job")
    yield made
    made.stack.close()


def end(process, code=0, number=signal.SIGTERM):
    process.send_signal(number)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "secret" not in err
    return out, err


def events(err):
    return [json.loads(line)["event"] for line in err.splitlines()]


def test_syncd_follow_applies_versions_until_sigterm(bed, tmp_path):
    bed.watch()
    ready, stage = tmp_path / "ready", tmp_path / "stage"
    process = bed.follow("--stage", stage, "--ready-file", ready, "--json")
    for step in (1, 2):
        write_step(bed.job, step)
        bed.applies(step)
        bed.serves(step)
    until(lambda: ready.exists() and ready.read_text().split()[0] == "1.2", "it is ready")
    presence = bed.presence()
    assert presence.info["engine"] == bed.engine.address.replace("user:secret@", "")
    assert os.path.isdir(presence.info["staged"])
    out, err = end(process)
    outcomes = [checked("syncd follow", json.loads(line)) for line in out.splitlines()]
    assert [(one["kind"], one["step"]) for one in outcomes] == [("applied", 1), ("applied", 2)]
    applied = ["version_applied"] * 2
    assert events(err) == ["engine_runs", "follower_started", *applied, "follower_stopped"]
    assert not ready.exists()
    assert list(stage.iterdir()) == []
    assert bed.presence().status is RunningStatus.STOPPED
    assert bed.presence().leases == ()
    bed.serves(2)


def answer_of(url):
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=LONG) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_syncd_follow_answers_health_checks_by_the_state_of_the_engine(bed, tmp_path):
    bed.watch()
    ready = tmp_path / "ready"
    process = bed.follow("--health", "127.0.0.1:0", "--ready-file", ready)
    lines = map(json.loads, iter(process.stderr.readline, ""))
    url = next(line["url"] for line in lines if line["event"] == "health_served")

    def answers(status, state):
        found = lambda: (answer := answer_of(url))[0] == status and answer[1]["state"] == state  # noqa: E731
        until(found, f"it answers {status} and is {state}")

    answers(503, "waiting")
    write_step(bed.job, 1)
    answers(200, "loaded")
    label, first = until(lambda: ready.exists() and ready.read_text(), "it is ready").split()
    assert (label, answer_of(url)[1]["version"]) == ("1.1", "1.1")
    block(bed, "load")
    answers(503, "loading")
    assert not ready.exists()
    bed.engine.call("release", "load")
    answers(200, "loaded")
    assert answer_of(url)[1]["version"] == "1.2"
    until(lambda: int(ready.read_text().split()[1]) >= int(first) + 5, "the file carries later heartbeats")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG) == 0
    with pytest.raises(urllib.error.URLError):
        answer_of(url)


def test_status_and_its_check_show_the_state_of_a_real_engine(bed):
    bed.watch()
    bed.follow("--retries", 0)
    write_step(bed.job, 1)
    bed.applies(1)
    engine = until(lambda: (found := shown_engine(bed)) and found["ready"] and found, "it is shown as ready")
    assert (engine["state"], engine["reason"], engine["failures"], engine["loads"]) == ("loaded", "", 0, 1)
    assert engine["load_seconds"] > 0
    code, out = bed.status("--check")
    assert (code, out[:9], " ready=1 " in out) == (0, "SYNCD OK ", True), out
    code, out = bed.status()
    assert re.search(r"^e0 .* running +loaded \d+ s +[\d.e-]+ s +0 ", out, re.MULTILINE), out
    bed.engine.call("fail", "load", 9)
    write_step(bed.job, 2)
    engine = until(lambda: (found := shown_engine(bed))["state"] == "failed" and found, "its load has failed")
    assert (engine["ready"], engine["failures"], engine["given_up"][0]["step"]) == (True, 1, 2)
    code, out = bed.status("--check")
    assert (code, "; failed load of e0: " in out) == (1, True), out
    bed.engine.process.kill()
    until(lambda: shown_engine(bed)["state"] == "unreachable", "it does not answer")
    code, out = bed.status("--check")
    assert (code, out[:15], " ready=0 " in out) == (2, "SYNCD CRITICAL ", True), out


def shown_engine(bed):
    _, out = bed.status("--json")
    return next((one["engine"] for one in json.loads(out)["explorers"] if one["id"] == "e0"), None)


@pytest.mark.parametrize(
    ("address", "code"), [("example.org:80", 2), ("127.0.0.1", 2), ("203.0.113.9:80", 78)]
)
def test_a_wrong_address_for_health_checks_ends_the_command_before_it_joins(bed, address, code):
    process = bed.follow("--health", address)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == code, err
    assert "health checks" in err
    assert bed.presence() is None


def block(bed, phase):
    """Write step 2, and hold the follower in a phase of its load; `info` is where it asks what runs now."""
    first = "commit" if phase == "info" else phase
    bed.engine.call("block", first)
    write_step(bed.job, 2)
    until(lambda: bed.engine.is_in(first, 2), f"it is in {first}")
    if phase == "info":
        bed.engine.call("block", phase)
        asked = bed.engine.seen()["reached"][phase]
        bed.engine.call("release", first)
        until(lambda: bed.engine.is_in(phase, asked + 1), "it asks")


@pytest.mark.parametrize("phase", matrices.rows(["prepare", "load", "commit", "info"], "load", "info"))
def test_the_next_follower_recovers_an_engine_whose_follower_was_killed(bed, phase):
    bed.watch()
    write_step(bed.job, 1)
    first = bed.follow()
    bed.applies(1)
    block(bed, phase)
    first.kill()
    first.communicate()
    bed.engine.call("release", phase)
    write_step(bed.job, 3)
    bed.follow()
    bed.applies(3)
    bed.serves(3)


def test_an_engine_left_half_loaded_gets_the_newest_version_and_resumes(bed):
    bed.watch()
    write_step(bed.job, 1)
    first = bed.follow()
    bed.applies(1)
    bed.engine.call("block", "commit")
    write_step(bed.job, 2)
    until(lambda: bed.engine.is_in("commit", 2), "it commits")
    first.kill()
    first.communicate()
    bed.engine.call("set", "weights", HALF)
    seen = bed.engine.seen()
    assert (seen["label"], seen["paused"]) == (label_in(bed.job, 1), True)
    bed.engine.call("fail", "commit", 1)
    bed.engine.call("release", "commit")
    bed.follow()
    bed.applies(2)
    bed.serves(2)


def test_sigterm_during_a_load_finishes_the_load(bed):
    bed.watch()
    write_step(bed.job, 1)
    bed.engine.call("block", "load")
    process = bed.follow()
    until(lambda: bed.engine.is_in("load", 1), "it loads")
    process.send_signal(signal.SIGTERM)
    bed.engine.call("release", "load")
    process.communicate(timeout=LONG)
    assert process.returncode == 0
    bed.serves(1)
    assert bed.presence().applied == (1, 1)
    assert bed.presence().status is RunningStatus.STOPPED


def test_a_second_signal_aborts_the_load(bed):
    bed.watch()
    write_step(bed.job, 1)
    process = bed.follow()
    bed.applies(1)
    bed.engine.call("block", "commit")
    write_step(bed.job, 2)
    until(lambda: bed.engine.is_in("commit", 2), "it commits")
    process.send_signal(signal.SIGTERM)
    until(lambda: not _is_pending(process, signal.SIGTERM), "it was told once")
    end(process, 130, signal.SIGINT)
    bed.serves(1)


def _is_pending(process, number):
    status = Path(f"/proc/{process.pid}/status").read_text()
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def test_a_dead_engine_ends_syncd_follow_with_69(bed):
    bed.watch()
    bed.engine.call("fail", "load", 1)
    write_step(bed.job, 1)
    process = bed.follow()
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 69
    assert "error: " in err
    assert "hint: restart the engine" in err
    presence = bed.presence()
    assert (presence.info["state"], presence.applied) == ("dead", None)


ONCE = {
    "applied": (0, []),
    "refused": (65, [("fail", "prepare", 1)]),
    "failed": (74, [("fail", "commit", 1)]),
}


@pytest.mark.parametrize("what", ONCE)
def test_once_exits_with_a_code_for_each_outcome(bed, what):
    code, calls = ONCE[what]
    write_step(bed.job, 1)
    bed.start("watch", bed.job.root, "--once").wait(LONG)
    for call in calls:
        bed.engine.call(*call)
    for expected in (code, 0):
        process = bed.follow("--once", "--wait", LONG, "--retries", 0, "--json")
        _, err = process.communicate(timeout=LONG)
        assert (process.returncode, "Traceback" in err) == (expected, False), err
    bed.serves(1)


@pytest.mark.parametrize(("more", "code"), [([], 65), (["--verify", "header"], 0)])
def test_a_flipped_byte_is_refused_unless_only_headers_are_verified(bed, more, code):
    write_step(bed.job, 1)
    bed.start("watch", bed.job.root, "--once").wait(LONG)
    with open(f"{bed.job.step(1)}/actor/model-00001-of-00001.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    process = bed.follow("--once", "--wait", LONG, "--json", *more)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == code, err
    assert ("content does not match its digest: xxh3_128:" in err) is (code == 65)
    assert ("load" in bed.engine.seen()["log"]) is (code == 0)


def test_once_times_out_with_exit_code_4_and_why(bed):
    process = bed.follow("--once", "--wait", 0.1)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 4, err
    assert "error: no version was loaded within 0.1 s: no version was due" in err


def test_once_says_which_server_did_not_answer(bed):
    process = bed.start("follow", bed.job.root, "--hook", "vllm=http://127.0.0.1:9", "--once", "--wait", 1)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 4, err
    said = "error: no version was loaded within 1 s: GET /weight_info was not answered: Connection refused"
    assert said in err


@pytest.mark.fault("a dead explorer counts for ever")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lease_expires_with_its_follower(bed, number):
    """The clock of the daemon is moved by hand, so that its patience with a silent follower is over at once."""
    daemon, _, clock = start(bed.job, keep_last=1, trash_grace=0.0)
    write_step(bed.job, 1)
    daemon.tick(woken=True)
    process = bed.follow()
    bed.applies(1)
    bed.engine.call("block", "load")
    write_step(bed.job, 2)
    daemon.tick(woken=True)
    until(lambda: bed.engine.is_in("load", 2), "it loads")
    assert bed.presence().leases == (1, 2)
    daemon.tick(woken=True)
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    for step in (3, 4, 5):
        write_step(bed.job, step)
        daemon.tick(woken=True)
    assert {1, 2} <= set(steps_of(bed.job))
    for _ in range(8):
        clock.at += 10.0
        daemon.tick(woken=True)
    assert not {1, 2} & set(steps_of(bed.job))
    bed.engine.call("release", "load")
    if number == signal.SIGSTOP:
        process.send_signal(signal.SIGCONT)
        # What it was loading has gone, and what it could go back to: the newest saves the engine.
        bed.applies(5)
        bed.serves(5)
    daemon.close()
