"""`explorer run` with a real daemon: styles, evaluation, pacing and its end, here and as processes of its own."""

import contextlib
import errno
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from support import fake_answers, forked
from support.fake_engines import FakeVllm
from support.fake_servers import Answer
from support.job_file import job_of, write_job
from support.paths import ROOT
from support.served_process import EXPLORER
from support.synchronizers import LONG
from support.waiting import until as eventually

from explorer_hooks.cli.main import run as command_line
from explorer_hooks.run import own_files as own
from explorer_hooks.run import pacing
from explorer_hooks.run.load import load_file
from explorer_hooks.run.run import run
from explorer_hooks.run.tokens import open_tokens
from syncd.errors import EngineDeadError
from syncd.experience import batch_paths, table
from syncd.experience.table import decode_batch
from syncd.protocol.disk import MISSING
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.job_end import JobEnd, mark_finished
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.presence import RunningStatus, path_of
from syncd.protocol.probe import Probe, write_base_probe
from syncd.synchronizer import Synchronizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "arithmetic"
sys.path.insert(0, str(EXAMPLES))

from problems import problems  # noqa: E402
from tiny_model import make_model  # noqa: E402

pytestmark = pytest.mark.slow

GROUPS, SIZE = 2, 3
MINUTES = 200.0
"""A bound that only a failing test reaches; on a busy machine importing transformers alone takes a minute."""


@pytest.fixture
def world(running_world):
    return running_world


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a directory with a model, tasks and held-out tasks."""
    directory = tmp_path_factory.mktemp("start")
    make_model(directory / "model", 1)
    for split in ("train", "test"):
        rows = [{"prompt": one.prompt, "answer": one.answer, "id": one.prompt} for one in problems(split)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{split}.jsonl").write_text(text)
    return directory


@pytest.fixture(scope="module")
def weights(directory):
    """Return a function from a step to the weights of that step."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}

    def at(step):
        generator = torch.Generator().manual_seed(step)
        return {
            name: value + (0.05 * torch.randn(value.shape, generator=generator) if step else 0)
            for name, value in state.items()
        }

    return at


@pytest.fixture
def file(world, directory, tmp_path):
    """Return the path of a job's file."""
    held_out = {"tasks": f"{directory}/test.jsonl", "limit": 5, "every": 0}
    explorer = {"tasks": f"{directory}/train.jsonl", "sampling": {"max_tokens": 4}, "evaluation": held_out}
    job = job_of(
        model={"path": f"{directory}/model"},
        data={"groups": GROUPS, "group_size": SIZE},
        sync={"interval": 2, "timeout": 60},
        explorer=explorer,
    )
    return write_job(tmp_path / "job.toml", job)


@pytest.fixture
def start():
    """Start explorers as processes; they are killed in the end if they have not ended."""
    started = []

    def one(file, name, *more):
        started.append(
            forked.start(f"{file}.{len(started)}.log", {}, *EXPLORER, "run", file, "--name", name, *more)
        )
        return started[-1]

    yield one
    for process in started:
        process.end()


class Trainer:
    """Takes batches in the order in which they come, and publishes as the styles say."""

    def __init__(self, world, weights, *, steps, style="fixed", interval=2, batches=1):
        self.world, self.weights, self.steps, self.style, self.interval = (
            world,
            weights,
            steps,
            style,
            interval,
        )
        self.batches, self.error, self.step, self.synced = batches, None, 0, 0
        self.thread = threading.Thread(target=self._run)
        self.ready = threading.Event()
        self.thread.start()
        assert self.ready.wait(LONG)

    def _run(self):
        try:
            with Synchronizer.open(self.world.root, "trainer", timeout=LONG) as sync:
                self.ready.set()
                while self.step < self.steps:
                    self._turn(sync)
        except BaseException as error:  # noqa: BLE001 - told by `end`
            self.error = error
            self.ready.set()

    def _turn(self, sync):
        asked = sync.explorer_requires_sync()
        if total(self.world) >= (self.step + 1) * self.batches:
            self.step += 1
            if self.style != "explorer_driven" and self.step % self.interval == 0:
                self._publish(sync)
        elif self.style == "explorer_driven" and asked:
            if self.step > self.synced:
                self._publish(sync)
            sync.notify_no_new_model_state_dict()
        else:
            time.sleep(0.01)

    def _publish(self, sync):
        sync.set_model_state_dict(self.weights(self.step), self.step)
        self.synced = self.step
        eventually(lambda: self.world.pair() == (1, self.step))

    def end(self):
        self.thread.join(LONG)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


