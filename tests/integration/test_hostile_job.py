"""Real commands on job directories that somebody hostile has made: they end, in bounds, and stay inside."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import hostile
from support.cli import command, environment
from support.forked import run_forked
from support.jobs import write_step
from support.processes import PROGRAMS
from support.sweep import python

MEMORY = 1500 << 20
"""Bytes of address space that a command may take."""

SECONDS = 60
HONEST = frozenset({0, 2, 3, 4, 5, 65, 74, 75, 78})

FILES = {
    "links": hostile.links_out,
    "hard links": hostile.hard_links_out,
    "names": hostile.strange_names,
    **{put.__name__: hostile.every_file(put) for put in hostile.FILES},
}
CONFIGS = {
    f"config {put.__name__}": hostile.every_file(put, ["config.toml"])
    for put in (hostile.fifo, hostile.device, hostile.giant, hostile.nested_toml)
}
DIRECTORIES = {name: hostile.link_directory(name) for name in hostile.DIRECTORIES}
ATTACKS = FILES | CONFIGS | DIRECTORIES


@pytest.fixture
def attacked(tmp_path):
    """Return what makes an attacked job: the job, the canary outside, and what the canary was."""

    def make(attack):
        job, outside = hostile.build(tmp_path / "job"), hostile.canary(tmp_path / "outside")
        attack(job, outside)
        return job, outside, hostile.fingerprint(outside)

    return make


LOOKS = (["status", "--json"], ["verify", 2, "--deep"], ["ls"])
ACTS = (["watch", "--once", "--keep-last", 1, "--takeover", 4], ["prune", "--keep-last", 1])


def limited(*words):
    """Return what runs a command line, or a program, with bounded memory."""
    return python(f"{PROGRAMS}/limited.py", str(MEMORY), *map(str, words))


def verb(words, job):
    """Return the command line of a verb and its options for a job."""
    return limited(words[0], job, *words[1:])


def ends_badly(commands):
    """Run commands with bounded memory and time; return what is wrong with how they ended or what they printed."""
    return [problem for args in commands for problem in _problems(args)]


def _problems(args):
    done = run_forked(args, SECONDS)
    said = done.stdout + done.stderr
    if done.returncode not in HONEST or "Traceback" in said or "a bug in" in said:
        yield f"{args[3:]} ended with {done.returncode}: {said[-2000:]!r}"
    if any(not letter.isprintable() and letter not in "\n\t" for letter in said) or "\ufffd" in said:
        yield f"{args[3:]} printed what steers a terminal or is no text: {said!r}"


@pytest.mark.parametrize("name", ATTACKS)
def test_verbs_on_a_hostile_job_end_and_touch_nothing_outside(attacked, name):
    job, outside, before = attacked(ATTACKS[name])
    verbs = (*LOOKS, *ACTS) if name in FILES else (LOOKS[0], *ACTS) if name.startswith(".syncd") else ACTS[:1]
    assert not ends_badly(verb(words, job.root) for words in verbs)
    assert hostile.fingerprint(outside) == before


@pytest.mark.parametrize("name", ["links", "fifo", "wide", ".syncd", ".syncd/explorers", "experiences"])
def test_clients_on_a_hostile_job_end_and_touch_nothing_outside(attacked, name):
    job, outside, before = attacked(ATTACKS[name])
    wait = verb(["wait", "--newer-than", 99, "--timeout", 0.2], job.root)
    publish = verb(["publish", 9, outside / "job/global_step_2/actor"], job.root)
    assert not ends_badly([wait, publish, limited(f"{PROGRAMS}/client.py", job.root)])
    assert hostile.fingerprint(outside) == before


@pytest.mark.parametrize("name", ["links", "fifo", "wide", "global_step_2"])
def test_a_follower_on_a_hostile_job_ends_and_touches_nothing_outside(attacked, name):
    job, outside, before = attacked(ATTACKS[name])
    options = ("--hook", "command", "--once", "--wait", 0.5, "--retries", 0, "--log-format", "json")
    assert not ends_badly([limited("follow", job.root, *options, "--", "true")])
    assert hostile.fingerprint(outside) == before


def test_a_job_name_with_control_characters_is_printed_escaped(tmp_path):
    place = os.fsdecode(os.fsencode(str(tmp_path)) + b"/a\nb\x1b[2J\xff")
    os.mkdir(place)
    # A name that is no text cannot be handed on as JSON: these are processes of their own.
    for words in (["ls", place], ["status", place], ["verify", place], ["status", f"{place}none"]):
        done = subprocess.run(command(*words), check=False, capture_output=True, env=environment())
        assert done.returncode in HONEST, done.stderr
        assert b"Traceback" not in done.stderr
        assert not any(byte < 0x20 and byte != 0x0A for byte in done.stdout + done.stderr), done
        (done.stdout + done.stderr).decode()


def test_a_job_configuration_cannot_write_outside_the_job(tmp_path):
    job, outside = hostile.build(tmp_path / "job"), hostile.canary(tmp_path / "outside")
    before = hostile.fingerprint(outside)
    config = Path(job.root, "config.toml")
    config.write_text(f'[daemon]\nmetrics_textfile = "{outside}/victim.txt"\n')
    config.chmod(0o666)
    done = subprocess.run(
        command("watch", job.root, "--once"), check=False, capture_output=True, env=environment()
    )
    assert done.returncode == 78
    assert b"metrics_textfile reaches beyond the job" in done.stderr
    assert hostile.fingerprint(outside) == before


def test_the_daemon_publishes_beside_strange_file_names(attacked):
    job, _, _ = attacked(hostile.strange_names)
    assert not ends_badly([verb(["watch", "--once"], job.root)])
    assert Path(job.state, "version.json").exists()
    strange = {os.fsdecode(name) for name in hostile.NAMES}
    assert strange <= set(os.listdir(job.root))


def wait_until(holds):
    """Wait for something that is to happen."""
    ends = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.05)


def test_a_leader_does_not_follow_a_link_out_of_the_job_and_recovers(tmp_path):
    job, outside = hostile.build(tmp_path / "job"), hostile.canary(tmp_path / "outside")
    before = hostile.fingerprint(outside)
    trash, aside, said = Path(job.trash), tmp_path / "aside", tmp_path / "said"
    words = ("watch", job.root, "--keep-last", 1, "--poll", 0.05, "--reconcile", 1, "--trash-grace", 0)
    with (
        said.open("wb") as log,
        subprocess.Popen(command(*words), stdout=log, stderr=log, env=environment()) as daemon,
    ):
        try:
            wait_until(Path(job.version).exists)
            trash.rename(aside)
            trash.symlink_to(outside)
            for step in (4, 5, 6):
                write_step(job, step)
            wait_until(lambda: "symbolic link" in said.read_text())
            assert Path(job.step(2)).exists()
            trash.unlink()
            aside.rename(trash)
            wait_until(lambda: not Path(job.step(2)).exists())
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(SECONDS) == 0
        finally:
            daemon.kill()
    assert "Traceback" not in said.read_text()
    assert hostile.fingerprint(outside) == before
