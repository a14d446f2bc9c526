"""A journal that is damaged: it costs the groups of what is damaged, is reported, and changes nothing else."""

import errno
import json
import os
import random
import resource
import shutil
import signal
from contextlib import closing

import pytest
from structlog.testing import capture_logs
from support.gateway_bed import GatewayBed, ScriptedEngine

from explorer_hooks.parts.agents.journal import NAME, TurnJournal
from explorer_hooks.parts.agents.records import DamagedLine, decoded, encoded, read_line
from explorer_hooks.parts.agents.replay import JournalReplay
from explorer_hooks.parts.agents.rows import experiences_of
from explorer_hooks.parts.agents.run_record import GatewayRun, PlayedTasks
from explorer_hooks.parts.agents.sessions import Sessions
from syncd.console import _as_syncd_error
from syncd.errors import StorageError
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job

HELLO = [{"role": "user", "content": "hello"}]
SIZE = 2
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def letters():
    count = iter(range(10_000))
    engine = ScriptedEngine(None)
    engine.say = lambda prompt: [33 + next(count) % 90, 34, 35, 0]
    return engine


async def group(bed, name, *, turns=3, ends="reward"):
    """Play a group: a failed attempt first, then turns of each rollout; half of it is a branch."""
    for rollout in range(SIZE):
        session = await bed.session(name, rollout)
        await bed.ask(session, HELLO)
        session = await bed.session(name, rollout, attempt=1)
        history = HELLO
        for turn in range(turns):
            _, history = await bed.ask(session, history)
            history = [*history, {"role": "user", "content": f"go on {turn}"}]
        if ends == "reward" or (ends == "half" and rollout == 0):
            await bed.gateway.reward(session, {"reward": 0.5 + rollout, "info": {"why": name}})