def total(world):
    job = world.job
    return sum(
        len(batch_paths.numbers(job, batch_paths.batches(job, name))) for name in batch_paths.explorers(job)
    )


def batches(world, name):
    numbers = sorted(batch_paths.numbers(world.job, batch_paths.batches(world.job, name)))
    paths = [batch_paths.batch(world.job, name, number) for number in numbers]
    return [decode_batch(world.job.disk.read(path, 1 << 28), path) for path in paths]


def steps_of(world, name):
    """Return the steps of the versions that made each batch."""
    return [sorted({one.step for one in batch}) for batch in batches(world, name)]


def records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def explore(file, name, *more):
    return run(load_file(file, [f"--explorer.name={name}", *more]))


@pytest.mark.parametrize("style", ["fixed", "trainer_driven"])
def test_versions_are_applied_at_the_interval_until_the_trainer_ends(world, weights, file, style):
    trainer = Trainer(world, weights, steps=6, style=style)
    why = explore(file, "e0", "--sync.style", style)
    trainer.end()
    assert why == "the trainer is gone"
    assert steps_of(world, "e0")[:6] == [[0], [0], [2], [2], [4], [4]]
    assert world.explorer("e0").applied == (1, 6)
    assert world.explorer("e0").status is RunningStatus.STOPPED


@pytest.mark.fault("an engine that was started with another model writes rollouts of the job's start model")
def test_an_explorer_on_another_start_model_writes_nothing_before_a_version_runs(world, weights, file, start):
    tokens = ((5, 6, 7), (8, 9, 10))
    write_base_probe(world.job, Probe(tokens, ((-9.0, -9.0),) * 2, "float32", "float32"), "/models/other")
    with Synchronizer.open(world.root, "trainer", timeout=LONG) as sync:
        started = start(file, "e0", "--sync.style", "fully_async")
        eventually(lambda: is_wrong(world, "e0") or total(world))
        sync.set_model_state_dict(weights(2), 2)
        eventually(lambda: total(world) or started.poll() is not None)
    assert set().union(*map(set, steps_of(world, "e0"))) == {2}


def is_wrong(world, name):
    with contextlib.suppress(*MISSING):
        report = engine_report_of(world.explorer(name).info)
        return report is not None and report.state is EngineState.WRONG
    return False


def test_sync_offset_lets_the_explorer_run_ahead(world, weights, file):
    trainer = Trainer(world, weights, steps=4)
    explore(file, "e0", "--sync.offset", "1", "--explorer.max_batches", "5")
    trainer.end()
    assert steps_of(world, "e0") == [[0], [0], [0], [2], [2]]


def test_an_explorer_driven_trainer_answers_the_explorer(world, weights, file):
    trainer = Trainer(world, weights, steps=4, style="explorer_driven")
    assert explore(file, "e0", "--sync.style", "explorer_driven") == "the trainer is gone"
    trainer.end()
    found = steps_of(world, "e0")
    assert found[:2] == [[0], [0]]
    assert found[2:4] == [[2], [2]]


def test_a_fully_async_explorer_follows_new_versions_within_its_bound(world, weights, file):
    trainer = Trainer(world, weights, steps=8, style="fully_async")
    why = explore(file, "e0", "--sync.style", "fully_async", "--explorer.ahead", "3")
    trainer.end()
    assert why == "the trainer is gone"
    made = [step for batch in steps_of(world, "e0") for step in batch]
    assert made == sorted(made)
    assert len(set(made)) > 1
    # Batch n is allowed once version n - 4 is out.
    assert len(steps_of(world, "e0")) <= 8 + 4


