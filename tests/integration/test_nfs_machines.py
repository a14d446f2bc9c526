"""Real NFS between three machines that are killed and cut off: the server, the leading daemon's host, its network.

Each scenario takes one to four minutes, so `make test` leaves them to `make test-faults` (SYNCD_NFS=full).
"""

import itertools
import json
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest
from beds import probe
from beds.nfs_machines import Machines, StoodStillError, machines

pytestmark = [
    pytest.mark.group("NFS v4.2"),
    pytest.mark.beds,
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.only_with(SYNCD_NFS="full"),
]

TESTS = Path(__file__).parents[1]
STEPS = 100
OFF = 3.0
"""Seconds that a server is without power, and a client that is cut off without a network after the take-over."""

PRELUDE = f"""
export PYTHONPATH={TESTS.parent}:{TESTS}
python={sys.executable}
programs={TESTS}/programs
write() {{ $python $programs/write_steps.py $JOBS/job 1 $1 1 --paced --log $OUT/written 2>$OUT/writer.log; }}
watch() {{ # a leader, or a stand-by
  $python -m syncd watch $JOBS/job --keep-last 1 --trash-grace 1 --log-format json 2>$OUT/daemon-$NAME.log &
}}
follow() {{ $python $programs/follow.py $JOBS/job reader $1 $OUT/reader.json 2>$OUT/reader.log; }}
leave() {{ touch $OUT/$NAME.done; told stop; pkill -TERM -f 'syncd watch'; wait; }}
"""

SERVER = """
mkdir -p $JOBS/job
[ -e $JOBS/job/latest_state_dict_iteration.txt ] &&
  echo $(cat $JOBS/job/latest_state_dict_iteration.txt) >>$OUT/markers
$python $programs/observe.py $JOBS/job $OUT/observed >$OUT/observer.log 2>&1 &
told left
touch $OUT/observed.stop
wait
cp $JOBS/job/.syncd/version.json $OUT/
$python -c '
import json, sys
from support.checker import problems
print(json.dumps(problems(sys.argv[1])))' $JOBS/job >$OUT/problems
touch $OUT/server.done
told never
"""

WRITER = f"""
mkdir -p $JOBS/job
write {STEPS} || exit 1
leave
"""

FOLLOWER = f"""
watch
follow {STEPS} || exit 1
leave
"""

LEADER = """
watch
leave
"""

FOLLOWING_WRITER = f"""
told led
watch
write {STEPS} &
follow {STEPS} || exit 1
leave
"""


def told(bed, name):
    """Return what a machine's daemon has told so far."""
    path = bed.out / f"daemon-{name}.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


def of(bed, name, event):
    return [line for line in told(bed, name) if line["event"] == event]


def pairs(bed, name):
    return [(line["generation"], line["step"]) for line in of(bed, name, "version_published")]


def newest(bed, name):
    return max((step for _, step in pairs(bed, name)), default=0)


def at(line):
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def has(bed, name, event):
    return lambda: of(bed, name, event)


def reaches(bed, name, step):
    return lambda: newest(bed, name) >= step


def finish(bed, *names):
    """Let the machines come to their end, and have what they leave judged on the server's own disk."""
    for name in names:
        bed.until((bed.out / f"{name}.done").exists, f"the end of {name}", 300)
    bed.tell("stop")
    for name in names:
        bed.until((bed.out / f"{name}.rc").exists, f"the last word of {name}")
        assert (bed.out / f"{name}.rc").read_text().strip() == "0", bed.report()
    bed.tell("left")
    bed.until((bed.out / "server.done").exists, "the server's judgement")


