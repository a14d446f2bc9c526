"""A real NFS server on a hard mount that goes away and comes back, under a daemon that is watched meanwhile.

It takes a minute, so `make test` leaves it to `make test-faults` (SYNCD_NFS=full).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.group("NFS v4.2"),
    pytest.mark.beds,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.only_with(SYNCD_NFS="full"),
]

TESTS = Path(__file__).parents[1]
STOOD_STILL = 75

SCRIPT = f"""
export PYTHONPATH={TESTS.parent}:{TESTS} PYTHONDONTWRITEBYTECODE=1 PYTHONFAULTHANDLER=1
python={sys.executable}
wait_for() {{ # TEXT COUNT: until the daemon's log has the text so often, 90 s at most
  for _ in $(seq 900); do
    [ "$(grep -cs -- "$1" $OUT/daemon.log)" -ge $2 ] && return
    sleep 0.1
  done
  echo "waited in vain for $2 times $1"
  exit 1
}}
published() {{ wait_for "\\"version_published\\".*\\"step\\": $1," 1; }}
mkdir $SRV/job /dev/shm/run
export XDG_RUNTIME_DIR=/dev/shm/run WATCHDOG_USEC=6000000
on_a $python -m syncd watch $A/job --log-format json 2>$OUT/daemon.log &
daemon=$!
wait_for '"leadership_acquired"' 1
on_a $python $TESTS/programs/write_steps.py $A/job 1 1 1 || exit 1
published 1

rpc.nfsd 0
wait_for '"state": "stuck"' 1
on_a $python -m syncd status $A/job --patience 2 --json >$OUT/status.json 2>$OUT/status.log
echo $? >$OUT/status.rc
on_a $python -m syncd ls $A/job --patience 200 >$OUT/ls.txt 2>$OUT/ls.log &
waiting=$!
for verb in "verify $A/job" "pin $A/job 1"; do
  on_a $python -m syncd $verb --patience 2 >>$OUT/verbs.log 2>&1
  echo $? >>$OUT/verbs.rc
done
rpc.nfsd 4
echo 1 >/proc/fs/nfsd/v4_end_grace 2>/dev/null
wait_for '"state": "ok"' 1
wait $waiting
echo $? >$OUT/ls.rc
on_a $python $TESTS/programs/write_steps.py $A/job 2 2 1 || exit 1
published 2

rpc.nfsd 0
wait_for '"state": "stuck"' 2
kill -TERM $(pgrep -f 'syncd watch')
wait $daemon
echo $? >$OUT/daemon.rc
rpc.nfsd 4
"""


@pytest.fixture(scope="module")
def out(nfs_bed, tmp_path_factory):
    """Run the script in the bed; a machine that itself stood still is booted once more."""
    place = tmp_path_factory.mktemp("nfs-dead")
    script = place / "script.sh"
    script.write_text(SCRIPT.replace("$TESTS", str(TESTS)))
    for boot in ("1", "2"):
        bed = place / f"bed{boot}"
        environment = os.environ | {"BED": str(bed), "LIMIT": "300", "QUIET": "120"}
        done = subprocess.run(
            [nfs_bed, script], capture_output=True, text=True, errors="replace", env=environment, check=False
        )
        if done.returncode != STOOD_STILL:
            break
    found = bed / "out"
    log = found / "daemon.log"
    said = done.stdout[-2000:] + done.stderr[-1000:] + (log.read_text()[-4000:] if log.exists() else "")
    assert done.returncode == 0, said
    return found


def events(out):
    lines = (out / "daemon.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_status_shows_the_last_known_state_while_the_server_is_down(out):
    assert (out / "status.rc").read_text().strip() == "74", (out / "status.log").read_text()
    known = json.loads((out / "status.json").read_text())["known"]
    assert (known["version"]["step"], known["mount"]["state"], known["runs"]) == (1, "stuck", True)


def test_verbs_exit_with_74_while_the_server_is_down_and_work_afterwards(out):
    said = (out / "verbs.log").read_text()
    assert (out / "verbs.rc").read_text().split() == ["74", "74"], said
    assert said.count("error: the mount has not answered for") == 2
    assert (out / "ls.rc").read_text().strip() == "0", (out / "ls.log").read_text()
    assert "complete" in (out / "ls.txt").read_text()


def test_the_daemon_resumes_in_its_term_when_the_server_is_back(out, record_line):
    told = [event for event in events(out) if event["event"] == "mount_state_changed"]
    assert [event["state"] for event in told][:2] == ["stuck", "ok"]
    assert sum(event["event"] == "leadership_acquired" for event in events(out)) == 1, (
        "the same daemon, in one term"
    )
    record_line(
        f"NFS: {told[1]['detail'].split(' came back')[-1].strip()} without an answer, then the next step"
    )


def test_the_daemon_exits_with_74_if_stopped_while_the_server_is_down(out):
    assert (out / "daemon.rc").read_text().strip() == "74"
    assert "the lead was not released" in (out / "daemon.log").read_text()
