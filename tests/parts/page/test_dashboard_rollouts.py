"""The rollouts that the page lists: newest first, filtered, sealed batches only, a bounded number of them."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.documents import checked
from support.experiences import make, segmented, write
from support.jobs import ManualClock
from support.paths import ROOT

from syncd.experience import batch_paths
from syncd.experience.model import Span
from syncd.extras import install_command
from syncd.parts.page import rollout, rollouts, token_text
from syncd.parts.page.poller import PollResult, SingleCall
from syncd.parts.page.rollout import RolloutReader
from syncd.parts.page.rollouts import BatchName, RolloutIndex
from syncd.protocol.layout import Job
from trainer.experience.store import ExperienceReader

LONG = 60.0


@pytest.fixture
def job(tmp_path):
    return Job.at(tmp_path)


def listed(index, **query):
    found = rollouts.answer(PollResult(index()), 10.0, query)
    return found and [(row["explorer"], row["batch"], row["row"]) for row in found["rollouts"]]


def test_rollouts_of_waiting_and_kept_batches_are_listed_newest_first(job):
    write(
        job,
        "e0",
        [make("g0", 0, created_at=1.0), make("g0", 1, created_at=5.0)],
        [make("g1", created_at=9.0)],
    )
    write(job, "e1", [make("g2", created_at=7.0)])
    os.makedirs(batch_paths.archive(job, "e0"))
    os.rename(batch_paths.batch(job, "e0", 1), f"{batch_paths.archive(job, 'e0')}/1.parquet")
    index = RolloutIndex(lambda: job)
    assert listed(index) == [("e0", 2, 0), ("e1", 1, 0), ("e0", 1, 1), ("e0", 1, 0)]
    os.unlink(batch_paths.batch(job, "e1", 1))
    assert listed(index) == [("e0", 2, 0), ("e0", 1, 1), ("e0", 1, 0)], "what the trainer removed is gone"


def test_filters_by_task_group_explorer_version_and_reward(job):
    spans = [Span(0, 1, 4), Span(2, 2, 5)]
    write(
        job,
        "e0",
        [
            make("train/1", 0, tag=7, reward=0.0, created_at=1.0),
            make("train/1", 1, tag=7, reward=1.0, created_at=2.0),
            make("eval/2", 0, tag=8, reward=0.5, created_at=3.0, step=4, spans=spans),
        ],
    )
    index = RolloutIndex(lambda: job)
    assert listed(index, task="TASK-7") == [("e0", 1, 1), ("e0", 1, 0)]
    assert listed(index, group="eval", explorer="e") == [("e0", 1, 2)]
    assert listed(index, reward_min="0.5") == [("e0", 1, 2), ("e0", 1, 1)]
    assert listed(index, reward_min="0.2", reward_max="0.7") == [("e0", 1, 2)]
    assert listed(index, version="2.5") == listed(index, version="4") == [("e0", 1, 2)]
    assert listed(index, version="1.5") == []
    assert listed(index, **{"from": "2"}) == [("e0", 1, 0)]
    for wrong in ({"version": "new"}, {"reward_min": "high"}, {"from": "x"}):
        assert listed(index, **wrong) is None, wrong


def test_a_rollout_of_several_segments_is_one_row(job):
    write(job, "e0", [*segmented("g", 0, steps=[3, 4]), make("g", 1)])
    first, second = sorted(RolloutIndex(lambda: job)()["rollouts"], key=lambda row: row["row"])
    assert (first["row"], first["segments"], first["response_tokens"]) == (0, 2, 6)
    assert first["versions"] == [[1, 3], [1, 4]]
    assert (second["row"], second["segments"]) == (2, 1)


def test_the_list_is_bounded_and_older_batches_are_counted(job):
    write(job, "e0", *([make("g", created_at=float(number))] for number in range(6)))
    full = RolloutIndex(lambda: job, most=2)()
    assert [row["batch"] for row in full["rollouts"]] == [6, 5]
    assert full["batches"] == {"read": 2, "unread": 4}
    slow = RolloutIndex(lambda: job, most_read=1)
    assert [len(slow()["rollouts"]) for _ in range(3)] == [1, 2, 3], (
        "one reading after the other goes further back"
    )


def test_only_sealed_batches_are_shown_and_rejected_ones_have_their_reason(job):
    good, torn, foreign = write(job, "e0", [make("a")], [make("b")], [make("c")])
    data = bytearray(Path(torn).read_bytes())
    data[len(data) // 2] ^= 1
    Path(torn).write_bytes(data)
    os.unlink(foreign)
    os.symlink(good, foreign)
    found = RolloutIndex(lambda: job)()
    assert [row["group"] for row in found["rollouts"]] == ["a"]
    reasons = {one["batch"]: one["reason"] for one in found["unreadable"]}
    assert "does not match its seal" in reasons[2]
    assert "not a regular file" in reasons[3]
    for _ in ExperienceReader(job, ManualClock()).poll():
        pass
    found = RolloutIndex(lambda: job)()
    assert found["unreadable"] == []
    assert {one["name"] for one in found["rejected"]} == {"2.parquet", "3.parquet"}
    assert any("does not match its seal" in one["reason"] for one in found["rejected"])


def test_a_rollout_has_the_version_and_log_prob_of_each_token(job):
    one = make(
        length=4,
        step=4,
        spans=[Span(0, 1, 4), Span(3, 2, 5)],
        logprobs=[-0.1, -0.2, -0.3, -0.4],
        unproven=[False, True, False, False],
        turn_rewards=[(2, 0.25), (4, 0.25)],
        teacher_logprobs=[-1.0, -2.0, -3.0, -4.0],
        info={"score": {"length": 0.1}, "nan": float("inf") > 1},
    )
    write(job, "e0", [one])
    found = RolloutReader(lambda: job).answer({"explorer": "e0", "batch": "1"}, LONG)
    assert found["state"] == "ready"
    assert found["prompt"] == {"length": 2, "ids": [7, 8], "texts": None}
    response = found["response"]
    assert (response["ids"], response["length"], response["from"]) == ([10, 11, 12, 13], 4, 0)
    assert response["versions"] == [[0, 1, 4], [3, 2, 5]]
    assert response["logprobs"] == [-0.1, -0.2, -0.3, -0.4]
    assert (response["chosen"], response["unproven"]) == ([1, 1, 1, 1], [0, 1, 0, 0])
    assert response["teacher_logprobs"] == [-1.0, -2.0, -3.0, -4.0]
    assert found["turn_rewards"] == [[2, 0.25], [4, 0.25]]
    assert (found["reward"], found["info"]["score"]) == (0.5, {"length": 0.1})
    assert found["text_missing"] == "config.toml of the job names no model.path that is an absolute path"


def test_a_long_response_is_shown_part_by_part(monkeypatch):
    monkeypatch.setattr(rollout, "MOST_TOKENS", 3)
    one = make(length=8, step=1, spans=[Span(0, 1, 1), Span(4, 1, 2), Span(7, 1, 3)])
    part = rollout.segment_document(one, 3, None)["response"]
    assert part["ids"] == [13, 14, 15]
    assert part["versions"] == [[3, 1, 1], [4, 1, 2]], "each from its first token that is shown"
    assert rollout.segment_document(one, 99, None)["response"]["ids"] == []


def test_text_is_that_of_the_jobs_tokenizer(job, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    bytes_of = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = bytes_of(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    made.train_from_iterator([], tokenizers.trainers.BpeTrainer(initial_alphabet=bytes_of.alphabet()))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.toml").write_text(f'[model]\npath = "{tmp_path}"\n')
    tokenizer, missing = token_text.TokenText(job).tokenizer()
    assert missing == ""
    ids = made.encode("aé😀\nb").ids
    assert token_text.texts(tokenizer, ids, 0, len(ids)) == ["a", "", "é", "", "", "", "😀", "\n", "b"]
    assert token_text.texts(tokenizer, ids, 2, 4) == ["é", ""], "the ids before are part of the character"
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot be read" in token_text.TokenText(job).tokenizer()[1]


@pytest.mark.parametrize(
    ("query", "state"),
    [
        ({"explorer": "e0", "batch": "1", "row": "5"}, "row 5"),
        ({"explorer": "e0", "batch": "9"}, "was not kept"),
        ({"explorer": "../e0", "batch": "1"}, None),
        ({"explorer": "e0", "batch": "1.5"}, None),
        ({"explorer": "e0", "batch": "1", "row": "-1"}, None),
    ],
)
def test_a_rollout_that_is_not_there_is_called_so(job, query, state):
    write(job, "e0", [make()])
    found = RolloutReader(lambda: job).answer(query, LONG)
    if state is None:
        assert found is None
    else:
        assert state in found["error"]["message"]


def test_a_call_that_hangs_blocks_nobody():
    calls, go = SingleCall(), threading.Event()
    assert calls.result("a", lambda: go.wait(LONG) and 1, 0.01) is None
    assert calls.result("b", lambda: 2, 0.01) is None, "one at a time"
    go.set()
    assert calls.result("a", lambda: 3, LONG) == 1, "who asks again gets what was begun"
    assert calls.result("b", lambda: 2, LONG) == 2


def test_without_pyarrow_the_answer_names_the_extra(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "syncd.experience.table", raising=False)
    with pytest.raises(Exception, match="pyarrow") as raised:
        rollouts.read_batch(job, BatchName("e0", 1))
    assert raised.value.hint == install_command("experience")


def test_the_server_imports_pyarrow_only_when_rollouts_are_asked_for(tmp_path):
    code = """
