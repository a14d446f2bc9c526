"""Real NFS: a server and two clients, each with its own cache, in one kernel whose clocks therefore agree.

By default markers come faster than the daemon looks, 50 over NFSv4.2 on each side. SYNCD_NFS=full replaces the marker
1,000 times, over NFSv3 too, paced so that nearly every one is published by itself. The latencies are written as JSON
where SYNCD_FIGURES names a directory.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import matrices

pytestmark = [pytest.mark.beds, pytest.mark.slow, pytest.mark.timeout(1400)]

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STEPS, PAUSE = (1000, "0.3") if os.environ.get("SYNCD_NFS") == "full" else (50, "0.02")
CACHED = 25.0  # a name that was looked for before it existed stays absent for 30 to 60 s
LIMIT = "3000" if PAUSE == "0.3" else "600"
STOOD_STILL = 75
OPTIONS = {"v4.2": "vers=4.2", "v3": "vers=3,nolock"}

PRELUDE = f"""
export PYTHONPATH={os.path.dirname(TESTS)}:{TESTS} PYTHONDONTWRITEBYTECODE=1 PYTHONFAULTHANDLER=1
python={sys.executable}
programs={TESTS}/programs
wait_for() {{ # FILE TEXT: until the file has the text, 60 s at most
  for _ in $(seq 600); do grep -qs "$2" "$1" && return; sleep 0.1; done
  echo "waited in vain for $2 in $1"
  return 1
}}
# scenario NAME COMMAND ...: its results are below $OUT/NAME, its status too
scenario() {{
  mkdir $OUT/$1
  (OUT=$OUT/$1; shift; "$@" >$OUT/script.log 2>&1)
  echo $? >$OUT/$1/rc
}}
"""

SCENARIOS = """
follow() { # DAEMON: the client on which the daemon runs
  local on=on_$1 job=$SRV/job_$1 a=$A/job_$1 b=$B/job_$1 readers="" reader
  local -A root=([a]=$a [b]=$b)
  mkdir $job
  $python $programs/observe.py $job $OUT/observed.jsonl >$OUT/observer.log 2>&1 &
  wait_for $OUT/observer.log ready || exit 1
  $on $python -m syncd watch ${root[$1]} --keep-last 1 --trash-grace 1 >$OUT/daemon.log 2>&1 &
  wait_for $OUT/daemon.log '"leadership_acquired"' || exit 1
  for reader in r1 r2; do
    on_b $python $programs/follow.py $b $reader @STEPS@ $OUT/$reader.json >>$OUT/$reader.log 2>&1 &
    readers="$readers $!"
  done
  on_a $python $programs/write_steps.py $a 1 @STEPS@ 1 --pause @PAUSE@ || exit 1
  wait $readers || exit 1
  cat /proc/fs/nfsd/clients/*/states >$OUT/states.txt  # empty for NFSv3
  touch $OUT/observed.jsonl.stop
  pkill -TERM -f 'syncd watch'
  wait
  ls $job >$OUT/left.txt
}

truncated() {
  mkdir $SRV/job
  on_b $python -m syncd watch $B/job --reconcile 1 >$OUT/daemon.log 2>&1 &
  on_a $python $programs/write_steps.py $A/job 1 2 2 || exit 1
  wait_for $OUT/daemon.log '"version_published"' || exit 1
  on_b $python -m syncd verify $B/job 2 --deep || exit 1
  truncate -s 100 $SRV/job/global_step_2/actor/model-00002-of-00002.safetensors
  on_b $python -m syncd verify $B/job 2 --deep >$OUT/verify.log 2>&1
  echo $? >$OUT/verify.rc
  wait_for $SRV/job/.syncd/events.jsonl step_damaged
  cp $SRV/job/.syncd/events.jsonl $OUT/
  pkill -TERM -f 'syncd watch'
  wait
}

scenario truncated truncated
scenario follow_a follow a
scenario follow_b follow b
"""


@dataclass(frozen=True)
class Run:
    """What one boot of the bed has left."""

    version: str
    status: int
    out: Path
    console: str
    boots: int

    def results(self, scenario: str) -> Path:
        """Return the directory of a scenario's results if it came to its end."""
        path = self.out / scenario
        ended = path / "rc"
        assert ended.exists(), self.report(path)
        assert ended.read_text().strip() == "0", self.report(path)
        return path

    def report(self, path: Path) -> str:
        """Say what there is to find out why: who waited for what, then the ends of the logs."""
        logs = [self.out / "waiting.log", self.out / "standstill.log", *sorted(path.glob("*.log"))]
        ends = [f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs if log.exists()]
        return "\n".join([f"{path.name}: the bed ended with {self.status}\n{self.console[-1500:]}", *ends])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("v4.2", marks=pytest.mark.group("NFS v4.2")),
        pytest.param("v3", marks=[pytest.mark.group("NFS v3"), matrices.LONG]),
    ],
)
def run(request, nfs_bed, tmp_path_factory):
    """Run all scenarios in one boot of the bed; a machine that itself stood still is booted once more."""
    place = tmp_path_factory.mktemp("nfs")
    script = place / "script.sh"
    script.write_text(PRELUDE + SCENARIOS.replace("@STEPS@", str(STEPS)).replace("@PAUSE@", PAUSE))
    boots, status = 0, STOOD_STILL
    while status == STOOD_STILL and boots < 2:
        boots += 1
        bed = place / f"bed{boots}"
        environment = os.environ | {"BED": str(bed), "LIMIT": LIMIT, "QUIET": "90", "MEM": "1536M"}
        done = subprocess.run(
            [nfs_bed, "-o", OPTIONS[request.param], script],
            capture_output=True, text=True, errors="replace", env=environment, check=False,
        )  # fmt: skip
        status = done.returncode
    return Run(request.param, status, bed / "out", done.stdout + done.stderr, boots)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def latencies(observed):
    """Return, for each marker, the seconds until its step or a newer one was published; none if it never was."""
    versions = [note for note in observed if note["file"] == "version"]
    found = {}
    for note in observed:
        if note["file"] == "marker" and note["step"] not in found:
            after = (v["at"] for v in versions if v["step"] >= note["step"] and v["at"] >= note["at"])
            at = next(after, None)
            if at is not None:
                found[note["step"]] = at - note["at"]
    return found


def figures(seconds):
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "p50_ms": round(cuts[49] * 1e3, 1),
        "p99_ms": round(cuts[98] * 1e3, 1),
        "max_ms": round(max(seconds) * 1e3, 1),
    }


def publish_figures(name, document):
    if directory := os.environ.get("SYNCD_FIGURES"):
        with open(f"{directory}/{name}.json", "w", encoding="ascii") as file:
            json.dump(document, file, indent=1)


@pytest.mark.fault("NFS's cached absence adds 60 s a step")
@pytest.mark.fault("a step is pruned while it is read")
@pytest.mark.parametrize("daemon", ["a", "b"])
def test_every_marker_is_published_through_nfs(run, daemon, record_line):
    out, version = run.results(f"follow_{daemon}"), run.version
    observed = read_lines(out / "observed.jsonl")
    lag = latencies(observed)
    pairs = [(note["generation"], note["step"]) for note in observed if note["file"] == "version"]
    readers = {name: json.loads((out / f"{name}.json").read_text()) for name in ("r1", "r2")}
    loads = {name: (seen["loads"], seen["gone"]) for name, seen in readers.items()}
    document = {
        "mount": OPTIONS[version],
        "daemon_on": f"client {daemon}",
        "markers": STEPS,
        "markers_seen_by_the_server": len({note["step"] for note in observed if note["file"] == "marker"}),
        "versions": len(pairs),
        "marker_to_version": figures(list(lag.values())),
        "readers_loads_and_gone": loads,
    }
    publish_figures(f"nfs-{version}-daemon-{daemon}", document)
    record_line(f"NFS {version}, writer on a, daemon on {daemon}, readers on b: {json.dumps(document)}")
    if run.boots > 1:
        record_line(f"NFS {version}: the bed's machine stood still and was booted once more")
    assert pairs == sorted(pairs)
    assert pairs[-1] == (1, STEPS)
    assert len(lag) == document["markers_seen_by_the_server"] > STEPS * 0.9, (
        "a marker was never followed by its version"
    )
    # Daemon and readers had looked for the marker and the version before there was one.
    assert max(lag.values()) < CACHED, "a step waited for the attribute cache"
    for name, seen in readers.items():
        assert not seen["wrong"], f"{name}: {seen['wrong'][:5]}"
        assert seen["loads"] > 0
    left = [name for name in (out / "left.txt").read_text().split() if name.startswith("global_step_")]
    assert len(left) < 10, "superseded steps were not pruned"


@pytest.mark.parametrize("daemon", ["a", "b"])
def test_no_reader_makes_a_publisher_wait_for_a_delegation(run, daemon):
    """A server that has promised a reader to ask first makes whoever replaces the file wait 0.1 s."""
    states = (run.results(f"follow_{daemon}") / "states.txt").read_text()
    promised = [line for line in states.splitlines() if "type: deleg" in line]
    assert not [line for line in promised if "version.json" in line or "latest_state_dict" in line]


def test_a_shard_truncated_on_the_server_is_reported_as_damaged(run):
    out = run.results("truncated")
    assert (out / "verify.rc").read_text().strip() == "65", (out / "verify.log").read_text()
    damaged = [event for event in read_lines(out / "events.jsonl") if "step_damaged" in json.dumps(event)]
    assert damaged, "the daemon told nothing of it"
