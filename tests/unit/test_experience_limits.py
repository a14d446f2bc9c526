"""What a model cannot take is set aside where it is read, with the explorer, the file and the reason."""

import json

import pytest

pytest.importorskip("pyarrow", reason="experiences are Parquet")

from syncd.experience import batch_paths
from syncd.experience.model import Experience, TurnReward
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from trainer.experience.cursor import BatchFile
from trainer.experience.limits import UNLIMITED, Limits
from trainer.experience.store import ExperienceReader

LIMITS = Limits(vocabulary=64, tokens=8, tokens_from="the model")


def one(**fields):
    base = {
        "tokens": [1, 2, 3, 63], "prompt_length": 2, "logprobs": [-0.1, -0.7], "action_mask": [True, True],
        "reward": 1.0, "group": "g", "task": "t", "rollout": 0, "generation": 1, "step": 0,
    }  # fmt: skip
    return Experience(**base | fields)


BAD = {
    "token 64 for a model of 64 tokens": one(tokens=[1, 2, 64, 3]),
    "9 tokens where the model takes 8": one(tokens=[1] * 9, logprobs=[0] * 7, action_mask=[True] * 7),
    "reward 1e+30 is too large": one(reward=1e30),
    "reward -1e+30 is too large": one(reward=-1e30),
    "log-prob -1e+30 is too large": one(logprobs=[-1e30, 0.0]),
    "log-prob 1e+30 is too large": one(logprobs=[-0.1, 1e30]),
    "log-prob of a teacher -1e+30 is too large": one(teacher_logprobs=[-0.1, -1e30]),
    "reward of a turn -1e+30 is too large": one(
        reward=0.0, turn_rewards=[TurnReward(1, 1e30), TurnReward(2, -1e30)]
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_an_experience_over_the_limits_is_named_by_its_row(reason):
    assert LIMITS.problem([one(), BAD[reason]]).startswith(f"row 1: {reason}")


def test_experiences_within_the_limits_have_no_problem():
    longest = one(tokens=[63] * 8, logprobs=[-9999.0] * 6, action_mask=[True] * 6, reward=-1e6)
    assert LIMITS.problem([one(), longest]) == ""
    assert UNLIMITED.problem([one(tokens=[1, 2, 3, 2**31 - 1])]) == ""


@pytest.fixture
def job(tmp_path):
    job = Job.at(tmp_path)
    with ExperienceWriter(job, "e0") as writer:
        for number in range(3):
            writer.write(
                [one(group=str(number)), one(group=str(number), rollout=1, tokens=[1, 2, 3, 63 + number])]
            )
    return job


def test_a_batch_over_the_limits_is_rejected_and_the_next_one_is_read(job):
    reader = ExperienceReader(job)
    reader.limits = Limits(vocabulary=65)
    assert [loaded.file.seq for loaded in reader.poll()] == [1, 2]
    assert reader.cursor.through == {"e0": 3}
    assert reader.counts["rejected"] == 1
    document = json.loads(job.disk.read(f"{batch_paths.rejected(job, 'e0')}/3.parquet.reason.json"))
    assert (document["explorer"], document["name"]) == ("e0", "3.parquet")
    assert document["reason"] == "row 1: token 65 for a model of 65 tokens"


def test_a_restarted_reader_skips_batches_rejected_before(job):
    for _ in range(2):
        reader = ExperienceReader(job)
        reader.limits = Limits(vocabulary=64)
        assert [loaded.file.seq for loaded in reader.poll()] == [1]
    with ExperienceWriter(job, "e0") as writer:
        writer.write([one(group="4")])
    assert [loaded.file.seq for loaded in reader.poll()] == [4]


def test_a_batch_over_the_limits_in_a_restored_state_is_rejected(job):
    reader = ExperienceReader(job)
    reader.limits = Limits(vocabulary=65)
    assert reader.load(BatchFile("e0", 1)) is not None
    assert reader.load(BatchFile("e0", 3)) is None
    assert batch_paths.numbers(job, batch_paths.rejected(job, "e0")) == {3}
