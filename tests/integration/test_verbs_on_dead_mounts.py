"""Every verb on a mount that does not answer: it ends, says what is known, and continues when the mount does."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from beds import probe
from beds.loop import frozen, mounted
from beds.silent import silent
from support import matrices
from support.cli import VERBS, command, environment, spawn
from support.forked import run_forked
from support.jobs import shard_bytes, write_step
from support.processes import must
from support.waiting import until

from syncd.protocol.layout import Job

pytestmark = [pytest.mark.group("mounts"), pytest.mark.timeout(240)]

CLI = Path(__file__).parents[2] / "docs" / "commands.md"
LONG = 120

READING = {"ls": [], "verify": [], "materialise": ["1", "--to", "{source}-made"]}
ACTING = {
    "publish": ["5", "{source}"],
    "pin": ["1"],
    "unpin": ["2"],
    "prune": ["--keep-last", "1"],
    "rollback": ["1", "--timeout", "60"],
}
SAYS = {
    "publish": "whether step 5 was published",
    "pin": "whether step 1 is pinned",
    "unpin": "whether step 2 is still pinned",
    "prune": "whether anything was removed",
    "rollback": "whether explorers roll back to step 1",
}


@pytest.fixture
def source(tmp_path):
    """Return a directory that can be published."""
    made = tmp_path / "source"
    made.mkdir()
    (made / "model.safetensors").write_bytes(shard_bytes({"w": (2, 2)}))
    return made


def make_job(root):
    os.mkdir(root)
    job = Job.at(root)
    for step in (1, 2):
        write_step(job, step)
    for args in (["watch", root, "--once", "--no-prune", "--log-level", "error"], ["pin", root, "2"]):
        must(command(*args), run_forked)
    return job


OWN_LIMITS = {
    "watch": ["watch"],
    "watch --once": ["watch", "--once"],
    "follow": ["follow", "--hook", "command", "--", "true"],
    "mirror": ["mirror", "s3://bucket/job"],
    "mirror --detach": ["mirror", "--detach"],
    "doctor": ["doctor"],
    "doctor --security": ["doctor", "--security"],
}
"""Verbs that wait for a mount as long as they say themselves: 10 s, the doctor 30."""


@pytest.fixture(scope="module")
def silence(tmp_path_factory):
    """Return a job whose mount never answers, and verbs with their own limits, which wait for it meanwhile."""
    if (reason := probe.silent_mount()) is not None:
        pytest.skip(reason)
    job = make_job(tmp_path_factory.mktemp("silent") / "job")
    with silent(job.root), contextlib.ExitStack() as stack:
        waiting = {}
        for name, (verb, *options) in OWN_LIMITS.items():
            waiting[name] = stack.enter_context(spawn(verb, job.root, *options))
            stack.callback(waiting[name].kill)
        yield job, waiting


@pytest.fixture
def silenced(silence):
    """Return a job whose mount never answers."""
    return silence[0]


@pytest.fixture
def ext4():
    if (reason := probe.loop_mount("ext4")) is not None:
        pytest.skip(reason)
    with mounted("ext4") as loop:
        yield loop


def line_of(verb, job, source="", *options):
    more = {**READING, **ACTING}.get(verb, [])
    return [verb, job.root, *(word.format(source=source or job.root) for word in more), *options]


def run(*args):
    """Run a verb to its end; one that never ends fails the test."""
    return subprocess.run(
        command(*args), capture_output=True, text=True, timeout=LONG, check=False, env=environment()
    )


def threads(pid):
    """Return the state and the kernel function of each thread of a process."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii") as file:
                state = file.read().rpartition(")")[2].split()[0]
            with open(f"/proc/{pid}/task/{thread}/wchan", encoding="ascii") as file:
                found.append((state, file.read()))
    return found


def until_frozen(process):
    """Wait until a thread of a verb waits in the kernel uninterruptibly."""
    until(lambda: any(state == "D" for state, _ in threads(process.pid)), "it writes to the frozen disk")


