"""Sessions that are played against `explorer serve` while it is killed and a version comes, and what is recorded."""

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import torch

from explorer_hooks.run.own_server import free_port
from support.job_file import job_of, write_job
from support.served_process import MINUTES, patiently
from syncd.experience import batch_paths
from syncd.experience.table import decode_batch
from syncd.protocol.presence import RunningStatus
from syncd.synchronizer import Synchronizer

GROUPS, SIZE, ROUNDS, TURNS = 2, 4, 2, 3


def write_file(path, model, engine=None, **model_keys):
    """Write a job's file and return its path; the address of the gateway is its last line."""
    explorer = {"ahead": 10, "sampling": {"max_tokens": 12}, "engine": engine or {}}
    explorer["gateway"] = {"directory": "state", "listen": f"127.0.0.1:{free_port()}"}
    data, sync = {"groups": GROUPS, "group_size": SIZE}, {"timeout": 600}
    tables = {"model": {"path": str(model), **model_keys}, "data": data, "sync": sync}
    write_job(path, job_of(**tables, explorer=explorer))
    return path


def answered(client, history, _key):
    return client.chat.completions.create(model="policy", messages=history).choices[0].message.content


def streamed(client, history, key):
    """Return the text of a stream; if it broke off, the same request gets the same answer by its key."""
    asked = {
        "model": "policy",
        "messages": history,
        "stream": True,
        "extra_headers": {"Idempotency-Key": key},
    }
    while True:
        try:
            return "".join(
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked)
            )
        except openai.APIConnectionError:
            time.sleep(0.1)


def play(driver, group, rollout, turns, gate):
    """Play a rollout as an agent does: it keeps its history as text, and its client sends again what failed."""
    session = patiently(lambda: driver.session(group, rollout))
    with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=60) as client:
        history = [{"role": "user", "content": f"rollout {rollout} of {group}"}]
        for turn in range(turns):
            gate(turn)
            text = (streamed if rollout % 2 else answered)(client, history, f"turn {turn}")
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn}"}]
    return patiently(lambda: driver.reward(session, float(rollout)))


def record_sessions(models, world, served, tolerance, publish=None):
    """Play eight sessions at once, twice; kill the gateway and publish a version in the middle, and compare.

    Args:
        models: The model of steps 0 and 1.
        world: The job.
        served: The gateway's process.
        tolerance: How far log-probs may be from those of transformers in float32.
        publish: Publishes the version of step 1; the trainer does unless given.
    """
    driver = served.await_answer()
    assert (served.directory / "token").stat().st_mode & 0o777 == 0o600
    second = itertools.count(1)
    killed, published = threading.Event(), threading.Event()

    def gate(turn):
        """Have the first version come and the gateway die while others are in the middle of their turns."""
        if turn == 1 and next(second) == SIZE:
            killed.set()
        if turn == TURNS - 1:
            assert published.wait(MINUTES)

    with Synchronizer.open(world.root, "trainer", timeout=MINUTES) as trainer, ThreadPoolExecutor(8) as pool:
        rounds = []
        for number in range(ROUNDS):
            names = [f"g{number}.{group}" for group in range(GROUPS)]
            places = [(name, rollout) for name in names for rollout in range(SIZE)]
            rounds = [pool.submit(play, driver, *place, TURNS, gate) for place in places]
            if number == 0:
                assert killed.wait(MINUTES)
                served.kill()
                served.start()
                served.await_answer()
                if publish is None:
                    trainer.set_model_state_dict(models[1].state_dict(), 1)
                else:
                    publish()
                end = time.monotonic() + MINUTES
                while world.explorer("e0").applied != (1, 1):
                    assert time.monotonic() < end, served.said
                    time.sleep(0.05)
                published.set()
            assert [one.result(MINUTES)["state"] for one in rounds] == ["rewarded"] * len(places)
        found = [row for batch in _batches(world, ROUNDS) for row in batch]
    assert served.wait() == 0
    assert "explorer ended: the trainer is gone\n" in served.said
    assert world.explorer("e0").status is RunningStatus.STOPPED
    names = [f"g{number}.{group}" for number in range(ROUNDS) for group in range(GROUPS)]
    assert _places(found) == sorted((name, rollout) for name in names for rollout in range(SIZE))
    assert {row.segments for row in found} == {1}, "each later turn continues the exact tokens"
    assert {row.info["turns"] for row in found} == {TURNS}
    assert {step for row in found for _, step in row.versions} == {0, 1}
    assert any(len(row.spans) > 1 for row in found), "one rollout has turns of two versions"
    assert max(_differences(models, row) for row in found) < tolerance
    metrics = [
        json.loads(line)
        for line in Path(world.root, "explorers", "e0", "metrics.jsonl").read_text().splitlines()
    ]
    assert [(one["batch"], one["rollouts"], one["dropped"]) for one in metrics] == [(1, 8, {}), (2, 8, {})]


def _batches(world, count):
    """Wait for so many batches, and return their rows."""
    end = time.monotonic() + MINUTES
    while len(numbers := batch_paths.numbers(world.job, batch_paths.batches(world.job, "e0"))) < count:
        assert time.monotonic() < end
        time.sleep(0.05)
    paths = [batch_paths.batch(world.job, "e0", number) for number in sorted(numbers)]
    return [decode_batch(world.job.disk.read(path, 1 << 28), path) for path in paths]


def _places(rows):
    return sorted((row.group.partition("/")[2], row.rollout) for row in rows)


def _differences(models, row):
    """Return how far the log-probs of learnt tokens are from those of plain transformers under the named versions."""
    with torch.no_grad():
        known = {
            step: models[step](torch.tensor([row.tokens])).logits[0].log_softmax(-1)
            for _, step in row.versions
        }
    starts = [span.start for span in row.spans]
    worst = 0.0
    for at, (logprob, own) in enumerate(zip(row.logprobs, row.action_mask, strict=True)):
        span = row.spans[sum(start <= at for start in starts) - 1]
        place = row.prompt_length + at
        if own:
            worst = max(worst, abs(float(known[span.step][place - 1, row.tokens[place]]) - logprob))
    return worst
