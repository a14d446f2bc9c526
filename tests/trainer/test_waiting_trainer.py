"""A trainer that waits says what for, since when and from where: at once, then calmly; a step ends the wait."""

import json
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from structlog.testing import capture_logs
from support.trainers import make_trainer, small_config, write_experiences

from syncd.cli.main import run as syncd
from syncd.client.client import Client
from syncd.errors import FencedError, TimedOutError
from syncd.protocol.engine_state import EngineReport, EngineState
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import Presence
from syncd.synchronizer import Synchronizer
from trainer.rank0 import Rank0
from trainer.waiting import DAEMON, EVERY, QUIET, DaemonWait, Waiting, wait_text


class Clock(SystemClock):
    """A clock of which each look takes a while."""

    def __init__(self, step=0.0):
        self.now, self.step = 1000.0, step

    def monotonic(self):
        self.now += self.step
        return self.now


def test_the_first_wait_is_reported_at_once_and_then_at_each_interval():
    clock = Clock()
    waiting = Waiting(clock)
    told = []
    for _ in range(400):
        waiting.begin()
        if waiting.is_due():
            told.append(waiting.seconds)
        clock.now += 1
    assert told == [0.0, EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY, 5 * EVERY, 6 * EVERY]


def test_a_short_wait_between_steps_is_not_reported():
    clock = Clock()
    waiting = Waiting(clock)
    waiting.end()
    for _ in range(5):
        waiting.begin()
        clock.now += QUIET - 1
        assert not waiting.is_due()
        waiting.end()
        assert waiting.seconds is None
    waiting.begin()
    clock.now += QUIET
    assert waiting.is_due()
    assert waiting.seconds == QUIET


REFUSING = Presence(
    "e0", info=EngineReport(EngineState.REFUSED, reason="lm_head.weight is missing").document()
)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"living": {}}, "2 of 8 groups have arrived; no explorer is alive: explorer run /a/grpo.toml"),
        ({"living": {}, "file": ""}, "no explorer is alive: explorer run CONFIG"),
        ({"living": {name: Presence(name) for name in "abc"}}, "3 explorers alive"),
        (
            {"living": {"a": Presence("a"), "e0": REFUSING}},
            "2 explorers alive; e0 has state refused: lm_head.weight is missing",
        ),
        ({"living": None}, "explorers cannot be seen"),
        (
            {"living": {"a": Presence("a")}, "rejected": 4},
            "4 batches were set aside in /job/experiences/.rejected; 1 explorer alive",
        ),
    ],
)
def test_a_wait_report_says_what_is_present_and_what_to_run(fields, end):
    at = time.mktime((2026, 11, 22, 14, 5, 9, 0, 0, -1))
    known = {
        "path": "/job/experiences",
        "since": at,
        "seconds": 125.0,
        "groups": (2, 8),
        "rejected": 0,
    }
    text = wait_text(**known | {"file": "/a/grpo.toml"} | fields)
    assert text.startswith("waiting for experiences in /job/experiences since 14:05:09 (2:05): ")
    assert text.endswith(end)


def test_a_waiting_trainer_reports_in_log_terminal_and_status(tmp_path, capsys):
    write_experiences(tmp_path, 1)
    config = small_config(tmp_path, data={"wait_timeout": 200.0})
    with Synchronizer.open(tmp_path, "trainer", poll=0.01) as sync:
        made, shown = make_trainer(config, sync, clock=Clock(step=1.0))
        made.prepare()
        with pytest.raises(TimedOutError):
            made.train()
        lines = [note for note in shown.notes if note.startswith("waiting")]
        assert len(lines) >= 3
        assert f"waiting for experiences in {tmp_path}/experiences since " in lines[0]
        assert "0 of 2 groups have arrived; no explorer is alive" in lines[0]
        said = capsys.readouterr().out
        assert said.count("waiting for experiences") == len(lines)
        assert syncd(["status", str(tmp_path), "--json"]) in (0, 3)
        told = json.loads(capsys.readouterr().out)["trainers"][0]["waiting"]
        assert (told["for"], told["path"]) == ("experiences", f"{tmp_path}/experiences")
        syncd(["status", str(tmp_path)])
        assert "waits for experiences" in capsys.readouterr().out.replace("\n", " ")


def test_a_step_removes_the_wait_from_the_presence(tmp_path):
    with Synchronizer.open(tmp_path, "trainer", poll=0.01) as sync:
        made, shown = make_trainer(small_config(tmp_path, trainer={"total_steps": 2}), sync)
        made.prepare()
        made._do(made.next_action())
        assert [note[:23] for note in shown.notes] == ["waiting for experiences"]
        assert sync.own("trainer", "info").info["waiting"]["path"] == f"{tmp_path}/experiences"
        write_experiences(tmp_path, 2)
        assert made.train() == 0
        assert "waiting" not in sync.own("trainer", "info").info


class ManualSleep(Clock):
    """A clock that moves when somebody sleeps."""

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def abandoned(tmp_path):
    """A job whose step 1 is in the way of a trainer, and its clock; no daemon leads it."""
    job, clock = Job.at(tmp_path), ManualSleep()
    with Synchronizer.open(job.root, "trainer") as writer:
        writer.set_model_state_dict({"w": ("F32", (1,), bytes(4))}, 1)
    return job, clock


def asking(job, clock, *checks):
    wait = DaemonWait(job, clock, checks)
    return Client.open(
        job.root, "trainer", "another", clock=clock, heartbeat=False, poll=0.5, timeout=3600.0, on_wait=wait
    )


def test_a_wait_for_a_daemon_says_who_could_end_it_and_how(abandoned):
    job, clock = abandoned
    with asking(job, clock) as client, capture_logs() as logs:
        with pytest.raises(TimedOutError, match="waiting for step 1 to be vacated") as caught:
            Rank0.vacate(SimpleNamespace(client=client), 1)
        assert clock.now - 1000.0 < DAEMON + 60
    texts = [line["text"] for line in logs if line["event"] == "daemon_awaited"]
    assert len(texts) == DAEMON / EVERY
    assert all(f"none leads this job: syncd watch {job.root}" in text for text in texts)
    assert "syncd watch" in caught.value.hint


def test_what_ends_the_run_ends_its_wait_for_a_daemon(abandoned):
    job, clock = abandoned

    def check():
        if clock.now > 1010.0:
            raise FencedError("another trainer has taken over")

    with asking(job, clock, check) as client, pytest.raises(FencedError):
        client.vacate(1)
