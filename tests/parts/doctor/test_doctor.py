"""`syncd doctor` as a command: alone, in pairs, interrupted, and on real NFS."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from support import paths

from syncd.errors import JobMissingError, StorageError, TimedOutError
from syncd.parts.doctor.command import doctor

ROOT = str(paths.ROOT)
COMMAND = "from syncd.parts.doctor.command import doctor; doctor()"
FAST = ["--seconds", "0.2"]


def invoke(*arguments):
    return CliRunner().invoke(doctor, [str(argument) for argument in arguments])


def start(*arguments):
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.fixture
def job(tmp_path):
    directory = tmp_path / "job"
    directory.mkdir()
    return directory


def test_doctor_prints_a_table_and_a_verdict(job):
    done = invoke(job, *FAST)
    assert done.exit_code == 0
    assert "rename-over-full" in done.output
    assert f"{job}: fit for syncd jobs" in done.output
    assert os.listdir(job) == []


def test_doctor_json_has_findings_and_a_verdict(job):
    done = invoke(job, "--json", *FAST)
    document = json.loads(done.stdout)
    assert list(document) == [
        "schema_version", "protocol", "directory", "findings", "peer", "expect", "verdict",
    ]  # fmt: skip
    assert (document["schema_version"], document["directory"], document["peer"]) == (1, str(job), None)
    assert {"name", "verdict", "detail", "advice", "figures"} == set(document["findings"][0])


def test_doctor_help_has_an_example():
    assert "syncd doctor /mnt/jobs --peer" in invoke("--help").output


def test_doctor_of_a_missing_directory_fails_with_a_hint(tmp_path):
    done = invoke(tmp_path / "none")
    assert isinstance(done.exception, JobMissingError)
    assert done.exception.hint == f"mkdir -p {tmp_path}/none"


def test_doctor_of_an_unwritable_directory_exits_with_74(job, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.mkdir", refuse)
    done = invoke(job, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 74
    assert document["verdict"] == "fail"
    verdicts = {finding["name"]: finding["verdict"] for finding in document["findings"]}
    assert (verdicts["writable"], verdicts["replace"]) == ("fail", "skip")


def test_without_a_peer_doctor_prints_local_findings_and_times_out(job):
    done = invoke(job, "--peer", "--wait", "0.1", "--json", *FAST)
    assert isinstance(done.exception, TimedOutError)
    assert done.exception.exit_code == 4
    assert done.exception.hint.endswith(f"syncd doctor {job} --peer")
    assert json.loads(done.stdout)["verdict"] in ("ok", "warn")
    assert os.listdir(job) == []


def test_local_findings_are_printed_if_the_peer_conversation_fails(job, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("syncd.parts.doctor.peer.PeerLink.say", refuse)
    done = invoke(job, "--peer", "--json", *FAST)
    assert isinstance(done.exception, StorageError)
    assert done.exception.hint == "raise the quota or remove files: quota -s"
    assert json.loads(done.stdout)["peer"] is None


def test_a_scratch_directory_that_cannot_be_removed_is_named(job, monkeypatch):
    monkeypatch.setattr("syncd.parts.doctor.probe.sweep", lambda _: False)
    document = json.loads(invoke(job, "--json", *FAST).stdout)
    last = document["findings"][-1]
    assert (last["name"], last["verdict"]) == ("scratch", "warn")
    assert os.listdir(job) == [os.path.basename(last["advice"])]


def test_two_doctor_processes_measure_together(job):
    pair = [start(job, "--peer", "--json", *FAST) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    one, two = (json.loads(out)["peer"] for out, _ in outputs)
    assert one["outward"] == two["inward"]
    assert (one["inward"]["flock"], one["inward"]["lockf"]) == ("excludes", "excludes")
    assert os.listdir(job) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_doctor_leaves_no_files(job, number):
    process = start(job, "--peer", "--wait", "120", *FAST)
    meeting = job / ".syncd-doctor-peer"
    end = time.monotonic() + 60
    while not meeting.exists() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert os.listdir(job) == []


ON_NFS = """
mkdir $A/job
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={root}
on_b {python} -c '{command}' $B/job --peer --json --seconds 8 > $OUT/b.json &
on_a {python} -c '{command}' $A/job --peer --json --seconds 8 > $OUT/a.json
rc=$?
wait $! || rc=$?
[[ -z $(ls -A $A/job) ]] || rc=99
exit $rc
"""


@pytest.mark.beds
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "locks"),
    [
        pytest.param(
            "vers=4.2",
            "excludes",
            marks=[
                pytest.mark.group("NFS v4.2"),
                pytest.mark.only_with(SYNCD_NFS="full"),
            ],
        ),
        pytest.param("vers=3,nolock", "both acquire", marks=pytest.mark.group("NFS v3")),
    ],
)
def test_doctor_on_nfs_recommends_polling(nfs_bed, tmp_path, record_line, options, locks):
    script = tmp_path / "script.sh"
    script.write_text(ON_NFS.format(root=ROOT, python=sys.executable, command=COMMAND))
    environment = {**os.environ, "BED": str(tmp_path / "bed")}
    done = subprocess.run(
        [nfs_bed, "-o", options, script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    report = json.loads((tmp_path / "bed/out/a.json").read_text())
    mount = next(finding for finding in report["findings"] if finding["name"] == "mount")
    assert re.search(r"vers=[34]", mount["detail"])
    for way in (report["peer"]["outward"], report["peer"]["inward"]):
        assert not way["events"]
        assert way["new_name_ms"] is None
        assert (way["flock"], way["lockf"]) == (locks, locks)
        tick, stat = way["round_trip_p50_ms"] / 2, way["stat_ms"]
        record_line(f"doctor on {options}: one way p50 {tick:.1f} ms, stat {stat} ms")
    assert (report["expect"]["wake"], report["expect"]["trash_grace"]) == ("poll", 75.0)
