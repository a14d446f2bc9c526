"""status, ls, verify, wait, pin and unpin over real jobs."""

import contextlib
import errno
import os
import pty
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time

import pytest
from support.cli import LONG, command, environment, modules_loaded, spawn
from support.jobs import ManualClock, explorer, write_step

from syncd.cli import status
from syncd.cli.wait import wait_for
from syncd.errors import TimedOutError
from syncd.extras import upgrade_command
from syncd.protocol.engine_state import EngineReport, EngineState
from syncd.protocol.job_end import JobEnd, mark_finished
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import decode_manifest, encode_manifest
from syncd.protocol.presence import RunningStatus
from syncd.protocol.process import Process
from syncd.protocol.request import read_pins
from syncd.protocol.takeover import Candidate
from syncd.protocol.version import Version, encode_version
from syncd.protocol.writer import StepWriter

MODULES_OF_STATUS = 600


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


def publish(job, step, generation=1, *, age=0.0, digest=None):
    path = f"{job.step(step)}/manifest.json"
    digest = digest or decode_manifest(job.disk.read(path), path).digest
    place = f"global_step_{step}/actor"
    version = Version(generation, step, "weights", place, digest, published_at=time.time() - age)
    job.disk.make_directory(job.state)
    job.disk.replace(job.version, encode_version(version))


@pytest.fixture
def published(job):
    """Return a job whose step 2 is published, and where step 3 fills."""
    for step in (1, 2):
        write_step(job, step, world_size=2)
    writer = StepWriter(job, 3, 4, "a")
    writer.begin()
    writer.receipt(1, [writer.write("actor/model-00001-of-00004.safetensors", b"x" * 10)])
    publish(job, 2)
    return job


# --- status -------------------------------------------------------------------------------------------------


def test_status_works_without_a_daemon(shell, published):
    done = shell("status", published.root)
    assert done.code == 0
    assert "1.2  published 0 s ago" in done.out
    assert "1/4" in done.out


def test_status_loads_few_modules(published, record_line):
    times = []
    for _ in range(5):
        started = time.perf_counter()
        with spawn("status", published.root) as process:
            process.communicate()
        times.append(time.perf_counter() - started)
    modules = modules_loaded("status", published.root)
    record_line(f"syncd status: {min(times) * 1000:.0f} ms warm, {len(modules)} modules")
    # Start-up is what it takes, and modules are what start-up takes: a count that no load changes.
    assert len(modules) < MODULES_OF_STATUS, "0.3 s is promised"


@contextlib.contextmanager
def as_somebody_who_may_only_read(root):
    """Be another user for a while, to whom all of a tree is readable and nothing writable; the tree's new path."""
    # Below /tmp, because nobody else may enter pytest's own directories.
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        shutil.copytree(root, f"{place}/job")
        for where, _, files in os.walk(place):
            os.chmod(where, 0o555)
            for name in files:
                os.chmod(f"{where}/{name}", 0o444)
        os.seteuid(65534)
        try:
            yield f"{place}/job"
        finally:
            os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody who may only read")
def test_read_verbs_need_no_write_permission(shell, published):
    verbs = ("status", "ls", "verify", "wait")
    before = [shell(verb, published.root, "--json").document for verb in verbs]
    with as_somebody_who_may_only_read(published.root) as root:
        after = [shell(verb, root, "--json") for verb in verbs]
        pinned = shell("pin", root, 1)
    assert [done.code for done in after] == [0, 0, 0, 0]
    assert [done.document.keys() for done in after] == [document.keys() for document in before]
    assert pinned.code == 74


