"""Tasks and how far they are done: a process that is killed anywhere neither loses a group nor writes one twice."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import forked
from support.experiences import make as experience
from support.synchronizers import eventually

from explorer_hooks.run import own_files as own
from explorer_hooks.run.own_files import LedgerState, Records, TaskCursor, TaskLedger
from explorer_hooks.tasks.order import epochs
from explorer_hooks.tasks.sources import open_tasks
from syncd.client.client import Client
from syncd.errors import ConfigError, CorruptDataError, FencedError
from syncd.experience import batch_paths
from syncd.experience.model import MAX_NAME
from syncd.experience.table import decode_batch, encode_batch
from syncd.experience.writer import ExperienceWriter
from syncd.jobfile.task_sets import TaskSetSection
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk

TASKS, SEED = "digest", "0/e0"


def lines(tmp_path, *rows):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path, **keys):
    return open_tasks([TaskSetSection(source=path, **keys)])


def test_tasks_keep_all_fields_of_their_line(tmp_path):
    messages = [{"role": "user", "content": "3+4?"}]
    path = lines(
        tmp_path,
        {"prompt": "1+1=", "answer": "2", "id": "a", "level": 3},
        "\n",
        {"messages": messages, "answer": 7},
    )
    first, second = read(path)
    assert (first.id, first.prompt, first.answer, first.info) == ("a", "1+1=", "2", {"level": 3})
    assert (second.id, second.prompt, second.answer, second.text) == ("line-3", messages, 7, "3+4?")
    assert len(read(path, limit=1)) == 1


def test_an_id_that_no_experience_can_have_behind_the_name_of_its_set_is_refused_before_work(tmp_path):
    longest = "x" * (MAX_NAME - len("long/"))
    path = lines(tmp_path, {"prompt": "1+1=", "id": "a"}, {"prompt": "1+1=", "id": longest})
    sections = [TaskSetSection(source=path, name=name) for name in ("long", "longer")]
    assert len(read(path, name="longer")) == 2, "one set alone has ids without its name"
    assert open_tasks([sections[0], TaskSetSection(source=path, name="b")])[1].id == f"long/{longest}"
    with pytest.raises(
        ConfigError, match=r"with the name of its set, the id x+\.\.\. has more than 256"
    ) as caught:
        open_tasks(sections)
    assert (caught.value.path, 'name = "SHORTER"' in caught.value.hint) == (path, True)


def test_a_heartbeat_that_has_failed_does_not_end_what_records_a_batch(tmp_path):
    job = Job.at(tmp_path)
    with Client.open(job.root, "explorer", "e0", heartbeat=False) as client:
        client.own("explorer", "test").attempt(lambda: os.stat(tmp_path / "missing"))
        metrics = Records.own(job, "e0", own.METRICS)
        own.record_batch(metrics, client, "1.parquet", {"batch": 1})
        assert metrics.all() == [{"batch": 1}]


def test_prompt_and_answer_keys_can_be_renamed(tmp_path):
    path = lines(tmp_path, {"question": "1+1=", "solution": "2"})
    (task,) = read(path, prompt_key="question", answer_key="solution")
    assert (task.prompt, task.answer) == ("1+1=", "2")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{", "not JSON"),
        ("[1]\n", "a task is a JSON object"),
        ({"answer": 1}, "neither text nor messages"),
        ({"prompt": ""}, "neither text nor messages"),
        ({"prompt": [{"role": "user"}]}, "neither text nor messages"),
        ({"prompt": "1+1=\ud83d"}, "has half a character"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "has half a character"),
        ({"prompt": "p", "id": "x" * 300}, "id is not a text"),
        ("[" * 100_000 + "\n", "not JSON"),
    ],
)
def test_a_malformed_task_line_is_named(tmp_path, row, what):
    with pytest.raises(ConfigError, match=what) as caught:
        read(lines(tmp_path, {"prompt": "fine"}, row))
    assert caught.value.path.endswith("tasks.jsonl:2")


def test_a_missing_or_empty_task_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="there is no task"):
        read(lines(tmp_path, "\n"))
    with pytest.raises(ConfigError, match="file of tasks is missing"):
        read(str(tmp_path / "missing"))


def test_the_task_order_is_determined_by_seed_identity_and_epoch(tmp_path):
    tasks = read(lines(tmp_path, *({"prompt": f"p{number}"} for number in range(50))))
    assert sorted(tasks.order("0/e0", 1)) == list(range(50))
    # As releases before this one ordered them: their explorers resume.
    places = list(range(50))
    random.Random("0/e0/1").shuffle(places)
    assert tasks.order("0/e0", 1) == places
    seeds = ("0/e0", "0/e1", "1/e0")
    assert len({tuple(tasks.order(seed, epoch)) for seed in seeds for epoch in (0, 1)}) == 6


def test_a_resumed_epoch_continues_the_same_task_order(tmp_path):
    tasks = read(lines(tmp_path, *({"prompt": f"p{number}"} for number in range(5))))
    straight = epochs(tasks, "s", 0, 0)
    seen = [next(straight) for _ in range(17)]
    for cut, (epoch, position, _) in enumerate(seen[:-1]):
        later = epochs(tasks, "s", epoch, position + 1)
        assert [next(later) for _ in seen[cut + 1 :]] == seen[cut + 1 :]


# --- the ledger ---------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Falling(LocalDisk):
    """Ends the process, as far as its files can tell, before or after one of its changes."""

    def __init__(self, at):
        self.left = at

    def _change(self, work, *arguments, **named):
        self.left -= 1
        if self.left == 0:
            raise Killed
        done = work(*arguments, **named)
        self.left -= 1
        if self.left == 0:
            raise Killed
        return done

    def rename(self, *arguments):
        return self._change(super().rename, *arguments)

    def make_directory(self, *arguments):
        return self._change(super().make_directory, *arguments)

    def sync_directory(self, *arguments):
        return self._change(super().sync_directory, *arguments)


def work(job, batches, size=2):
    """Write batches of tasks as an explorer does, going on from where the tasks stand."""
    writer = ExperienceWriter(job, "e0")
    ledger = TaskLedger.open(writer, TASKS, SEED)
    while ledger.cursor.batches < batches:
        cursor = ledger.cursor
        groups = [ledger.group(cursor.epoch, cursor.position + number) for number in range(size)]
        made = [experience(group=group) for group in groups]
        ledger.write(encode_batch(made), cursor.behind(cursor.epoch, cursor.position + size - 1, batch=True))


def written(job):
    """Return the groups of all batches, in their order."""
    names = sorted(batch_paths.numbers(job, batch_paths.batches(job, "e0")))
    paths = [batch_paths.batch(job, "e0", name) for name in names]
    return [one.group for path in paths for one in decode_batch(job.disk.read(path, 1 << 28), path)]


def positions(groups):
    runs = {group.partition("/")[0] for group in groups}
    assert len(runs) <= 1
    return [int(group.rpartition(".")[2]) for group in groups]


def test_a_kill_at_any_disk_change_loses_and_repeats_no_group(tmp_path):
    for at in range(1, 200):
        root = tmp_path / str(at)
        root.mkdir()
        survived = False
        for fall in (at, 1 + at % 11):
            try:
                work(Job.at(root, disk=Falling(fall)), 2)
                survived = fall == at
            except Killed:
                pass
        work(Job.at(root), 3)
        assert positions(written(Job.at(root))) == list(range(6))
        if survived:
            break
    assert at > 20


def test_consumed_batches_that_were_deleted_count_as_written(tmp_path):
    job = Job.at(tmp_path)
    work(job, 3)
    assert positions(written(job)) == list(range(6))
    batch_paths.mark_consumed(job, "e0", 3)
    for number in (1, 2, 3):
        os.unlink(batch_paths.batch(job, "e0", number))
    work(job, 5)
    assert positions(written(job)) == [6, 7, 8, 9]


def test_the_draws_of_a_position_follow_from_a_fixed_text():
    assert TaskCursor(1, 23, 4).seed_text == "Cursor(epoch=1, position=23, batches=4)"


def test_a_later_process_of_the_same_identity_fences_the_earlier_one(tmp_path):
    job = Job.at(tmp_path)
    early = TaskLedger.open(ExperienceWriter(job, "e0"), TASKS, SEED)
    early.write(encode_batch([experience()]), TaskCursor(0, 1, 1))
    late = TaskLedger.open(ExperienceWriter(job, "e0"), TASKS, SEED)
    before = Path(own.own_path(job, "e0", own.STATE)).read_bytes()
    with pytest.raises(FencedError):
        early.write(encode_batch([experience()]), TaskCursor(0, 2, 2))
    assert Path(own.own_path(job, "e0", own.STATE)).read_bytes() == before
    assert late.cursor == TaskCursor(0, 1, 1)


def test_changed_tasks_or_a_changed_order_are_refused(tmp_path):
    job = Job.at(tmp_path)
    work(job, 1)
    for tasks, seed in (("others", SEED), (TASKS, "1/e0")):
        with pytest.raises(ConfigError, match="changed"):
            TaskLedger.open(ExperienceWriter(job, "e0"), tasks, seed)


def test_a_damaged_ledger_is_an_error(tmp_path):
    job = Job.at(tmp_path)
    work(job, 1)
    Path(own.own_path(job, "e0", own.STATE)).write_bytes(b"{")
    with pytest.raises(CorruptDataError):
        TaskLedger.open(ExperienceWriter(job, "e0"), TASKS, SEED)


def test_a_cursor_moved_past_tasks_without_results_is_kept(tmp_path):
    job = Job.at(tmp_path)
    ledger = TaskLedger.open(ExperienceWriter(job, "e0"), TASKS, SEED)
    ledger.move(TaskCursor(0, 4, 0))
    assert TaskLedger.open(ExperienceWriter(job, "e0"), TASKS, SEED).cursor == TaskCursor(0, 4, 0)


def test_a_pending_batch_counts_only_if_its_number_was_written():
    state = LedgerState("r", TASKS, SEED, TaskCursor(0, 2, 1), pending=2, then=TaskCursor(0, 4, 2))
    assert state.resumed(2).cursor == TaskCursor(0, 2, 1)
    assert state.resumed(3).cursor == TaskCursor(0, 4, 2)


PROGRAM = """
import sys
from test_explorer_tasks import work
from syncd.protocol.layout import Job
work(Job.at(sys.argv[1]), 10**6)
"""


@pytest.mark.slow
def test_sigkill_at_random_moments_loses_and_repeats_no_group(tmp_path):
    job, chance = Job.at(tmp_path), random.Random(7)
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, str(Path(here).parent), *sys.path])
    done = 0
    for _ in range(6):
        process = forked.start(f"{tmp_path}.log", {"PYTHONPATH": path}, "-c", PROGRAM, tmp_path)
        eventually(lambda: len(written(job)) > done)  # noqa: B023 - called at once
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        found = positions(written(job))
        assert found == list(range(len(found)))
        done = len(found)


# --- records ------------------------------------------------------------------------------------------------------


def test_a_torn_metrics_line_loses_only_itself(tmp_path):
    path = tmp_path / "explorers" / "e0" / "metrics.jsonl"
    Records(str(path)).add({"batch": 1})
    with open(path, "ab") as file:
        file.write(b'{"batch": 2, "rew')
    again = Records(str(path))
    again.add({"batch": 2})
    assert again.all() == [{"batch": 1}, {"batch": 2}]