def test_two_explorers_share_the_batches_that_the_trainer_needs(world, weights, file, start):
    other = start(file, "e1")
    eventually(lambda: total(world) == 2)
    trainer = Trainer(world, weights, steps=6)
    explore(file, "e0")
    trainer.end()
    finished(other, 0)
    # What is written beyond the trainer's six steps is bounded: two steps ahead, and one each that was under way.
    assert 6 <= total(world) <= 6 + 2 + 2
    names = {one.group for name in ("e0", "e1") for batch in batches(world, name) for one in batch}
    assert len(names) == total(world) * GROUPS


def test_each_published_version_is_evaluated_once(world, weights, file):
    trainer = Trainer(world, weights, steps=4)
    drawn = {"tasks": Path(file).parent / "drawn.jsonl", "every": 3, "samples": 6, "temperature": 0.7}
    drawn |= {"correct": 1.0, "k": [1, 3], "reward": "reply:score", "max_tokens": 2}
    tasks = ({"prompt": f"{n}+{n}=", "answer": "", "id": f"t{n}"} for n in range(3))
    drawn["tasks"].write_text("".join(json.dumps(task) + "\n" for task in tasks))
    # The text alone decides, so that the figures can be computed from the texts.
    reply = "def score(prompt, response, task):\n    open('replies', 'a').write(f'{len(response) % 2}\\n')\n"
    (Path(file).parent / "reply.py").write_text(f"{reply}    return float(len(response) % 2)\n")
    sets = [f"--explorer.evaluation.sets.drawn.{key}={value}" for key, value in drawn.items()]
    with contextlib.chdir(Path(file).parent):
        explore(file, "e0", "--explorer.evaluation.every", "1", *sets)
    trainer.end()
    lines = records(own.own_path(world.job, "e0", own.EVALUATIONS))
    of_set = [line for line in lines if line.get("set") == "drawn"]
    lines = [line for line in lines if "set" not in line]
    assert [(line["generation"], line["step"]) for line in lines] == [(1, 0), (1, 2), (1, 4)]
    assert all(line["tasks"] == 5 and 0 <= line["reward"] <= 1 for line in lines)
    assert [line["step"] for line in of_set] == [0, 4], "each third version, and the last"
    assert [bool(line["digest"]) for line in of_set] == [False, True]
    replies = [float(line) for line in (Path(file).parent / "replies").read_text().split()]
    assert len(replies) == 2 * 3 * 6
    for at, line in enumerate(of_set):
        rewards = [replies[18 * at + 6 * task :][:6] for task in range(3)]
        choices = [choice for one in rewards for choice in itertools.combinations(one, 3)]
        mean = pytest.approx(sum(map(sum, rewards)) / 18)
        assert (line["reward"], line["pass_at_1"]) == (mean, mean)
        best = pytest.approx(sum(map(max, choices)) / len(choices))
        assert (line["pass_at_3"], line["best_at_3"]) == (best, best)
        assert (line["tasks"], line["failed"]) == (3, 0)
        assert line["tokens"] <= 2 * 18
    metrics = records(own.own_path(world.job, "e0", own.METRICS))
    assert [line["batch"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert all(line["rollouts"] == GROUPS * SIZE for line in metrics)
    shown = world.explorer("e0").info
    assert shown["explorer"]["batch"] == len(metrics)


def test_experiences_have_versions_spans_and_correct_rewards(world, weights, file):
    trainer = Trainer(world, weights, steps=2)
    explore(file, "e0", "--explorer.max_batches", "2")
    trainer.end()
    for batch in batches(world, "e0"):
        assert [one.rollout for one in batch] == [0, 1, 2] * GROUPS
        for one in batch:
            assert one.generation == 1
            assert one.spans == ((0, one.generation, one.step),)
            assert one.info["prompt"] == one.task
            assert one.reward == float(one.info["response"] == str(eval(one.task.rstrip("="))))


@pytest.fixture
def teacher(directory):
    pytest.importorskip("explorer_hooks.parts.evaluation")
    from support.teaching import TeachingVllm

    server = TeachingVllm()
    server.tokens = open_tokens(str(directory / "model"))
    yield server
    server.stop()


def test_experiences_have_the_log_probs_of_the_teacher_also_after_a_restart(world, weights, file, teacher):
    trainer = Trainer(world, weights, steps=3)
    for most in ("1", "3"):
        explore(file, "e0", "--explorer.max_batches", most, "--explorer.teacher.address", teacher.address)
    trainer.end()
    found = [one for batch in batches(world, "e0") for one in batch]
    assert len(found) == 3 * GROUPS * SIZE
    for one in found:
        length = len(one.logprobs)
        assert one.info["teacher"] == "policy"
        assert list(one.teacher_logprobs) == pytest.approx(
            fake_answers.log_probs(teacher.weights, list(one.tokens))[-length:], abs=1e-5
        )


def test_a_group_that_the_teacher_has_not_read_is_dropped_or_written_without(world, weights, file, teacher):
    right, count = teacher.post_v1_completions, [0]

    def every_other(query, body):
        count[0] += 1
        if count[0] % 2:
            raise Answer(500, {"error": {"message": "out of memory", "code": 500}})
        return right(query, body)

    teacher.post_v1_completions = every_other
    trainer = Trainer(world, weights, steps=2)
    at = ["--explorer.teacher.address", teacher.address, "--explorer.teacher.retries", "0"]
    explore(file, "e0", *at, "--explorer.max_batches", "1")
    explore(file, "e0", *at, "--explorer.max_batches", "2", "--explorer.teacher.required", "false")
    trainer.end()
    first, second = batches(world, "e0")
    assert all(one.teacher_logprobs is not None for one in first)
    assert {one.group for one in second if one.teacher_logprobs is None}
    assert all(("teacher" in one.info) == (one.teacher_logprobs is not None) for one in second)
    lines = records(own.own_path(world.job, "e0", own.METRICS))
    assert lines[0]["dropped"]["teacher"] >= 1
    assert (lines[0]["untaught_groups"], lines[1]["untaught_groups"]) == (0, 1)


def test_after_its_epochs_an_explorer_ends_with_a_short_batch(world, weights, file, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"prompt": f"{n}+1=", "id": f"t{n}"}) + "\n" for n in range(3)))
    trainer = Trainer(world, weights, steps=2)
    why = explore(file, "e0", "--explorer.tasks", str(few), "--explorer.epochs", "1", "--explorer.ahead", "4")
    trainer.end()
    assert why == "all tasks are done"
    found = [one.task for batch in batches(world, "e0") for one in batch]
    assert sorted(set(found)) == ["t0", "t1", "t2"]
    assert len(found) == 3 * SIZE