def test_status_reads_another_state_directory_with_state_dir(shell, published, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("state")
    shutil.move(published.version, f"{elsewhere}/version.json")
    assert shell("status", published.root, "--json").document["version"] is None
    assert (
        shell("status", published.root, "--json", "--state-dir", elsewhere).document["version"]["step"] == 2
    )
    monkeypatch.setenv("SYNCD_STATE_DIR", str(elsewhere))
    assert shell("status", published.root, "--json").document["version"]["step"] == 2


@pytest.mark.parametrize(
    ("age", "limits", "code", "text"),
    [
        (0, [], 0, "SYNCD OK - version 1.2 published 0 s ago | age=0."),
        (10, ["--max-age", 60], 0, "SYNCD OK - version 1.2 published 10 s ago | age=10."),
        (
            100,
            ["--warn-age", 60],
            1,
            "SYNCD WARNING - version 1.2 published 100 s ago, more than 60 s | age=100.",
        ),
        (
            100,
            ["--warn-age", 30, "--max-age", 60],
            2,
            "SYNCD CRITICAL - version 1.2 published 100 s ago, more than 60 s | age=100.",
        ),
    ],
)
def test_check_reports_state_and_age_in_one_line(shell, published, age, limits, code, text):
    publish(published, 2, age=age)
    done = shell("status", published.root, "--check", *limits)
    assert done.code == code
    assert done.out.startswith(text)
    assert done.out.count("\n") == 1
    assert done.err == ""


def test_the_figures_of_a_check_have_its_limits(shell, published):
    publish(published, 2)
    for limits, shown in (
        ([], ""),
        (["--max-age", 60], ";;60"),
        (["--warn-age", 30.5], ";30.5;"),
        (["--warn-age", 30, "--max-age", 60], ";30;60"),
    ):
        figures = shell("status", published.root, "--check", *limits).out.split(" | ")[1]
        assert re.fullmatch(rf"age=0\.\d{{3}}s{shown}", figures.split()[0])


def test_check_before_the_first_version_is_unknown(shell, job):
    done = shell("status", job.root, "--check")
    assert done.code == 3
    assert done.out == "SYNCD UNKNOWN - nothing is published yet | explorers=0 lag=0 bytes=0B\n"


@pytest.mark.parametrize(
    ("state", "ready", "code", "said"),
    [
        ("proven", True, 0, ""),
        ("loading", False, 0, ""),
        ("refused", True, 1, "; refused load of e0: why / how"),
        ("failed", False, 2, "; failed load of e0: why / how"),
        ("wrong", False, 2, "; wrong engine of e0: why / how"),
        ("dead", False, 2, "; dead engine of e0: why / how"),
        ("unreachable", False, 2, "; unreachable engine of e0: why / how"),
    ],
)
def test_check_fails_while_no_engine_can_do_any_work(shell, published, state, ready, code, said):
    publish(published, 2)
    Candidate(published, SystemClock()).claim()
    report = EngineReport(EngineState(state), ready=ready, reason="why | how")
    presence = explorer(published, SystemClock(), "e0", info=report.document())
    done = shell("status", published.root, "--check")
    assert (done.code, done.err) == (code, "")
    name = ("OK", "WARNING", "CRITICAL")[code]
    assert done.out.startswith(f"SYNCD {name} - version 1.2 published 0 s ago{said} | ")
    assert f" ready={ready:d} " in done.out
    presence.update(status=RunningStatus.STOPPED)
    assert shell("status", published.root, "--check").code == 0


def test_check_counts_severities_as_the_page_does(shell, published):
    publish(published, 2)
    term = Candidate(published, SystemClock()).claim()
    explorer(published, SystemClock(), "well")
    wrong = EngineReport(EngineState.WRONG, ready=False, reason="other weights").document()
    for name in ("e0", "e1"):
        explorer(published, SystemClock(), name, info=wrong)
    done = shell("status", published.root, "--check")
    several = "2 engines answer with other weights than they name (e0: other weights, e1: other weights)"
    assert done.out.startswith(f"SYNCD WARNING - version 1.2 published 0 s ago; {several} | ")
    term.release()
    done = shell("status", published.root, "--check")
    assert (done.code, "; no daemon leads this job; 2 engines" in done.out) == (2, True)


def test_a_finished_job_is_ok_however_old_its_version(shell, published):
    publish(published, 2, age=9000)
    limits = ("--warn-age", 30, "--max-age", 60)
    assert shell("status", published.root, "--check", *limits).code == 2
    mark_finished(published, JobEnd(2, "total_steps 2 reached"))
    done = shell("status", published.root, "--check", *limits)
    said = "SYNCD OK - finished at step 2: total_steps 2 reached; version 1.2 published 9000 s ago | "
    assert (done.code, done.out.startswith(said)) == (0, True)


def test_what_a_check_cannot_read_is_unknown_or_critical(shell, tmp_path, monkeypatch):
    done = shell("status", tmp_path / "none", "--check")
    assert (done.code, done.err) == (3, "")
    assert done.out == f"SYNCD UNKNOWN - the job directory does not exist: {tmp_path}/none\n"

    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error", "/ckpt|job")

    monkeypatch.setattr("syncd.cli.options.open_job", fails)
    done = shell("status", tmp_path, "--check")
    assert (done.code, done.out) == (2, "SYNCD CRITICAL - Input/output error: /ckpt/job\n")


def test_usage_errors_of_a_check_are_unknown_and_those_without_it_exit_with_2(shell, job):
    for args in (["--max-age", "5x"], ["--nonsense"]):
        done = shell("status", job.root, "--check", *args)
        assert (done.code, done.out.startswith("SYNCD UNKNOWN - "), done.out.count("\n")) == (3, True, 1)
    assert shell("status", job.root, "--max-age", 5).code == 2
    assert shell("status", job.root, "--warn-age", 5).code == 2


def test_status_look_detects_a_heartbeat(shell, published):
    beating = explorer(published, SystemClock(), "e0")
    stop = threading.Event()

    def beat():
        while not stop.wait(0.1):
            beating.update()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        document = shell("status", published.root, "--json", "--look", LONG).document
    finally:
        stop.set()
        thread.join()
    assert [(module["heart"], module["alive"]) for module in document["explorers"]] == [("alive", True)]


def read_terminal(descriptor, until, seconds=LONG):
    data, ends = b"", time.monotonic() + seconds
    while not until(data) and time.monotonic() < ends:
        if select.select([descriptor], [], [], 0.05)[0]:
            try:
                data += os.read(descriptor, 65536)
            except OSError:
                break
    return data


@pytest.mark.parametrize(("how", "code"), [("ctrl-c", 0), (signal.SIGTERM, 143)])
def test_status_watch_updates_and_restores_the_terminal(published, how, code):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            sys.executable, command("status", published.root, "--watch", "--interval", "0.2"), environment()
        )
    seen = read_terminal(terminal, lambda data: data.count(b"1.2") >= 2)
    publish(published, 1, 2)
    seen += read_terminal(terminal, lambda data: b"2.1" in data)
    if how == "ctrl-c":
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, how)
    seen += read_terminal(terminal, lambda data: b"\x1b[?25h" in data)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == code
    assert b"2.1" in seen
    assert seen.rstrip().endswith(b"\x1b[?25h"), "the cursor is shown again"
    assert b"Traceback" not in seen


