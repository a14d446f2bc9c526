"""Terms: one leads, whoever is gone is replaced, and whoever has been replaced changes nothing any more."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.memory import HandClock

from syncd.errors import CorruptDataError, FencedError, LockHeldError, StorageError, TermLostError
from syncd.protocol import process as subject
from syncd.protocol.layout import Job
from syncd.protocol.leadership import (
    BEAT,
    TIMEOUT,
    Term,
    latest_token,
    parse_token,
    read_leader,
    token_name,
)
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.process import Process
from syncd.protocol.takeover import Candidate, fence_below

PROGRAM = Path(__file__).parents[1] / "programs" / "terms.py"


@pytest.fixture
def job(tmp_path) -> Job:
    return Job.at(tmp_path / "job")


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def claim(
    job: Job, clock: HandClock, *, dead: bool = False, disk: LocalDisk | None = None, **options
) -> Term:
    """Claim as one who finds the place free, or takes the leader for dead."""
    candidate = Candidate(
        replace(job, disk=disk or LocalDisk()), clock, gone=lambda _: dead, **{"timeout": TIMEOUT, **options}
    )
    assert candidate.holder() is None
    return candidate.claim()


def names(path: str) -> set[str]:
    return set(os.listdir(path)) if os.path.isdir(path) else set()


def tree(path: str) -> dict[str, bytes | None]:
    """Return all that is below a path, files with their contents."""
    found = sorted(Path(path).rglob("*"))
    return {str(item.relative_to(path)): item.read_bytes() if item.is_file() else None for item in found}


def test_term_tokens_round_trip_as_names():
    assert parse_token(token_name(7)) == 7
    for name in ("", "7", ".claim-7", "000000000x", "\u0667" * 10, "00000000007"):
        assert parse_token(name) is None


def test_the_first_claim_makes_term_1(job, clock):
    term = claim(job, clock)
    assert (term.token, term.floor) == (1, None)
    assert names(job.lock) == {token_name(1)}
    assert names(job.trash) == {token_name(1)}
    leader = read_leader(job, 1)
    assert leader.process == Process.current()
    assert (leader.beat, leader.released) == (0, False)


def test_a_live_leader_keeps_its_term(job, clock):
    term = claim(job, clock)
    candidate = Candidate(job, clock)
    for _ in range(10):
        assert candidate.holder() == read_leader(job, 1)
        clock.sleep(BEAT)
        term.beat(None)
    with pytest.raises(LockHeldError):
        Candidate(job, clock).claim()
    assert latest_token(job) == 1


def test_a_silent_leader_is_replaced_only_after_the_timeout(job, clock):
    claim(job, clock)
    candidate = Candidate(job, clock, gone=lambda _: False)
    assert candidate.holder() is not None
    clock.sleep(TIMEOUT - 0.1)
    assert candidate.holder() is not None
    clock.sleep(0.1)
    assert candidate.holder() is None
    assert candidate.claim().token == 2


def test_a_new_candidate_waits_the_whole_timeout(job, clock):
    claim(job, clock)
    clock.sleep(10 * TIMEOUT)
    assert Candidate(job, clock, gone=lambda _: False).holder() is not None


def test_a_released_leader_is_replaced_at_once(job, clock):
    term = claim(job, clock)
    term.release()
    assert claim(job, clock).token == 2


def test_a_dead_leader_of_this_host_is_replaced_at_once(job, clock):
    claim(job, clock, process=replace(Process.current(), started=1))
    candidate = Candidate(job, clock)
    assert candidate.holder() is None
    assert candidate.claim().token == 2


def test_a_leader_of_another_host_is_not_considered_dead(job, clock):
    claim(job, clock, process=replace(Process.current(), boot="another", started=1))
    assert Candidate(job, clock).holder() is not None


@pytest.mark.parametrize("content", [b"", b"{", b'{"protocol":1}', b'{"protocol":1,"process":{"pid":NaN}}'])
def test_a_leader_with_a_damaged_file_is_replaced_after_the_timeout(job, clock, content):
    term = claim(job, clock)
    Path(term.directory, "leader.json").write_bytes(content)
    with pytest.raises(CorruptDataError):
        read_leader(job, 1)
    candidate = Candidate(job, clock)
    assert candidate.holder().identity == "unknown"
    clock.sleep(TIMEOUT)
    assert candidate.holder() is None
    assert candidate.claim().token == 2


def test_a_process_is_gone_only_if_its_identity_on_this_host_is():
    mine = Process.current()
    assert not mine.is_gone()
    assert replace(mine, started=mine.started + 1).is_gone()
    assert replace(mine, pid=2**22 + 1).is_gone()
    for elsewhere in (replace(mine, boot="x", started=1), replace(mine, namespace="x", started=1)):
        assert not elsewhere.is_gone()
    assert not Process("", "", 0, 0).is_gone()
    assert replace(mine, pid=2**40, started=1).is_gone()


def test_a_process_hidden_by_proc_is_not_considered_dead(monkeypatch):
    """hidepid= and ProtectProc= hide processes of other users; that they are there can still be asked."""
    mine = Process.current()
    monkeypatch.setattr(subject, "_started", lambda _: subject._UNSEEN)
    assert not mine.is_gone()
    assert replace(mine, pid=2**22 + 1).is_gone()


def test_a_zombie_counts_as_gone():
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    started = subject._started(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert replace(Process.current(), pid=child.pid, started=started).is_gone()
    child.communicate()


def test_the_floor_is_inherited_by_each_leader_and_never_decreases(job, clock):
    first = claim(job, clock)
    first.beat((2, 7))
    assert claim(job, clock, dead=True).floor == (2, 7)
    for floor, expected in (((2, 6), (2, 7)), ((3, 0), (3, 0)), (None, (3, 0))):
        candidate = Candidate(job, clock, gone=lambda _: True)
        assert candidate.holder() is None
        assert candidate.claim(floor).floor == expected


def test_a_heartbeat_is_written_when_it_is_due_or_the_floor_moves(job, clock):
    term = claim(job, clock)
    term.beat(None)
    assert read_leader(job, 1).beat == 0
    term.beat((1, 1))
    assert (read_leader(job, 1).beat, read_leader(job, 1).floor) == (1, (1, 1))
    clock.sleep(BEAT)
    term.beat((1, 1))
    assert read_leader(job, 1).beat == 2


def test_a_leader_publishes_and_moves_steps_to_its_trash(job, clock):
    term = claim(job, clock)
    os.mkdir(job.step(3))
    term.publish(job.version, b"one")
    term.publish(job.version, b"two")
    assert Path(job.version).read_bytes() == b"two"
    term.move_to_trash(job.step(3), "global_step_3.x")
    assert not os.path.exists(job.step(3))
    assert names(term.trash) == {"global_step_3.x"}
    assert names(term.directory) == {"leader.json", term.identity}
    assert names(term.staging) == set()


@pytest.mark.parametrize(
    "act",
    [
        lambda term, job: term.publish(job.version, b"stale"),
        lambda term, job: term.move_to_trash(job.step(3), "stale"),
        lambda term, job: term.beat((9, 9)),
    ],
)
def test_a_fenced_leader_cannot_change_anything(job, clock, act):
    old = claim(job, clock)
    os.mkdir(job.step(3))
    Path(job.step(3), "file").write_bytes(b"kept")
    new = claim(job, clock, dead=True)
    new.publish(job.version, b"new")
    before = tree(job.root)
    with pytest.raises(FencedError, match="term 2 has taken over from term 1"):
        act(old, job)
    assert tree(job.root) == before


def removed_and_claimed_by_another(job: Job, clock: HandClock) -> tuple[Term, Term]:
    """Return a leader whose terms somebody has removed, and another one of the same token."""
    old = claim(job, clock)
    os.mkdir(job.step(3))
    Path(job.step(3), "file").write_bytes(b"kept")
    shutil.rmtree(job.state)
    new = claim(job, clock)
    assert new.token == old.token
    return old, new


@pytest.mark.parametrize(
    "act",
    [
        lambda term, job: term.publish(job.version, b"stale"),
        lambda term, job: term.move_to_trash(job.step(3), "stale"),
        lambda term, job: term.discard(f"{job.requests}/one.json"),
        lambda term, job: term.beat((9, 9)),
    ],
)
def test_of_two_leaders_with_one_token_only_the_one_with_the_term_acts(job, clock, act):
    old, new = removed_and_claimed_by_another(job, clock)
    new.publish(job.version, b"new")
    os.makedirs(job.requests)
    Path(job.requests, "one.json").write_bytes(b"asked")
    before = tree(job.root)
    with pytest.raises(FencedError, match="term 1 of this daemon was removed"):
        act(old, job)
    old.release()
    assert tree(job.root) == before
    new.move_to_trash(job.step(3), "x")
    assert names(new.trash) == {"x"}


def test_a_candidate_claims_above_removed_terms_it_has_seen(job, clock):
    candidate = Candidate(job, clock)
    for _ in range(2):
        claim(job, clock, dead=True).beat((3, 9))
    assert candidate.holder() is not None
    shutil.rmtree(job.state)
    assert candidate.holder() is None
    assert candidate.found_removed
    term = candidate.claim()
    assert (term.token, term.floor) == (3, (3, 9))
    assert not candidate.found_removed


def test_the_trash_of_removed_terms_is_inherited_and_fenced(tmp_path, clock):
    job = Job.at(tmp_path / "job", tmp_path / "state")
    old = claim(job, clock)
    for step in (3, 4):
        os.mkdir(job.step(step))
    old.move_to_trash(job.step(3), "three")
    shutil.rmtree(job.state)
    new = claim(job, clock)
    with pytest.raises(FencedError):
        old.move_to_trash(job.step(4), "stale")
    assert names(new.trash) == {"three"}
    assert os.path.isdir(job.step(4))


def test_a_leader_with_a_removed_trash_loses_its_term_and_claims_again(job, clock):
    candidate = Candidate(job, clock)
    assert candidate.holder() is None
    term = candidate.claim()
    os.mkdir(job.step(3))
    shutil.rmtree(job.trash)
    with pytest.raises(TermLostError):
        term.move_to_trash(job.step(3), "x")
    assert candidate.holder() is None
    candidate.claim().move_to_trash(job.step(3), "x")


def test_a_claim_whose_term_is_removed_does_not_disturb_another_term(job, clock):
    other: list[Term] = []

    class Removed(Hooked):
        def after(self, operation, path):
            if operation == "rename" and path.endswith(token_name(1)):
                shutil.rmtree(job.state)
                other.append(claim(job, clock))

    with pytest.raises(LockHeldError):
        claim(job, clock, disk=Removed())
    other[0].publish(job.version, b"other")
    assert names(job.trash) == {token_name(1)}


@pytest.mark.parametrize("place", ["lock", "trash"])
def test_no_term_is_claimed_after_the_highest_token(job, clock, place):
    os.makedirs(f"{getattr(job, place)}/{token_name(10**10 - 1)}")
    candidate = Candidate(job, clock, timeout=0)
    assert candidate.holder() is None
    with pytest.raises(StorageError, match="no term can follow term 9999999999"):
        candidate.claim()
    assert names(job.lock) <= {token_name(10**10 - 1)}


def test_trash_of_earlier_releases_is_inherited(job, clock):
    os.makedirs(f"{job.lock}/{token_name(1)}")
    os.makedirs(f"{job.trash}/{token_name(1)}/global_step_3.3.abcdef12")
    candidate = Candidate(job, clock, timeout=0)
    assert candidate.holder() is None
    assert names(candidate.claim().trash) == {"global_step_3.3.abcdef12"}
    assert names(job.trash) == {token_name(2)}


def test_the_release_of_a_fenced_leader_changes_nothing(job, clock):
    old = claim(job, clock)
    claim(job, clock, dead=True)
    before = tree(job.root)
    old.release()
    assert tree(job.root) == before


def test_a_file_system_error_does_not_end_a_term(job, clock):
    term = claim(job, clock)
    with pytest.raises(FileNotFoundError):
        term.publish(f"{job.root}/none/version.json", b"")
    with pytest.raises(FileNotFoundError):
        term.move_to_trash(job.step(9), "global_step_9.x")
    term.publish(job.version, b"still in office")


def test_the_trash_of_earlier_terms_is_inherited(job, clock):
    old = claim(job, clock)
    for step in (3, 4):
        os.mkdir(job.step(step))
        Path(job.step(step), "file").write_bytes(b"%d" % step)
        old.move_to_trash(job.step(step), f"global_step_{step}.x")
    new = claim(job, clock, dead=True)
    assert names(job.trash) == {token_name(2)}
    assert tree(new.trash) == {
        "global_step_3.x": None,
        "global_step_3.x/file": b"3",
        "global_step_4.x": None,
        "global_step_4.x/file": b"4",
    }


def test_a_leader_without_pruning_makes_no_trash_but_fences_others(job, clock):
    first = claim(job, clock, removes=False)
    assert not os.path.exists(job.trash)
    os.makedirs(job.step(3))
    second = claim(job, clock, dead=True)
    second.move_to_trash(job.step(3), "x")
    third = claim(job, clock, dead=True, removes=False)
    assert names(third.trash) == {"x"}
    for old in (first, second):
        with pytest.raises(FencedError):
            old.publish(job.version, b"stale")


def test_other_names_beside_the_terms_are_kept(job, clock):
    claim(job, clock)
    os.mkdir(f"{job.lock}/notes")
    os.mkdir(f"{job.trash}/notes")
    claim(job, clock, dead=True)
    assert names(job.lock) == {token_name(2), "notes"}
    assert names(job.trash) == {token_name(2), "notes"}


def test_of_two_concurrent_claims_the_second_fails_without_traces(job, clock):
    candidates = [Candidate(job, clock) for _ in range(2)]
    assert [candidate.holder() for candidate in candidates] == [None, None]
    term = candidates[0].claim()
    before = tree(job.root)
    with pytest.raises(LockHeldError):
        candidates[1].claim()
    assert tree(job.root) == before
    term.publish(job.version, b"x")


class Hooked(LocalDisk):
    """Calls `before` and `after` around each operation that changes something."""

    def before(self, operation: str, path: str) -> None:
        pass

    def after(self, operation: str, path: str) -> None:
        pass

    def rename(self, source, target):
        self.before("rename", target)
        super().rename(source, target)
        self.after("rename", target)

    def make_directory(self, path):
        # Each level is a step of its own, as it is below.
        if not os.path.isdir(path):
            self.before("make_directory", path)
            super().make_directory(path)
            self.after("make_directory", path)

    def remove_directory(self, path):
        self.before("remove_directory", path)
        super().remove_directory(path)
        self.after("remove_directory", path)

    def unlink(self, path):
        self.before("unlink", path)
        super().unlink(path)
        self.after("unlink", path)

    def sync_directory(self, path):
        self.before("sync_directory", path)
        super().sync_directory(path)


class Crash(BaseException):
    """The process is gone here."""


class Crashing(Hooked):
    """Is gone before or after the operation of a number; from then on nothing happens any more."""

    def __init__(self, at: int, when: str) -> None:
        self.left, self.when, self.gone = at, when, False

    def _tick(self, when: str) -> None:
        if self.gone:
            raise Crash
        if when == self.when:
            self.left -= 1
            if self.left < 0:
                self.gone = True
                raise Crash

    def before(self, operation, path):
        self._tick("before")

    def after(self, operation, path):
        self._tick("after")

    def list(self, path):
        self._tick("look")
        return super().list(path)


def test_a_crash_at_any_point_of_a_claim_leaves_the_job_claimable(tmp_path, clock, record_line):
    points = 0
    for when in ("before", "after"):
        for at in range(1000):
            job = Job.at(tmp_path / f"{when}{at}")
            crashed_at = crash_and_claim_again(job, clock, at, when)
            if crashed_at is None:
                break
            points += 1
    record_line(f"claim of a term: {points} points of crash")
    assert points > 20


def crash_and_claim_again(job: Job, clock: HandClock, at: int, when: str) -> bool | None:
    """Crash a take-over at a point, take over again, check that all is there; None without such a point."""
    first = claim(job, clock)
    os.mkdir(job.step(3))
    first.move_to_trash(job.step(3), "global_step_3.x")
    os.mkdir(f"{job.lock}/.claim-left")
    Path(job.lock, ".claim-left", "leader.json").write_bytes(b"")
    try:
        claim(job, clock, dead=True, disk=Crashing(at, when))
    except Crash:
        pass
    else:
        return None
    before = latest_token(job)
    assert before in (1, 2)
    term = claim(job, clock, dead=True)
    assert term.token == before + 1
    assert names(job.lock) == {token_name(term.token)}
    assert names(job.trash) == {token_name(term.token)}
    assert names(term.trash) == {"global_step_3.x"}
    with pytest.raises(FencedError):
        first.publish(job.version, b"stale")
    term.publish(job.version, b"new")
    return True


def test_a_claim_emptied_by_fencing_does_not_become_a_term(job, clock):
    """The leader stops between emptying a prepared claim and removing it; just then its claimer goes on."""

    class Stops(Hooked):
        def after(self, operation, path):
            if operation == "unlink" and path.endswith("/leader.json"):
                raise Crash

    leader = claim(job, clock)
    fencing = replace(job, disk=Stops())

    class Claims(Hooked):
        def before(self, operation, path):
            if operation == "rename" and path.endswith(token_name(2)):
                with pytest.raises(Crash):
                    fence_below(fencing, leader.token, leader.trash)

    with pytest.raises(LockHeldError):
        claim(job, clock, dead=True, disk=Claims())
    assert latest_token(job) == 1
    term = claim(job, clock, dead=True)
    assert names(job.lock) == {token_name(term.token)}
    assert names(term.directory) == {"leader.json", term.identity}
    assert names(term.staging) == set()


@pytest.mark.parametrize(
    "operation", ["rename", "make_directory", "unlink", "remove_directory", "sync_directory"]
)
def test_a_candidate_overtaken_at_any_point_of_a_claim_gives_way(tmp_path, clock, operation):
    """Before each operation of a claim in turn, another one claims: exactly the later of the two leads."""
    for number in range(100):
        job = Job.at(tmp_path / f"{operation}{number}")
        first = claim(job, clock)
        os.mkdir(job.step(3))
        first.move_to_trash(job.step(3), "global_step_3.x")
        other: list[Term] = []

        class Overtaken(Hooked):
            left = number

            def before(self, name, path, job=job, other=other):
                if name == operation and not other:
                    self.left -= 1
                    if self.left < 0:
                        other.append(claim(job, clock, dead=True))

        try:
            term = claim(job, clock, dead=True, disk=Overtaken())
        except LockHeldError:
            term = None
        if not other:
            assert number > 0
            break
        check_one_leads(job, term, other[0])


def check_one_leads(job: Job, term: Term | None, other: Term) -> None:
    leaders = []
    for one in [other, *([term] if term else [])]:
        try:
            one.publish(job.version, b"%d" % one.token)
        except FencedError:
            continue
        leaders.append(one)
    assert len(leaders) == 1
    assert leaders[0].token == latest_token(job)
    assert names(leaders[0].trash) == {"global_step_3.x"}
    assert names(job.trash) <= {token_name(leaders[0].token)}
    assert all(parse_token(name) in (None, leaders[0].token) for name in names(job.lock))


@pytest.mark.parametrize("name", ["leader.json", token_name(1)])
def test_a_full_disk_during_a_claim_is_not_reported_as_a_held_lock(job, clock, name):
    class Full(Hooked):
        def before(self, operation, path):
            if operation == "rename" and path.endswith(name):
                raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        claim(job, clock, disk=Full())
    assert names(job.lock) == set()
    assert claim(job, clock).token == 1


def test_a_claim_fails_if_the_earlier_term_cannot_be_fenced(job, clock):
    old = claim(job, clock)

    class Stuck(LocalDisk):
        def remove_directory(self, path):
            raise OSError(39, "Directory not empty")

    with pytest.raises(StorageError, match="cannot be removed"):
        claim(job, clock, dead=True, disk=Stuck())
    term = claim(job, clock, dead=True)
    assert names(job.lock) == {token_name(term.token)}
    with pytest.raises(FencedError):
        old.publish(job.version, b"stale")


def test_a_late_claim_does_not_revive_a_fenced_leader(job, clock):
    late = Candidate(job, clock)
    assert late.holder() is None
    first = claim(job, clock)
    claim(job, clock, dead=True).publish(job.version, b"new")

    class Watched(Hooked):
        def after(self, operation, path):
            with pytest.raises(FencedError):
                first.publish(job.version, b"stale")

    late._job = replace(job, disk=Watched())
    with pytest.raises(LockHeldError):
        late.claim()
    assert Path(job.version).read_bytes() == b"new"


def test_a_claim_prepared_during_fencing_is_fenced_too(job, clock):
    claim(job, clock)

    class Late(Hooked):
        def after(self, operation, path):
            if operation == "remove_directory" and path == f"{job.lock}/{token_name(1)}":
                os.mkdir(f"{job.lock}/.claim-late")

    claim(job, clock, dead=True, disk=Late())
    assert names(job.lock) == {token_name(2)}


def test_a_claimer_that_is_fenced_while_fencing_raises_lock_held(job, clock):
    claim(job, clock)

    class Stuck(Hooked):
        other: Term | None = None

        def before(self, operation, path):
            if operation == "remove_directory":
                self.other = self.other or claim(job, clock, dead=True)
                raise OSError(39, "Directory not empty")

    with pytest.raises(LockHeldError, match="term 3"):
        claim(job, clock, dead=True, disk=Stuck())
    assert names(job.lock) == {token_name(3)}


# --- with real processes ---------------------------------------------------------------------------


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def finished(processes: list[subprocess.Popen[str]]) -> list[dict]:
    """Wait for processes and return what they said; whatever one of them raises fails the test."""
    events = []
    for process in processes:
        output, errors = process.communicate(timeout=180)
        assert (process.returncode, errors) == (0, "")
        events += map(json.loads, output.splitlines())
    return events


def test_a_race_of_many_processes_has_one_leader_per_token(job, record_line):
    """All take each leader for dead at once, so that every claim, publish and removal is contended."""
    os.mkdir(job.root)
    processes = [start("race", job.root, 4) for _ in range(8)]
    Path(job.root, "go").write_bytes(b"")
    events = finished(processes)
    claims = {event["token"]: event["at"] for event in events if event["what"] == "claimed"}
    record_line(f"race for a term: {len(claims)} terms, {len(events)} events, 8 processes")
    assert len(claims) == sum(event["what"] == "claimed" for event in events)
    assert len(claims) == 8 * 4
    assert names(job.lock) == {token_name(latest_token(job))}
    tokens = sorted(claims)
    end_of = {token: claims[later] for token, later in itertools.pairwise(tokens)}
    acts = [event for event in events if event["what"] in ("published", "took")]
    assert [act for act in acts if act["began"] > end_of.get(act["token"], float("inf"))] == []
    taken = [event["name"] for event in events if event["what"] == "took"]
    (last,) = Path(job.trash, token_name(latest_token(job))).iterdir()
    assert names(str(last)) >= set(taken)
    assert len(taken) == len(set(taken))


class Leading:
    """A process that leads and does what it is told."""

    def __init__(self, job: Job) -> None:
        self.process = start("lead", job.root)
        self.token = self._answer()["token"]

    def _answer(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def order(self, what: str) -> str | None:
        """Return the name of the error that it met."""
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._answer()["error"]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def leading(job):
    os.makedirs(job.step(3))
    os.rename(job.step(3), f"{job.root}/step")
    process = Leading(job)
    yield process
    process.end()


def test_a_killed_leader_process_is_replaced_at_once(job, clock, leading):
    candidate = Candidate(job, clock)
    assert candidate.holder() is not None
    leading.process.kill()
    leading.process.wait()
    assert candidate.holder() is None
    assert candidate.claim().token == leading.token + 1


def test_a_suspended_leader_is_replaced_after_the_timeout_and_fenced(job, clock, leading):
    assert leading.order("publish") is None
    leading.process.send_signal(signal.SIGSTOP)
    candidate = Candidate(job, clock)
    assert candidate.holder() is not None
    clock.sleep(TIMEOUT)
    assert candidate.holder() is None
    term = candidate.claim()
    term.publish(f"{job.root}/published", b"new")
    before = tree(job.root)
    leading.process.send_signal(signal.SIGCONT)
    assert [leading.order(what) for what in ("publish", "take", "beat")] == ["FencedError"] * 3
    assert leading.order("release") is None
    assert tree(job.root) == before


def test_a_leader_process_that_releases_is_replaced_at_once(job, clock, leading):
    assert leading.order("beat") is None
    assert leading.order("release") is None
    candidate = Candidate(job, clock)
    assert candidate.holder() is None
    assert candidate.claim().floor == (leading.token, 0)