def test_a_batch_that_is_too_large_for_a_file_is_written_as_several_and_counts_as_one(
    world, weights, file, monkeypatch
):
    """A file holds one group. With files counted as batches, the explorer would wait for its patience to end."""
    monkeypatch.setattr(table, "MAX_ROWS", SIZE)
    trainer = Trainer(world, weights, steps=4, batches=GROUPS)
    why = explore(file, "e0", "--explorer.max_batches", "4", "--explorer.patience", "100000")
    trainer.end()
    assert why == "max_batches"
    groups = [{one.group for one in batch} for batch in batches(world, "e0")]
    assert [len(batch) for batch in groups] == [1] * 4 * GROUPS
    assert len(set().union(*groups)) == 4 * GROUPS
    assert [steps for steps in steps_of(world, "e0") if steps == [2]] == [[2]] * 2 * GROUPS
    state = json.loads(Path(own.own_path(world.job, "e0", own.STATE)).read_text())
    assert (state["then"]["batches"], state["then"]["position"]) == (4, 4 * GROUPS)
    assert pacing.written(world.job) == 4, "other explorers, and this one after a restart, count four too"


@pytest.mark.parametrize("unread", ["experiences", "version.json", "trainers"])
def test_one_passing_read_error_ends_no_explorer(world, weights, file, monkeypatch, unread):
    failed = []

    def failing(read):
        def call(disk, path, *more, **options):
            is_explorer = threading.current_thread() is threading.main_thread()
            is_due = os.path.exists(batch_paths.batch(world.job, "e0", 1)) and not failed
            if is_explorer and is_due and os.path.basename(path) == unread:
                failed.append(path)
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return read(disk, path, *more, **options)

        return call

    for name in ("read", "list"):
        monkeypatch.setattr(LocalDisk, name, failing(getattr(LocalDisk, name)))
    trainer = Trainer(world, weights, steps=4)
    assert explore(file, "e0", "--explorer.max_batches", "4") == "max_batches"
    trainer.end()
    assert len(failed) == 1