@pytest.mark.parametrize(
    ("settings", "hearts"),
    [
        ("", ["dead", "dead"]),
        ("ttl = 300\ntakeover = 120\n", ["unknown", "unknown"]),
        ("ttl = 300\nunheard = 1\n", ["dead", "dead"]),
    ],
    ids=["none", "longer", "unusable"],
)
def test_status_takes_for_dead_what_the_job_s_daemon_does(job, monkeypatch, settings, hearts):
    clock = ManualClock()
    monkeypatch.setattr(status, "SystemClock", lambda: clock)
    explorer(job, clock, "e0")
    Candidate(job, clock, process=Process("another-boot", "pid:[1]", 4242, 1)).claim()
    with open(f"{job.root}/config.toml", "w") as file:
        file.write(f"[daemon]\n{settings}")
    source = status._StatusSource(job.root, None, 10.0)
    source.read()
    clock.at += 90
    document = source.read()
    assert [document["explorers"][0]["heart"], document["daemon"]["heart"]] == hearts


def test_status_watch_continues_after_the_job_was_missing(published):
    with spawn("status", published.root, "--watch", "--interval", "0.2") as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        os.rename(published.root, f"{published.root}.away")
        lines = iter(process.stdout.readline, "")
        gone = next(line for line in lines if line.startswith("error:"))
        os.rename(f"{published.root}.away", published.root)
        back = next(line for line in lines if line.startswith("job"))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LONG)
    assert first.split()[1] == back.split()[1] == published.root
    assert "does not exist" in gone
    assert process.returncode == 0


# --- ls -----------------------------------------------------------------------------------------------------


