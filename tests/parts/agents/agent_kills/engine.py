"""An engine whose answers can be recognised: each has a number of its own, and says whether the agent goes on.

The k-th answer to a prompt follows from the seed, the prompt and k, so what an undisturbed run draws is always the
same. How often each prompt was asked outlives the process: an answer that was under way when it died is drawn anew.
"""

import collections
import hashlib
import json
import random
import threading
import time

from support.chat_model import make_tokenizer
from support.fake_engines import FakeVllm
from support.fake_servers import Answer

MEAN, MOST = 20, 150
"""Letters of an answer on average and at most, besides its number and its end."""

LAST = 0.3
"""How often an answer is the last one of its rollout."""

BASE, EACH = 0.004, 0.0004
"""Seconds of an answer, and of each of its tokens."""


def prompt_key(tokens):
    """Return what names a prompt."""
    return hashlib.blake2b(json.dumps(list(tokens)).encode(), digest_size=8).hexdigest()


def drawn(seed, key, count):
    """Return the answer to the `count`-th question with a prompt."""
    chance = random.Random(f"{seed} {key} {count}")
    number = f"{chance.getrandbits(40):010x}"
    filling = "x" * min(int(chance.expovariate(1 / MEAN)), MOST)
    return f"{number}.{filling}.{'done' if chance.random() < LAST else 'more'}"


def logprob(text):
    """Return the log-prob of each token of an answer."""
    return -(1 + int(text[0], 16)) / 16


class NumberedEngine(FakeVllm):
    """vLLM with `--enable-scale-out` that answers so.

    Args:
        log: A file with a line for each answer that it began: its text, its prompt, the label of its weights.
        seed: Of the answers.
    """

    def __init__(self, log, seed):
        self._seed, self._asked = seed, collections.Counter(line["prompt"] for line in read_log(log))
        self._log = open(log, "a", buffering=1)  # noqa: SIM115 - until this process is killed
        self._writing = threading.Lock()
        self._ids = make_tokenizer().convert_tokens_to_ids
        super().__init__()

    def post_inference_v1_generate(self, query, body):
        if not body:
            raise Answer(400, {"error": {"message": "body.token_ids: Field required"}})
        assert self.running.wait(60)
        key = prompt_key(body["token_ids"])
        with self._writing:
            text, label = drawn(self._seed, key, self._asked[key]), self.label
            self._asked[key] += 1
            self._log.write(json.dumps({"text": text, "prompt": key, "label": label}) + "\n")
        tokens = [*self._ids(list(text)), 0][: body["sampling_params"]["max_tokens"]]
        time.sleep(BASE + EACH * len(tokens))
        choice = {
            "token_ids": tokens,
            "finish_reason": "stop" if tokens[-1] == 0 else "length",
            "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
            "logprobs": {"content": [{"token": "x", "logprob": logprob(text)}] * len(tokens)},
        }
        return {"choices": [choice], "prompt_token_ids": body["token_ids"]}


def read_log(path):
    """Return the lines of a log; a process that was killed may have left half a line."""
    try:
        with open(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
