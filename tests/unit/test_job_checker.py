"""The checker that judges sweeps and power cuts: it must see each kind of damage."""

import json
import os
import shutil
import subprocess

import pytest
from support import checker
from support.processes import write_steps
from support.sweep import ENVIRONMENT


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    job = str(tmp_path_factory.mktemp("steps"))
    subprocess.run(write_steps(job, 1, 3), env=ENVIRONMENT, check=True)
    return job


@pytest.fixture
def job(three_steps, tmp_path):
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    publish(tmp_path, 2)
    return str(tmp_path)


def publish(job, step, digest=None, generation=1):
    os.makedirs(f"{job}/.syncd", exist_ok=True)
    document = {
        "generation": generation,
        "step": step,
        "digest": digest or checker.manifest(job, step)["digest"],
    }
    with open(f"{job}/.syncd/version.json", "w", encoding="ascii") as file:
        json.dump(document, file)


def shard(job, step):
    return f"{job}/global_step_{step}/actor/model-00001-of-00002.safetensors"


def truncate(job):
    os.truncate(shard(job, 3), 10)


def flip(job):
    with open(shard(job, 3), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def lose(job):
    os.unlink(shard(job, 3))


def tear(job):
    os.truncate(f"{job}/global_step_3/manifest.json", 40)


def forge(job):
    path = f"{job}/global_step_3/manifest.json"
    with open(path, encoding="ascii") as file:
        document = json.load(file)
    with open(path, "w", encoding="ascii") as file:
        json.dump(document | {"kind": "lora"}, file)


def unseal_marked(job):
    os.unlink(f"{job}/global_step_3/manifest.json")


def unseal_published(job):
    os.unlink(f"{job}/global_step_2/manifest.json")


def empty_marker(job):
    os.truncate(f"{job}/latest_state_dict_iteration.txt", 0)


def other_digest(job):
    publish(job, 2, digest="sha256:0")


def torn_version(job):
    os.truncate(f"{job}/.syncd/version.json", 5)


def test_an_intact_job_has_no_problems(job):
    assert checker.problems(job, checker.Past(pair=(1, 2), leased=frozenset({1}))) == []
    assert (checker.newest_whole(job), checker.pair(job), checker.marker(job)) == (3, (1, 2), 3)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip,
        lose,
        tear,
        forge,
        unseal_marked,
        unseal_published,
        empty_marker,
        other_digest,
        torn_version,
    ],
    ids=lambda damage: damage.__name__,
)
def test_the_checker_finds_each_kind_of_damage(job, damage):
    damage(job)
    assert checker.problems(job)


def test_a_lost_version_or_leased_step_is_found(job):
    assert checker.problems(job, checker.Past(pair=(1, 3)))
    assert checker.problems(job, checker.Past(leased=frozenset({9})))
    os.unlink(f"{job}/.syncd/version.json")
    assert checker.problems(job, checker.Past(pair=(1, 2)))


def test_a_mix_of_two_attempts_is_found(job):
    other = f"{job}/other"
    os.mkdir(other)
    subprocess.run(write_steps(other, 3, 3), env=ENVIRONMENT, check=True)
    path = f"{other}/global_step_3/actor/model-00001-of-00002.safetensors"
    record = next(
        item
        for item in checker.manifest(other, 3)["shards"]
        if item["name"].endswith("00001-of-00002.safetensors")
    )
    shutil.copy(path, shard(job, 3))
    document = checker.manifest(job, 3)
    document["shards"] = [record if item["name"] == record["name"] else item for item in document["shards"]]
    reseal(job, document)
    assert checker.why_not_whole(job, 3) == f"{record['name']}: of another attempt"


def reseal(job, document):
    body = {key: value for key, value in document.items() if key != "digest"}
    with open(f"{job}/global_step_3/manifest.json", "w", encoding="ascii") as file:
        json.dump(body | {"digest": checker.own_digest(body)}, file)