def until_silent(process):
    """Wait until a thread of a verb waits for the mount that never answers."""
    until(
        lambda: any("fuse" in where or "request_wait" in where for _, where in threads(process.pid)),
        "it asks",
    )


# --- it ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [*READING, *ACTING])
def test_each_verb_exits_with_74_on_a_mount_that_never_answers(silenced, source, verb):
    done = run(*line_of(verb, silenced, source, "--patience", "0.5"))
    assert (done.returncode, done.stdout) == (74, ""), done.stderr
    error, hint = done.stderr.splitlines()
    assert re.match(r"error: the mount has not answered for \d+ s, since \d\d:\d\d:\d\d \(\w+\)", error)
    assert error.endswith(f": {silenced.root}")
    assert hint.startswith("hint: findmnt;")
    assert ("nothing was changed" in error) == (verb in ACTING)


def test_wait_on_a_dead_mount_ends_at_its_own_time_out(silenced):
    done = run("wait", silenced.root, "--newer-than", "9", "--timeout", "2", "--patience", "0.5")
    assert (done.returncode, done.stdout) == (4, ""), done.stderr
    assert re.search(
        r"after 2 s waiting for a step newer than 9 \(the mount has not answered for \d", done.stderr
    )


@pytest.mark.parametrize("verb", [*VERBS, "follow"])
def test_parsing_a_command_line_makes_no_call_on_the_mount(silenced, verb):
    if verb == "follow":
        pytest.importorskip("explorer_hooks")
    there = f"{silenced.root}/x"
    paths = {"publish": ["1", there], "ls": ["--config", there], "install-units": ["--dir", there]}
    first = [] if verb == "install-units" else [silenced.root]
    done = run_forked(command(verb, *first, *paths.get(verb, []), "--state-dir", there, "--nonsense"))
    assert done.returncode == 2
    assert "No such option" in done.stderr


# --- a frozen local disk: what is written to it can neither return nor be killed ------------------------------


@pytest.mark.parametrize("verb", ACTING)
def test_a_verb_on_a_frozen_disk_reports_and_ends_with_the_thaw(ext4, source, verb):
    job = make_job(f"{ext4.point}/job")
    with frozen(ext4.point):
        process = spawn(*line_of(verb, job, source, "--patience", "0.5"))
        error, hint = process.stderr.readline(), process.stderr.readline()
        assert f"; it is not known {SAYS[verb]}: {job.root}" in error
        assert f"Then: syncd status {job.root}" in hint
        time.sleep(0.3)
        assert process.poll() is None, "the kernel keeps it (documented)"
    with process:
        out, err = process.communicate(timeout=LONG)
        assert (process.returncode, out, err) == (74, "", "")
    done = run(*line_of(verb, job, source))
    assert done.returncode == 0, f"nothing needs cleaning up: {done.stderr}"


@pytest.mark.parametrize("verb", matrices.rows(ACTING, "publish", "rollback"))
def test_an_acting_verb_continues_when_the_disk_thaws(ext4, source, verb):
    job = make_job(f"{ext4.point}/job")
    with frozen(ext4.point):
        process = spawn(*line_of(verb, job, source, "--patience", "200"))
        until_frozen(process)
    with process:
        _, err = process.communicate(timeout=LONG)
        assert process.returncode == 0, err


@pytest.mark.parametrize("verb", READING)
def test_verbs_wait_for_a_slow_mount(tmp_path, strace_injection, verb):
    job = make_job(tmp_path / "job")
    slow = ["strace", "-f", "-o", "/dev/null", "-e", "inject=openat,newfstatat:delay_enter=400000:when=3+40"]
    line = [*slow, "-P", job.root, "-P", job.state, *command(*line_of(verb, job, "", "--patience", "30"))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LONG, check=False, env=environment())
    assert done.returncode == 0, done.stderr