def test_an_ask_that_cannot_be_written_for_a_moment_ends_no_explorer(world, weights, file, monkeypatch):
    failed, replace = [], LocalDisk.replace

    def failing(disk, path, *more, **options):
        is_explorer = threading.current_thread() is threading.main_thread()
        is_due = os.path.exists(batch_paths.batch(world.job, "e0", 1)) and len(failed) < 5
        if is_explorer and is_due and path == path_of(world.job.explorers, "e0"):
            failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return replace(disk, path, *more, **options)

    monkeypatch.setattr(LocalDisk, "replace", failing)
    trainer = Trainer(world, weights, steps=4, style="explorer_driven")
    more = ("--explorer.max_batches", "4", "--sync.style", "explorer_driven")
    assert explore(file, "e0", *more) == "max_batches"
    trainer.end()
    assert len(failed) == 5


def test_groups_whose_reward_fails_are_dropped_and_replaced(world, weights, file, tmp_path):
    (tmp_path / "picky.py").write_text(
        "def score(prompt, response, task):\n"
        "    if int(task['answer']) % 2:\n"
        "        raise ValueError('odd')\n"
        "    return {'reward': 0.5, 'even': True}\n"
    )
    trainer = Trainer(world, weights, steps=2)
    explore(file, "e0", "--explorer.max_batches", "2", "--explorer.reward.function", "picky:score")
    trainer.end()
    made = [one for batch in batches(world, "e0") for one in batch]
    assert len(made) == 2 * GROUPS * SIZE
    assert {one.reward for one in made} == {0.5}
    assert all(one.info["score"] == {"even": True} for one in made)
    assert (
        sum(line["dropped"].get("reward", 0) for line in records(own.own_path(world.job, "e0", own.METRICS)))
        > 0
    )


def test_equal_groups_are_dropped_and_counted_and_the_curriculum_leaves_out_what_is_solved(
    world, weights, file, tmp_path
):
    """Tasks 0, 2, 4 are always solved, the others never equally. Restarted, it goes on and takes no place twice."""
    (tmp_path / "parity.py").write_text(
        "def score(responses, task):\n"
        "    return [1.0 if int(task['id']) % 2 == 0 else at / 2 for at, _ in enumerate(responses)]\n"
    )
    rows = [{"prompt": f"{number}+1=", "id": str(number)} for number in range(6)]
    (tmp_path / "six.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        f"--explorer.tasks={tmp_path}/six.jsonl",
        "--explorer.reward.function=parity:score",
        "--sync.style=fully_async",
    ]
    keys += [
        "--explorer.reward.equal_groups=drop",
        "--explorer.curriculum.enabled=true",
        "--explorer.ahead=100",
    ]
    trainer = Trainer(world, weights, steps=2, style="fully_async")
    for batch in ("3", "9"):
        explore(file, "e0", *keys, "--explorer.max_batches", batch)
    trainer.end()
    made = [one for batch in batches(world, "e0") for one in batch]
    assert len(made) == 9 * GROUPS * SIZE
    assert {one.task for one in made} == {"1", "3", "5"}
    assert len({one.group for one in made}) == 9 * GROUPS
    lines = records(own.own_path(world.job, "e0", own.METRICS))
    dropped, skipped = (
        sum(line["dropped"].get("equal", 0) for line in lines),
        sum(line["skipped"] for line in lines),
    )
    measured = records(own.own_path(world.job, "e0", "difficulty.jsonl"))
    means = [tuple(one) for line in measured for one in line["rewards"]]
    assert sum(mean == 1.0 for name, mean in means if name in "024") >= 3
    assert {name for name, _ in means} == set("012345")
    # 18 groups of three tasks take six epochs, in which three solved tasks come 18 times: most are left out.
    assert dropped + skipped >= 15
    assert skipped > dropped >= 3
    assert all(line["equal_groups"] == 0 for line in lines)
    told = [[one.info.get("equal_dropped") for one in batch] for batch in batches(world, "e0")]
    assert [sum(filter(None, batch)) for batch in told] == [line["dropped"].get("equal", 0) for line in lines]
    assert all(sum(one is not None for one in batch) == GROUPS for batch in told), (
        "the first row of each group"
    )


