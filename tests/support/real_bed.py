"""What tests of real engines share: versions of the tiny model, what an engine answers, a job with a daemon."""

import concurrent.futures
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time

from explorer_hooks.follower.follower import Follower, FollowOptions
from explorer_hooks.hook import HookOptions
from support import small_qwen
from support.engine_process import ROOT
from support.hook_contract import Bed
from support.jobs import start
from support.publishing import publish_directory
from support.targets import target_of
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.manifest import read_manifest
from syncd.protocol.version import engine_label, read_version

CLOSE = 1e-3
"""Nats by which a log-prob may differ from transformers'."""

LIMIT = 120.0
"""Seconds that one request may take on a busy machine."""


def seed_of(pair):
    return pair[0] * 1000 + pair[1]


def asked(address, method, path, body=None, timeout=LIMIT, **more):
    """Return status and document of a request that does not go through a hook."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=timeout)
    try:
        headers = {"Content-Type": "application/json", **more}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text[:1] == b"{" else text
    finally:
        connection.close()


def told(address, path, body, **more):
    """Return what a POST is answered; `more` are further headers, with `_` for each dash."""
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    status, answer = asked(address, "POST", path, body, **headers)
    assert status == 200, (path, status, answer)
    return answer


class RealBed(Bed):
    """One engine that is shared by the tests of a module, brought to its start weights before each."""

    hook_type = None
    engine = hook_name = pause_path = ""
    dtype = "float32"
    timeout = 60.0

    def __init__(self, process, root, start):
        self.process, self.root, self.start_directory = process, str(root), start

    def open(self, timeout=None):
        self.hook = self.hook_type.from_options(
            HookOptions(self.process.address, timeout=timeout or self.timeout, settings=self.settings())
        )
        return self.hook

    def settings(self):
        return {}

    def target(self, pair, *, shards=1):
        directory = f"{self.root}/versions/{pair[0]}.{pair[1]}-{shards}"
        if not os.path.isdir(directory):
            small_qwen.write_shards(directory, seed_of(pair), shards)
        return target_of(directory, pair)

    def model(self, target):
        return small_qwen.model_of(0 if target is None else seed_of(target.version.pair))

    def runs(self, target):
        return self.distance(0 if target is None else seed_of(target.version.pair)) < CLOSE

    def distance(self, seed, prompt=None):
        """Return how far the engine's log-probs are from transformers', for a prompt that it knows by default."""
        prompt = prompt or list(range(10, 110))
        tokens, found = self.answer(prompt)
        wanted = small_qwen.expected(seed, [*prompt, *tokens], len(tokens))
        return max(abs(one - other) for one, other in zip(found, wanted, strict=True))

    def answer(self, prompt, count=8):
        """Return the tokens that follow a prompt, and their log-probs."""
        raise NotImplementedError

    def hung(self):
        return self.process.hung()

    def pauses(self):
        """Return how often the engine was asked to pause."""
        return self.process.heard(f"POST {self.pause_path}")

    def bring_down(self, job, place):
        """Do to the engine what no follower would have let through to it; the test ends the engine after that."""

    def read_stream(self, path, body, begun=None):
        """Send a request and read its events; return the last one. `begun` is set when three have come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=LIMIT)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            received, last = 0, ""
            while line := response.readline():
                if line.startswith(b"data: {"):
                    received, last = received + 1, line.decode()
                if begun is not None and received == 3:
                    begun.set()
            return json.loads(last.removeprefix("data: "))
        finally:
            connection.close()


class RealJob:
    """A job with a real daemon that ticks in a thread, and versions of the tiny model."""

    def __init__(self, root):
        self.root = str(root)
        os.makedirs(self.root)
        self.job = Job.at(self.root)
        self.daemon, self.heard, _ = start(self.job, SystemClock(), rewind_settle=0.0, trash_grace=0.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def _tick(self):
        while not self._stop.wait(0.05):
            self.daemon.tick(woken=True)

    def publish(self, step, *, shards=2, change=None):
        """Publish the version of a step; its seed is that of generation 1."""
        source = small_qwen.write_shards(f"{self.root}-sources/{step}", seed_of((1, step)), shards, change)
        publish_directory(self.job, step, source)
        awaited(lambda: self.published() == step)

    def label(self, step):
        """Return what engines are told of the version of a step."""
        return engine_label((1, step), read_manifest(self.job.disk, self.job.step(step)).digest)

    def published(self):
        version = read_version(self.job)
        return version and version.step

    def shard(self, step, number):
        actor = f"{self.job.step(step)}/actor"
        return (
            f"{actor}/{sorted(name for name in os.listdir(actor) if name.endswith('.safetensors'))[number]}"
        )

    def follower(self, hook, identity="e0", **options):
        chosen = {"poll": 0.02, "backoff": 0.2, "check_every": 0.5, "stay": True, **options}
        return Follower.open(self.root, hook, identity, FollowOptions(**chosen))

    def close(self):
        self._stop.set()
        self._thread.join(30)
        self.daemon.close()


class Clients:
    """Clients that ask for long answers all the time, each with a prompt of its own, and read them as they come."""

    def __init__(self, stream, count=8):
        self._stream = stream
        self._stop = threading.Event()
        self.answered = 0
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._all = [self._pool.submit(self._ask, seed) for seed in range(count)]

    def _ask(self, seed):
        chance = random.Random(seed)
        while not self._stop.is_set():
            prompt = [chance.randrange(10, 500) for _ in range(chance.randrange(5, 80))]
            wanted = chance.randrange(20, 120)
            assert self._stream(prompt, wanted) == wanted
            with self._lock:
                self.answered += 1

    def finish(self):
        """Let every client end its request; raise what any of them met."""
        self._stop.set()
        for one in self._all:
            one.result(LIMIT)
        self._pool.shutdown()
        return self.answered


def awaited(condition, limit=LIMIT, every=0.05):
    """Wait until something holds."""
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(every)


def applied_next(follower, pair, limit=LIMIT):
    """Take turns until a version is applied; return its outcome."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        outcome = follower.turn(5.0)
        if outcome.kind == "applied" and outcome.pair == pair:
            return outcome
        assert outcome.kind in {"nothing", "applied"}, outcome
    raise AssertionError(f"{pair} was not applied")


def cut_off(job, step):
    """Take the last bytes of a shard away."""
    path = job.shard(step, 1)
    os.truncate(path, os.path.getsize(path) - 100)


def taken_away(job, step):
    """Remove a shard."""
    os.remove(job.shard(step, 1))


def killed_before_resume(job, hook, address):
    """Let a follower load a version and be killed before it resumes the engine; return how it ended."""
    program = f"{os.path.dirname(__file__)}/dying_follower.py"
    env = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(
        [sys.executable, program, job.root, hook, address], env=env, timeout=300, check=False
    ).returncode