def test_wait_continues_when_the_mount_answers_again(tmp_path):
    if (reason := probe.silent_mount()) is not None:
        pytest.skip(reason)
    job = make_job(tmp_path / "job")
    with silent(job.root):
        process = spawn("wait", job.root, "--timeout", "100", "--patience", "0.5")
        until_silent(process)
        time.sleep(1.5)
        assert process.poll() is None, "longer than its patience, shorter than its time"
    with process:
        out, err = process.communicate(timeout=LONG)
        assert (process.returncode, out) == (0, "1.2\n"), err


# --- signals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", matrices.rows([*READING, *ACTING], "verify", "publish", "rollback"))
def test_ctrl_c_ends_a_verb_on_a_mount_that_never_answers(silenced, source, verb):
    with spawn(*line_of(verb, silenced, source, "--patience", "200")) as process:
        until_silent(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONG)
        assert process.returncode == 130
        assert "error: the mount has not answered for" in err


@pytest.mark.parametrize(("verb", "code"), [("pin", -signal.SIGTERM), ("publish", 128 + signal.SIGTERM)])
def test_sigterm_ends_a_verb_on_a_mount_that_never_answers(silenced, source, verb, code):
    with spawn(*line_of(verb, silenced, source, "--patience", "200")) as process:
        until_silent(process)
        process.terminate()
        process.communicate(timeout=LONG)
        assert process.returncode == code


@pytest.mark.parametrize("name", OWN_LIMITS)
def test_verbs_with_their_own_time_limits_exit_with_74(silence, name):
    """After the other verbs: these have waited since the first of them."""
    process = silence[1][name]
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 74, err
    assert "not answer" in err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_a_signal_ends_wait_without_a_traceback(tmp_path, number, code):
    with spawn("wait", tmp_path, "--timeout", "100") as process:
        until(lambda: any("nanosleep" in where for _, where in threads(process.pid)), "it waits")
        process.send_signal(number)
        _, err = process.communicate(timeout=LONG)
        assert (process.returncode, err) == (code, "")


def test_output_through_a_pipe_is_complete(tmp_path):
    job = make_job(tmp_path / "job")
    for step in range(3, 300):
        os.makedirs(f"{job.step(step)}/actor/.receipts")
    whole = run("ls", job.root, "--json").stdout
    with open(tmp_path / "file", "w+", encoding="utf-8") as file:
        subprocess.run(
            command("ls", job.root, "--json"), stdout=file, check=True, timeout=LONG, env=environment()
        )
        file.seek(0)
        assert len(whole) > 1 << 16
        assert json.loads(file.read())["steps"] == json.loads(whole)["steps"]


def test_a_closed_pipe_ends_a_verb_with_141(tmp_path):
    job = make_job(tmp_path / "job")
    for step in range(3, 600):
        os.makedirs(f"{job.step(step)}/actor/.receipts")
    with spawn("ls", job.root, "--json") as process:
        process.stdout.close()
        assert process.wait(LONG) == 141
        assert process.stderr.read() == ""


# --- the documented table -----------------------------------------------------------------------------------


def documented():
    """Return verb -> (seconds it waits, exit code) of the table in docs/commands.md."""
    text = CLI.read_text().split("## A mount that does not answer")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|", text, re.MULTILINE)
    return {
        verb: (waits, code) for verbs, waits, code in rows[1:] for verb in re.findall(r"`([\w-]+)", verbs)
    }


def test_the_documented_table_has_every_verb_that_uses_the_mount():
    assert set(documented()) == {*VERBS, "follow"} - {"install-units"}


def test_the_documented_table_matches_the_tested_limits_and_exit_codes():
    table = documented()
    for verb in [*READING, *ACTING]:
        assert table[verb] == ("`--patience` (10 s)", "74"), verb
    assert table["wait"] == ("`--timeout`, at least `--patience`", "4")
    assert [table[verb] for verb in ("watch", "follow", "mirror")] == [("10 s", "74")] * 3
    assert table["doctor"] == ("30 s", "74")