# --- with a server --------------------------------------------------------------------------------------------


class Engine(FakeVllm):
    """vLLM whose tokens say by which weights they were chosen; it may be restarted within a request."""

    def __init__(self):
        self.restarted, self.unapplied = False, 0
        super().__init__()

    def post_v1_completions(self, query, body):
        self.running.wait(LONG)
        with self.lock:
            self.unapplied += self.restarted and self.label == "default"
            if not self.restarted and self.label != "default":
                self.boot()
                self.restarted = True
            step = 0 if self.label == "default" else int(self.label.split(".")[1])
        ids = [step + 1] * 3
        values = {"token_logprobs": [-0.5] * 3, "tokens": ["x"] * 3}
        choice = {"text": str(step), "token_ids": ids, "logprobs": values, "finish_reason": "length"}
        return {"choices": [choice] * body["n"]}


class NamingEngine(FakeVllm):
    """vLLM with `--enable-scale-out`: a token is 1 + the step that chose it, and versions come between two tokens."""

    def __init__(self):
        self.crossed = 0
        super().__init__()

    def post_inference_v1_generate(self, query, body):
        if not body:
            raise Answer(400, {"error": {"message": "body.token_ids: Field required"}})
        choices = [self._choice() for _ in range(body["sampling_params"]["n"])]
        return {"choices": choices, "prompt_token_ids": body["token_ids"]}

    def _choice(self):
        ids, found = [], []
        for at in range(4):
            label = self._label()
            if not found or found[-1]["version"] != label:
                found.append({"version": label, "start": at, "end": at})
            found[-1]["end"] = at + 1
            ids.append(1 + (0 if label == "default" else int(label.split(".")[1])))
            if at == 1 and self.crossed < 2 and label != "default":
                self._await_another(label)
        self.crossed += len(found) > 1
        content = {"content": [{"token": "x", "logprob": -0.5} for _ in ids]}
        return {
            "text": "x", "token_ids": ids, "finish_reason": "length", "weight_versions": found, "logprobs": content
        }  # fmt: skip

    def _label(self):
        while True:
            assert self.running.wait(LONG)
            with self.lock:
                if not self.paused:
                    return self.label

    def _await_another(self, label):
        """Wait for a version, which comes while the trainer has batches: it does not have them at every point."""
        end = time.monotonic() + 0.5
        while self._label() == label and time.monotonic() < end:
            time.sleep(0.01)