def kill_the_server_twice(bed):
    figures = {}
    for number, step in enumerate((STEPS * 3 // 10, STEPS * 7 // 10), 1):
        bed.until(reaches(bed, "b", step), f"step {step}")
        off = bed.kill("server")
        time.sleep(OFF)  # what the writer was told before has reached the host
        announced, before = int(lines(bed.out / "written")[-1].split()[0]), newest(bed, "b")
        bed.boot("server")
        bed.until(lambda number=number: len(lines(bed.out / "markers")) == number, "the server")
        assert int(lines(bed.out / "markers")[-1]) >= announced, "a marker that was durable is gone"
        bed.until(reaches(bed, "b", before + 1), "the next version")
        again = next(line for line in of(bed, "b", "version_published") if line["step"] > before)
        figures[f"server {number} back after"] = float(lines(bed.out / "served")[-1]) - off
        figures[f"next version {number} after"] = at(again) - off
    finish(bed, "a", "b")
    return figures


def take_over(bed, harm):
    """Harm the leader after a third of the steps; return the times in which the stand-by took its place."""
    bed.until(has(bed, "a", "leadership_acquired"), "the leader")
    bed.tell("led")
    bed.until(has(bed, "b", "standby_started"), "the stand-by")
    bed.until(reaches(bed, "a", STEPS * 3 // 10), "a third of the steps")
    off = harm("a")
    bed.until(has(bed, "b", "version_published"), "the next version")
    return {
        "led by the stand-by after": at(of(bed, "b", "leadership_acquired")[0]) - off,
        "next version after": at(of(bed, "b", "version_published")[0]) - off,
    }


def kill_the_leader(bed):
    figures = take_over(bed, bed.kill)
    finish(bed, "b")
    return figures


def cut_the_leader_off(bed):
    figures = take_over(bed, bed.cut)
    time.sleep(OFF)
    assert not of(bed, "a", "leadership_lost"), "it cannot know yet"
    healed = bed.heal("a")
    bed.until(has(bed, "a", "leadership_lost"), "the old leader to be fenced")
    figures["old leader stands by after"] = at(of(bed, "a", "leadership_lost")[0]) - healed
    finish(bed, "a", "b")
    figures["longest time between two versions afterwards"] = longest(bed, "b")
    return figures


def longest(bed, name):
    times = [at(line) for line in of(bed, name, "version_published")]
    return max(after - before for before, after in itertools.pairwise(times))


SCENARIOS = {
    "server": ({"server": SERVER, "a": WRITER, "b": FOLLOWER}, kill_the_server_twice),
    "leader": ({"server": SERVER, "a": LEADER, "b": FOLLOWING_WRITER}, kill_the_leader),
    "partition": ({"server": SERVER, "a": LEADER, "b": FOLLOWING_WRITER}, cut_the_leader_off),
}


@dataclass(frozen=True)
class Run:
    """What a scenario has left."""

    bed: Machines
    figures: dict[str, float]
    seconds: float

    @property
    def notes(self):
        """Return what was noted of version.json, as the server's own kernel saw it replaced."""
        return [
            note for note in map(json.loads, lines(self.bed.out / "observed")) if note["file"] == "version"
        ]

    @property
    def observed(self):
        """Return the pairs that version.json has had; it is replaced with the same pair when last_good moves."""
        pairs = ((note["generation"], note["step"]) for note in self.notes)
        return [pair for pair, _ in itertools.groupby(pairs)]


def once(scenario, place):
    scripts, play = SCENARIOS[scenario]
    began = time.monotonic()
    with machines(place, {name: PRELUDE + text for name, text in scripts.items()}) as bed:
        figures = play(bed)
    return Run(bed, figures, time.monotonic() - began)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    """Return what plays a scenario; a machine that itself stands still is booted once more."""
    if (reason := probe.nfs_machines()) is not None:
        pytest.skip(reason)

    def play(name):
        try:
            return once(name, tmp_path_factory.mktemp(name))
        except StoodStillError:
            return once(name, tmp_path_factory.mktemp(name))

    return play


def judge(run):
    """Nothing is lost, nothing double, nothing read that is not whole."""
    out = run.bed.out
    assert json.loads((out / "problems").read_text()) == []
    version = json.loads((out / "version.json").read_text())
    assert version["step"] == STEPS == int(lines(out / "written")[-1].split()[0])
    seen = json.loads((out / "reader.json").read_text())
    assert seen["wrong"] == []
    assert seen["pairs"] == sorted(seen["pairs"])
    return version, seen


EACH_STEP = [(1, step) for step in range(1, STEPS + 1)]
"""Nothing lost, nothing double, nothing out of order: no step is written before the one before is published."""


def say(record_line, name, run, **more):
    figures = {key: f"{seconds:.1f} s" for key, seconds in run.figures.items()}
    record_line(
        f"NFS, three machines, {name}: {json.dumps({**figures, **more, 'seconds': round(run.seconds)})}"
    )


def test_no_version_is_lost_if_the_server_is_killed_twice(scenario, record_line):
    run = scenario("server")
    version, seen = judge(run)
    assert pairs(run.bed, "b") == EACH_STEP
    assert len(of(run.bed, "b", "leadership_acquired")) == 1, "by one daemon, in one term"
    assert version["term"] == 1
    say(record_line, "server killed twice", run, versions=STEPS, loads=seen["loads"])


def test_no_version_is_lost_if_the_host_of_the_leader_is_killed(scenario, record_line):
    run = scenario("leader")
    version, seen = judge(run)
    assert run.observed == EACH_STEP
    assert version["term"] == of(run.bed, "b", "leadership_acquired")[0]["term"]
    say(record_line, "host of the leader killed", run, versions=STEPS, loads=seen["loads"])


def test_a_leader_cut_off_from_the_network_publishes_nothing_afterwards(scenario, record_line):
    run = scenario("partition")
    version, seen = judge(run)
    taken = pairs(run.bed, "b")
    by_the_old_one = pairs(run.bed, "a")
    assert run.observed == EACH_STEP
    terms = [note["term"] for note in run.notes]
    assert terms == sorted(terms), "the old leader has replaced it after the take-over"
    assert set(taken) <= set(run.observed)
    assert version["term"] == of(run.bed, "b", "leadership_acquired")[0]["term"]
    assert max(by_the_old_one) < min(taken), "it published after the take-over"
    first = min(step for _, step in taken)
    removed = [line["step"] for line in of(run.bed, "a", "step_pruned")]
    assert max(removed, default=0) < first, "it deleted after the take-over"
    say(record_line, "leader cut off", run, versions=STEPS, loads=seen["loads"])