def test_ls_lists_steps_with_state_and_rule(shell, published):
    explorer(published, SystemClock(), "e0", leases=(1,))
    document = shell("ls", published.root, "--json").document
    rows = [
        (row["step"], row["state"], row["present"], row["expected"], row["rule"]) for row in document["steps"]
    ]
    assert rows == [
        (1, "complete", 2, 2, "leased"),
        (2, "complete", 2, 2, "newest_version"),
        (3, "filling", 1, 4, "being_written"),
    ]
    assert "newest_version" in shell("ls", published.root).out


def test_ls_applies_the_policy_of_the_job_and_its_options(shell, published):
    publish(published, 2)
    with open(f"{published.root}/config.toml", "w") as file:
        file.write("[daemon]\nkeep_last = 1\n")
    document = shell("ls", published.root, "--json").document
    assert [row["step"] for row in document["steps"] if not row["keep"]] == [1]
    document = shell("ls", published.root, "--json", "--keep-last", 2).document
    assert document["policy"]["keep_last"] == 2
    assert [row["step"] for row in document["steps"] if not row["keep"]] == []


def test_ls_of_an_empty_job_says_that_there_are_no_steps(shell, job):
    assert shell("ls", job.root).out == f"no steps in {job.root}\n"


# --- verify -------------------------------------------------------------------------------------------------


def shard(job, step, rank=1):
    return f"{job.step(step)}/actor/model-0000{rank}-of-00002.safetensors"


def flip(path, place=-1):
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_END)
        byte = file.read(1)
        file.seek(place, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("args", [[], ["2"], ["1"], ["--deep"], ["1", "--deep"]])
def test_verify_of_an_intact_step_succeeds(shell, published, args):
    done = shell("verify", published.root, *args)
    assert done.code == 0, done.err
    assert ("every byte" in done.out) == ("--deep" in args)


def test_only_verify_deep_finds_a_flipped_bit(shell, published):
    flip(shard(published, 2, 2))
    assert shell("verify", published.root).code == 0
    done = shell("verify", published.root, "--deep")
    assert done.code == 65
    assert done.out == "actor/model-00002-of-00002.safetensors: content does not match its digest\n"
    assert done.err.startswith("error: step 2 is damaged: global_step_2\n")


def test_verify_names_every_damaged_file(shell, published):
    os.truncate(shard(published, 2, 1), 5)
    os.unlink(shard(published, 2, 2))
    done = shell("verify", published.root, 2, "--json")
    assert done.code == 65
    document = done.document
    assert not document["ok"]
    assert [problem.split(":")[0] for problem in document["problems"]] == [
        "actor/model-00001-of-00002.safetensors",
        "actor/model-00002-of-00002.safetensors",
    ]


def test_verify_finds_a_damaged_header_without_deep(shell, published):
    with open(shard(published, 2), "r+b") as file:
        file.seek(8)
        file.write(b"\xff")
    done = shell("verify", published.root)
    assert done.code == 65
    assert "model-00001-of-00002" in done.out


def test_verify_of_a_damaged_manifest_exits_with_65(shell, published):
    flip(f"{published.step(2)}/manifest.json", -10)
    done = shell("verify", published.root)
    assert done.code == 65
    assert done.out.strip()


def test_verify_reports_a_step_that_was_written_again(shell, published):
    publish(published, 2, digest="sha256:" + "0" * 64)
    done = shell("verify", published.root)
    assert done.code == 65
    assert "written again" in done.out
    assert shell("verify", published.root, 2).code == 0, "the step itself is good"


def test_verify_of_a_missing_or_incomplete_step_is_refused(shell, published, tmp_path_factory):
    assert shell("verify", published.root, 9).code == 2
    done = shell("verify", published.root, 3)
    assert (done.code, done.err.splitlines()[0]) == (
        3,
        "error: step 3 is not complete: 1 of 4 writers are done",
    )
    assert shell("verify", tmp_path_factory.mktemp("empty")).code == 3
    shutil.rmtree(published.step(2))
    assert shell("verify", published.root).code == 65


def test_wait_refuses_a_version_of_a_newer_protocol(shell, published):
    path = f"{published.step(2)}/manifest.json"
    data = encode_manifest(decode_manifest(published.disk.read(path), path))
    with open(published.version, "wb") as file:
        file.write(data.replace(b'"protocol":1', b'"protocol":2'))
    done = shell("wait", published.root, "--timeout", 5)
    assert done.code == 78
    assert f"hint: {upgrade_command()}" in done.err


# --- wait ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("than", "code"),
    [(None, 0), ("0", 0), ("1", 0), ("2", 4), ("1.1", 0), ("1.2", 4), ("0.9", 0), ("2.0", 4)],
)
def test_wait_returns_a_newer_version_or_times_out(shell, published, than, code):
    done = shell("wait", published.root, "--timeout", 0, *([] if than is None else ["--newer-than", than]))
    assert done.code == code
    assert done.out == ("1.2\n" if code == 0 else "")