def test_experiences_have_the_version_that_a_server_names_for_each_token(world, weights, file, directory):
    engine = NamingEngine()
    engine.started_from = f"{directory}/model"
    trainer = Trainer(world, weights, steps=12, style="fully_async")
    more = ["--explorer.engine.kind=vllm", f"--explorer.engine.address={engine.address}"]
    style = ["--sync.style", "fully_async", "--explorer.ahead", "3", "--explorer.engine.spans", "required"]
    explore(file, "e0", *style, *more)
    trainer.end()
    engine.stop()
    made = [one for batch in batches(world, "e0") for one in batch]
    for one in made:
        ends = [span.start for span in one.spans[1:]] + [4]
        named = [span.step for span, end in zip(one.spans, ends, strict=True) for _ in range(span.start, end)]
        assert named == [token - 1 for token in one.tokens[one.prompt_length :]]
        assert (one.step, one.unproven) == (min(named), None)
    assert engine.crossed
    assert sum(len(one.spans) > 1 for one in made) > 0
    lines = records(own.own_path(world.job, "e0", own.METRICS))
    assert {(one["unproven_tokens"], one["unreadable_versions"]) for one in lines} == {(0, 0)}
    shown = {}
    for line in lines:
        for version, count in line["versions"].items():
            shown[version] = shown.get(version, 0) + count
    assert shown == {
        f"1.{step}": sum(one.step == step for one in made) for step in {one.step for one in made}
    }


@pytest.fixture
def engine(directory, monkeypatch):
    monkeypatch.setattr("explorer_hooks.run.served.backoff", lambda attempt: 0.01)
    made = Engine()
    made.started_from = f"{directory}/model"
    yield made
    made.stop()


@pytest.mark.parametrize("style", ["fixed", "fully_async"])
def test_a_restarted_server_is_reloaded_before_it_works(world, weights, file, engine, style):
    trainer = Trainer(world, weights, steps=6, style=style)
    server = ["--explorer.engine.kind=vllm", f"--explorer.engine.address={engine.address}"]
    why = explore(file, "e0", "--sync.style", style, "--explorer.engine.concurrency=1", *server)
    trainer.end()
    assert why == "the trainer is gone"
    assert engine.restarted
    assert engine.unapplied == 0
    made = [one for batch in batches(world, "e0") for one in batch]
    for one in made:
        by = one.tokens[-1] - 1
        assert one.step == by or one.info["versions"] == [f"1.{one.step}", f"1.{by}"]
    assert len({one.step for one in made}) > 1
    groups = [one.group for one in made][::SIZE]
    assert len(set(groups)) == len(groups)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return options by which an explorer starts its server itself, with a port of its own."""
    monkeypatch.setenv("PLACE", str(tmp_path))
    program = f"{sys.executable} {ROOT}/tests/programs/fake_vllm.py {{model}} --port {{port}}"
    return ["--explorer.engine.kind=vllm", f"--explorer.engine.command={program}"]


def starts(place):
    return [line.split() for line in (place / "starts").read_text().splitlines()]


def test_an_explorer_starts_its_server_on_a_free_port_and_stops_it(
    world, weights, file, directory, command, tmp_path
):
    trainer = Trainer(world, weights, steps=4)
    assert explore(file, "e0", *command) == "the trainer is gone"
    trainer.end()
    [(pid, *_, model)] = starts(tmp_path)
    assert model == f"{directory}/model"
    assert not os.path.exists(f"/proc/{pid}")
    made = [one for batch in batches(world, "e0") for one in batch]
    assert {one.step for one in made} >= {0, 2}, "one server, which has read a version"
    assert all(one.step == one.tokens[-1] - 1 for one in made)


def test_an_explorer_ends_with_69_if_its_server_ends(world, file, command, tmp_path):
    world.open("trainer", "trainer")
    (tmp_path / "broken").touch()
    with pytest.raises(EngineDeadError, match="the server ended with 1"):
        explore(file, "e0", *command)
    (tmp_path / "broken").unlink()
    ends = threading.Thread(
        target=lambda: (eventually(lambda: total(world) >= 1), (tmp_path / "die").touch())
    )
    ends.start()
    with pytest.raises(EngineDeadError, match="the server ended with 0"):
        explore(file, "e0", *command)
    ends.join()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"--explorer.engine.address=http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineDeadError, match="is in use by another process"):
            explore(file, "e0", *command, address)


# --- as a process -------------------------------------------------------------------------------------------------


def finished(process, code):
    assert process.wait(MINUTES) == code, process.said()[-3000:]
    return process.said()


def health_of(url):
    """Return the status of a health check and what it says."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        answer = opener.open(url, timeout=LONG)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return answer.status, json.loads(answer.read())


