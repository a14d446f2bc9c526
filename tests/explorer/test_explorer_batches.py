"""Batches of tasks: what one odd task costs is that task, and what is written has all others."""

import json
from types import SimpleNamespace

import pytest
from support.job_file import job_of, write_job

pytest.importorskip("pydantic", reason="explorers need pydantic")

from explorer_hooks.run.batches import BatchMaker, EpochTask, experience_of
from explorer_hooks.run.curriculum import Curriculum
from explorer_hooks.run.generation import Generator, GroupResult, Response, Sampling
from explorer_hooks.run.held_out import HeldOut
from explorer_hooks.run.load import load_file
from explorer_hooks.run.own_files import Records, TaskCursor
from explorer_hooks.run.rewards import Score
from explorer_hooks.run.scoring import BuiltInScorer
from explorer_hooks.tasks.sources import open_tasks
from syncd.jobfile.evaluation import EvaluationSet
from syncd.jobfile.explorer_sections import CurriculumSection
from syncd.jobfile.task_sets import TaskSetSection

REFUSED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"}]


def encoded(prompt):
    """Return two tokens, unless the prompt is one that some chat templates refuse."""
    if prompt == REFUSED:
        raise ValueError("the chat template refuses the messages: System role not supported")
    return [1, 2]


class OneToken(Generator):
    def generate(self, requests):
        for index, request in enumerate(requests):
            yield GroupResult(index, (Response([3], [-0.5]),) * request.samples)


class TaskBatches:
    """Makes batches of the rows of a file, each answered by one token."""

    def __init__(self, directory, *rows, **explorer):
        path = directory / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"groups": len(rows), "group_size": 1}
        job = job_of(data=data, explorer={"tasks": "tasks.jsonl", "epochs": 1} | explorer)
        self.file = load_file(write_job(directory / "job.toml", job))
        self.tasks = open_tasks([TaskSetSection(source=str(path))])
        self.scorer = BuiltInScorer("exact_match")
        tokens = SimpleNamespace(encode=encoded)
        self.sampling = Sampling(self.file, tokens, OneToken(), self.scorer, lambda: False)
        self.curriculum = Curriculum(CurriculumSection(), Records(str(directory / "difficulty.jsonl")), "")

    def made(self):
        ledger = SimpleNamespace(
            cursor=TaskCursor(0, 0, 0), state=SimpleNamespace(seed=""), group=lambda *place: f"g/{place}"
        )
        gate = SimpleNamespace(
            wait_until_usable=lambda **_: True, update_during_work=lambda: None, unproven={}
        )
        return BatchMaker(self.tasks, ledger, self.sampling, gate, self.curriculum).make()


def test_a_column_called_task_set_of_the_users_own_is_no_set(tmp_path):
    row = {"prompt": "p", "answer": "a", "task_set": ["hard", "new"]}
    batch = TaskBatches(tmp_path, row, row).made()
    assert (len(batch.groups), batch.task_sets) == (2, {})


def test_a_column_without_a_number_costs_no_group(tmp_path):
    """NaN is what pandas and numpy write where a row has no number; JSON has none of them."""
    rows = [{"prompt": "p", "answer": "a", "level": level} for level in (float("nan"), float("inf"), 3)]
    batch = TaskBatches(tmp_path, *rows).made()
    assert [one.info["task"] for one in batch.experiences] == [{"level": None}, {"level": None}, {"level": 3}]
    assert not batch.dropped


def test_what_metrics_read_of_a_rollout_stays_where_its_texts_and_its_task_are_too_long(tmp_path):
    """Each letter is six characters of JSON, as in Chinese, and the tasks have tests as those of code have."""
    row = {"prompt": "\u5b57" * 9000, "tests": "x" * 70_000}
    batches = TaskBatches(tmp_path, row, {"prompt": "p", "tests": "x" * 70_000}, {"prompt": "p", "level": 3})
    text, parts = "\u5b57" * 9000, {"brief": 0.5}
    response = Response([3], [-0.5], text, truncated=True)
    infos = [
        experience_of(
            EpochTask(0, 0, task, [1]), "g", 0, response, GroupResult(0), Score(1.0, parts), {}
        ).info
        for task in batches.tasks
    ]
    figures = {"truncated": True, "score": parts}
    assert infos[0] == figures
    shown = {"prompt": "p", "response": text[:8192]}
    assert infos[1:] == [figures | shown, figures | shown | {"task": {"level": 3}}]


def test_a_prompt_that_the_chat_template_refuses_costs_its_group_alone(tmp_path):
    batch = TaskBatches(tmp_path, {"prompt": "p"}, {"messages": REFUSED}, {"prompt": "q"}).made()
    assert [one.task for one in batch.experiences] == ["line-1", "line-3"]
    assert batch.dropped == {"prompt": 1}


def test_a_held_out_prompt_that_the_chat_template_refuses_is_a_failed_task(tmp_path):
    evaluation = pytest.importorskip("explorer_hooks.parts.evaluation.evaluation")
    batches = TaskBatches(tmp_path, {"messages": REFUSED}, {"prompt": "p", "answer": ""})
    section = EvaluationSet(tasks="t", samples=1)
    held_out = HeldOut("", section, batches.tasks, 4, batches.scorer, "key")
    refused, measured = evaluation.PromptEvaluator(batches.sampling).outcomes(held_out, (1, 0))
    assert (list(refused.rewards), measured.rewards) == ([], [1.0])