import sys
from syncd.parts.page.routes import file_routes
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
routes = file_routes(lambda: Job.at(sys.argv[1]), SystemClock(), 1.0, with_rollouts=True)
routes["/charts.json"]({})
print("pyarrow" in sys.modules, end=" ")
routes["/rollouts.json"]({})
print("pyarrow" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == ["False", "True"]
    assert "torch" not in done.stdout


def test_answers_are_json_with_the_documented_fields(job):
    write(job, "e0", [make()])
    query = {"explorer": "e0", "batch": "1"}
    many = rollouts.answer(PollResult(RolloutIndex(lambda: job)()), 1.0, {})
    one = RolloutReader(lambda: job).answer(query, LONG)
    assert checked("/rollouts.json", json.loads(json.dumps(many, allow_nan=False)))["rollouts"]
    checked("/rollout.json", json.loads(json.dumps(one, allow_nan=False)))
    assert rollouts.disabled() == {"schema_version": 1, "enabled": False}


def test_what_is_nested_deeply_is_cut_off(job):
    info = {}
    for _ in range(900):
        info = {"below": info}
    write(job, "e0", [make(info=info)])
    found = RolloutReader(lambda: job).answer({"explorer": "e0", "batch": "1"}, LONG)
    assert found["state"] == "ready"
    assert json.dumps(found["info"]).count("below") < 100


def test_a_configuration_that_is_nested_too_deeply_names_no_tokenizer(job, tmp_path):
    (tmp_path / "config.toml").write_text(f"a = {'[' * 100_000}")
    assert token_text.TokenText(job).tokenizer()[1].startswith("config.toml of the job names no model.path")