def test_health_is_answered_with_200_once_a_version_runs(world, weights, file, start):
    process = start(file, "e0", "--health", "127.0.0.1:0")
    eventually(lambda: "health_served" in process.said())
    url = re.search(r"http://127\.0\.0\.1:[0-9]+/", process.said())[0]
    assert health_of(url)[0] == 503
    with Synchronizer.open(world.root, "trainer", timeout=LONG) as sync:
        sync.set_model_state_dict(weights(1), 1)
        eventually(lambda: health_of(url)[0] == 200)
        assert health_of(url)[1]["version"] == "1.1"
        process.terminate()
        finished(process, 0)


def test_no_task_is_lost_or_repeated_after_a_kill_and_a_stop(world, file, start):
    world.open("trainer", "trainer")
    bound = ["--explorer.ahead", "1000", "--sync.interval", "1000"]
    first = start(file, "e0", *bound)
    eventually(lambda: total(world) >= 3)
    first.kill()
    first.wait(LONG)
    before = total(world)
    second = start(file, "e0", *bound)
    eventually(lambda: total(world) >= before + 3)
    second.send_signal(signal.SIGTERM)
    assert "told to stop" in finished(second, 0)
    assert world.explorer("e0").status is RunningStatus.STOPPED
    made = batches(world, "e0")
    assert all(len(batch) == GROUPS * SIZE for batch in made)
    groups = [batch[at] for batch in made for at in range(0, GROUPS * SIZE, SIZE)]
    positions = [int(one.group.rpartition(".")[2]) for one in groups]
    tasks = len((Path(load_file(file).explorer.tasks)).read_text().splitlines())
    assert positions == [number % tasks for number in range(len(positions))]
    assert len({one.task for one in groups[:tasks]}) == min(tasks, len(groups))


@pytest.mark.parametrize(
    ("told", "left"), [("finished.json", "stopped"), ("progress", "stopped"), ("progress", "running")]
)
def test_an_explorer_on_a_finished_job_ends_with_the_last_version(world, weights, file, told, left):
    """The trainer stopped before, or was killed after its last full checkpoint: its file says that it runs."""
    with Synchronizer.open(world.root, "trainer", timeout=LONG) as sync:
        sync.set_trainer_status(RunningStatus.RUNNING)
        sync.set_model_state_dict(weights(4), 4)
        sync.wait_for(lambda: sync.latest_version() is not None)
        path = f"{world.root}/.syncd/trainers/{sync.identity}.json"
        running = Path(path).read_text()
    if left == "running":
        Path(path).write_text(running)
    if told == "progress":
        Path(f"{world.root}/config.toml").write_text("[trainer]\ntotal_steps = 4\n")
        Path(f"{world.root}/latest_checkpointed_iteration.txt").write_text("4")
    else:
        mark_finished(world.job, JobEnd(4, "total_steps 4 reached"))
    why = explore(file, "e0", "--sync.timeout", "15")
    assert why == "the job is finished: total_steps 4 reached"
    assert world.explorer("e0").applied == (1, 4)


def test_a_stage_is_explored_in_its_own_directory_with_its_model(
    world, weights, file, directory, tmp_path, capsys
):
    stages = (
        Path(file).read_text().replace('dir = "job"', f'dir = "{tmp_path}"').replace("/model", "/nowhere")
    )
    Path(file).write_text(
        f'{stages}[[stages]]\nname = "first"\n[[stages]]\nname = "job"\nsync.interval = 1\n'
    )
    record = {"done": ["first"], "models": {"first": "start", "job": f"{directory}/model"}}
    (tmp_path / "stages.json").write_text(json.dumps(record))
    trainer = Trainer(world, weights, steps=2, interval=1)
    assert command_line(["run", file, "--stage", "job", "--name", "e0"]) == 0
    trainer.end()
    assert "explorer ended: the trainer is gone" in capsys.readouterr().err
    assert steps_of(world, "e0")[:2] == [[0], [1]]
    assert not (tmp_path / "experiences").exists()