async def play(bed):
    """Play groups to every kind of end; the journal has every kind of record."""
    await group(bed, "0.0")
    await group(bed, "0.1")
    await bed.gateway.begin_batch(1, ["0.0", "0.1"])
    await bed.gateway.end_batch(["0.0", "0.1"])
    await group(bed, "0.2", ends="half")
    await bed.gateway.drop("0.2", "agent")
    await group(bed, "0.3")
    await bed.gateway.drop("0.3", "unpublished")
    await group(bed, "0.4", ends="half")
    await group(bed, "0.5")
    await group(bed, "0.6", ends="none")
    await group(bed, "0.7")
    await group(bed, "0.8")
    await bed.gateway.begin_batch(2, ["0.7"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the bytes of a journal, which begins with a rewritten one, as after each start."""
    directory = tmp_path_factory.mktemp("recorded")
    with closing(TurnJournal(str(directory))) as journal:
        journal.begin({"kind": "run", "run": "run"}, "")
    GatewayBed(directory, letters(), group_size=SIZE, max_turns=9).run(play)
    return (directory / NAME).read_bytes()


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job").mkdir()
    return Job.at(tmp_path / "job")


class Start:
    """A start of a gateway with a journal, as a process does until it serves."""

    def __init__(self, job, directory, data):
        shutil.rmtree(directory, ignore_errors=True)
        with ExperienceWriter(job, "e0") as writer, closing(TurnJournal(str(directory))) as journal:
            run = GatewayRun(writer, journal, PlayedTasks())
            run.name = "run"
            run.confirm(Sessions())
            (directory / NAME).write_bytes(data)
            with capture_logs() as logs:
                self.sessions = GatewayRun(writer, journal, PlayedTasks()).resumed()
            journal.start(self.sessions.needs, self.sessions.rest)
        self.reported = [one for one in logs if one["event"] == "journal_damaged"]
        self.lost = [one for one in logs if one["event"] == "journal_lost"]
        self.rewritten = (directory / NAME).read_bytes()
        self.state = state(self.sessions)

    @property
    def groups(self):
        return self.reported[0]["groups"] if self.reported else []


def state(sessions):
    """Return what is known, in a form that can be compared, by group."""
    found = {name: ("over", why) for name, why in sessions.over.items()}
    for one in sessions.groups.values():
        rollouts = {
            at: (
                session.id,
                session.state,
                session.reward,
                session.info,
                [(turn.whole, list(turn.logprobs), turn.spans, turn.answer) for turn in session.drawn],
            )
            for at, session in one.rollouts.items()
        }
        whole = one.is_whole(SIZE)
        found[one.name] = (rollouts, experiences_of(one, one.name, 1.0) if whole else None)
    return found


@pytest.fixture
def start(job, tmp_path):
    return lambda data: Start(job, tmp_path / "state", data)


def test_what_is_recorded_is_what_is_read_and_an_older_journal_without_checksums_too(start, recorded):
    good = start(recorded)
    assert not good.reported
    assert {name: found[1] for name, found in good.state.items() if found[0] == "over"} == {
        "0.0": "written", "0.1": "written", "0.2": "agent", "0.3": "unpublished"
    }  # fmt: skip
    assert set(good.state) == {f"0.{at}" for at in range(9)}
    older = b"".join(map(as_before, recorded.splitlines()))
    assert start(older).state == good.state
    lines = recorded.splitlines(keepends=True)
    half = len(lines) // 2
    mixed = start(b"".join([*lines[:half], *map(as_before, lines[half:])]))
    assert (mixed.state, mixed.reported) == (good.state, []), "an older release has gone on with it"
    again = start(good.rewritten)
    assert (again.state, again.reported) == (good.state, [])


def as_before(line):
    """Return a line as releases before checksums wrote it."""
    record = json.loads(line)
    new = {"turn": ("number", "group"), "reward": ("turns", "group"), "abandon": ("group",), "over": ("run",)}
    for key in ("xxh3", *new.get(record["kind"], ())):
        del record[key]
    return json.dumps(record).encode() + b"\n"


FLIPS = int(os.environ.get("SYNCD_FLIPS", "80"))
"""`SYNCD_FLIPS=2000` makes the sweep of the page."""


@pytest.mark.timeout(300 + FLIPS)
@pytest.mark.fault("a bit that changed in a journal changes what is trained")
def test_no_flipped_bit_changes_anything_but_its_group_and_each_that_matters_is_reported(start, recorded):
    good, draw = start(recorded).state, random.Random(7)
    places = [draw.randrange(8 * len(recorded)) for _ in range(FLIPS)]
    costs = []
    for place in places:
        data = bytearray(recorded)
        data[place // 8] ^= 1 << place % 8
        found = start(bytes(data))
        changed = {name for name in good | found.state if good.get(name) != found.state.get(name)}
        where = (place, bytes(data)[max(place // 8 - 60, 0) : place // 8 + 60])
        assert not found.lost, where
        if not changed:
            continue
        assert found.reported, (changed, *where)
        # What is left of a group that is not as it was is nothing, or it is played again.
        for name in changed:
            now = found.state.get(name)
            assert now is None or now[0] == "over" or now[1] is None, (name, *where)
        assert all(good[name] == found.state[name] for name in good if name not in changed)
        costs.append(len(changed))
        assert not start(found.rewritten).reported, "what was damaged is accounted for once"
    assert costs
    assert sum(cost > 1 for cost in costs) <= len(costs) // 20, costs


def test_a_hole_in_the_journal_costs_the_groups_that_it_hides(start, recorded):
    """Whole lines are gone, as a page of zeros leaves it: what remains of a group is not taken for all of it."""
    good, draw = start(recorded).state, random.Random(3)
    for _ in range(40):
        begin = draw.randrange(400, len(recorded) - 5000)
        data = bytearray(recorded)
        data[begin : begin + 4096] = bytes(4096)
        found = start(bytes(data))
        assert found.reported
        for name, (rollouts, rows) in found.state.items():
            if rollouts != "over" and rows is not None:
                assert good[name] == (rollouts, rows), (begin, name)


def test_each_line_that_is_lost_is_noticed_or_its_group_goes_on_without_a_wrong_row(start, recorded):
    lines = recorded.splitlines(keepends=True)
    good = start(recorded).state
    for at in range(3, len(lines)):
        kind = json.loads(lines[at])["kind"]
        found = start(b"".join([*lines[:at], b'{"kind":\n', *lines[at + 1 :]]))
        assert found.reported, lines[at][:80]
        for name, (rollouts, rows) in found.state.items():
            if rollouts != "over" and rows is not None:
                assert good[name] == (rollouts, rows), (kind, name)


def test_a_journal_whose_first_line_is_damaged_is_still_the_jobs(start, recorded):
    good = start(recorded)
    found = start(b"\0" + recorded[1:])
    assert found.state == good.state
    assert (found.reported[0]["lines"], found.groups, found.lost) == (1, [], [])


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "session"}, {"kind": "no such kind"}, {"kind": ["run"]}, {"kind": "drop", "group": 1, "why": "x"},
        {"kind": "batch", "number": -1, "groups": []}, {"kind": "over", "groups": [], "ended": {}},
        {"kind": "reward", "session": "a", "reward": "1", "info": {}}, [], None, "run",
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_damage_and_not_an_error_of_the_program(start, recorded, record):
    good = start(recorded)
    found = start(recorded + json.dumps(record).encode() + b"\n")
    assert [one["lines"] for one in found.reported] == [1]
    assert {*good.state} - {*found.groups} <= {*found.state}


def test_a_line_has_one_form_and_lines_that_a_damaged_feed_has_joined_are_read(recorded):
    text = encoded({"kind": "drop", "group": "g", "why": "x\ud800"})
    assert decoded(text[:-1]) == {"kind": "drop", "group": "g", "why": "x\ud800"}
    other = encoded({"kind": "drop", "group": "h", "why": '","xxh3":"0123456789abcdef"}'})
    for line in (text[:-1] + b"\x0b" + other, text[:-1] + b"\x0b" + other[:-1], text[:-1] + other):
        assert [one["group"] for one in read_line(line, needs_checksum=True)] == ["g", "h"]
    assert list(read_line(text[:-2], needs_checksum=True)) == []
    assert [one["group"] for one in read_line(text[:-1] + b"\x0b", needs_checksum=True)] == ["g"]
    (bare,) = read_line(b'{"kind":"drop","group":"g","why":"x"}\n', needs_checksum=True)
    assert isinstance(bare, DamagedLine)


def damage(path):
    """Damage a reward of group 0.5, in place."""
    data = path.read_bytes()
    at = data.index(b'"turns"', data.index(b'"group":"0.5"'))
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\0")


def test_damage_that_comes_while_a_gateway_runs_is_left_for_the_next_start(tmp_path, recorded, monkeypatch):
    """A journal that grew is rewritten: what cannot be read stays there."""
    monkeypatch.setattr("explorer_hooks.parts.agents.journal._GROWN", 0)
    (tmp_path / NAME).write_bytes(recorded)
    bed = GatewayBed(tmp_path, letters(), group_size=SIZE, max_turns=9)

    async def main(bed):
        damage(tmp_path / NAME)
        for number in range(40):
            await group(bed, f"1.{number}")
            await bed.gateway.drop(f"1.{number}", "driver")

    bed.run(main)
    assert "0.5" in bed.sessions.groups
    replay = JournalReplay(Sessions())
    with closing(TurnJournal(str(tmp_path))) as journal:
        replay.read(journal.records())
    assert (replay.lines, replay.drop()) == (1, ["0.5"])


def test_a_full_disk_is_reported_with_its_path_and_what_to_do_also_when_the_journal_is_closed(tmp_path):
    bed = GatewayBed(tmp_path, letters(), group_size=SIZE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    async def main(bed):
        session = await bed.session()
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / NAME).stat().st_size + 10, before[1]))
        with pytest.raises(StorageError) as caught:
            await bed.ask(session, HELLO)
        return caught.value

    try:
        error = bed.run(main)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (error.path, error.errno) == (str(tmp_path / NAME), errno.EFBIG)
    full = StorageError("No space left on device", path=str(tmp_path / NAME))
    full.errno = errno.ENOSPC
    assert _as_syncd_error(full, "explorer", []).hint == f"df -h {tmp_path / NAME}"