def test_a_rewind_is_newer_than_a_pair_and_not_than_a_step(shell, published):
    publish(published, 1, 2)
    assert shell("wait", published.root, "--timeout", 0, "--newer-than", "1.2").out == "2.1\n"
    assert shell("wait", published.root, "--timeout", 0, "--newer-than", "2").code == 4


@pytest.mark.parametrize(
    ("what", "text"), [("step", "2"), ("path", "{0}/global_step_2/actor"), ("version", "1.2")]
)
def test_wait_prints_the_chosen_field(shell, published, what, text):
    assert shell("wait", published.root, "--print", what).out == text.format(published.root) + "\n"


@pytest.mark.parametrize("than", ["", "x", "-1", "1.", ".1", "1.2.3", "1e3", "9" * 30, "\u0661"])
def test_wait_refuses_an_invalid_version(shell, published, than):
    assert shell("wait", published.root, f"--newer-than={than}").code == 2


def test_wait_times_out_with_exit_code_4(shell, published):
    started = time.monotonic()
    done = shell("wait", published.root, "--newer-than", "1.2", "--timeout", "0.4")
    assert time.monotonic() - started > 0.3
    assert done.code == 4
    assert "timed out after 0.4 s waiting for a version newer than 1.2 (current: 1.2)" in done.err
    done = shell("wait", published.root, "--newer-than", "2", "--timeout", "0")
    assert "timed out after 0 s waiting for a step newer than 2 (current: step 2, version 1.2)" in done.err


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_wait_refuses_an_infinite_or_invalid_time_out(shell, published, seconds):
    assert shell("wait", published.root, f"--timeout={seconds}").code == 2


@pytest.mark.fault("an explorer that waits before the trainer has started returns at once")
def test_wait_may_start_before_the_job_exists(tmp_path):
    job = Job.at(tmp_path / "later")
    with spawn("wait", job.root, "--timeout", LONG) as process:
        time.sleep(0.4)
        assert process.poll() is None
        os.mkdir(job.root)
        write_step(job, 7)
        publish(job, 7)
        out, err = process.communicate(timeout=LONG)
    assert (process.returncode, out, err) == (0, "1.7\n", "")


def test_wait_retries_while_the_version_file_is_damaged(published):
    with open(published.version, "w") as file:
        file.write("{")
    with pytest.raises(TimedOutError, match="not a JSON document"):
        wait_for(published, None, 0.0)
    timer = threading.Timer(0.3, publish, [published, 2])
    timer.start()
    assert wait_for(published, None, LONG).step == 2
    timer.join()


# --- pin, unpin ---------------------------------------------------------------------------------------------


def test_pin_keeps_a_step_until_unpin(shell, published):
    assert shell("pin", published.root, 1, "--reason", "best").code == 0
    assert read_pins(published)[1].reason == "best"
    row = shell("ls", published.root, "--json").document["steps"][0]
    assert (row["pinned"], row["rule"], row["detail"]) == (True, "pinned", "best")
    assert shell("unpin", published.root, 1).out == "step 1 is no longer pinned\n"
    assert shell("unpin", published.root, 1).out == "step 1 was not pinned\n"
    assert read_pins(published) == {}


def test_pinning_a_missing_step_is_refused(shell, published):
    done = shell("pin", published.root, 9)
    assert done.code == 2
    assert f"hint: syncd ls {published.root}" in done.err
    assert read_pins(published) == {}


def test_pinning_a_step_that_is_being_removed_exits_with_75(shell, published, monkeypatch):
    monkeypatch.setattr("syncd.cli.pin.write_pin", lambda job, pin: shutil.rmtree(job.step(pin.step)))
    done = shell("pin", published.root, 1)
    assert done.code == 75
    assert "was removed while it was being pinned" in done.err
