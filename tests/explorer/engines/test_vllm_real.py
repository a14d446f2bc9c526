"""Real vLLM on the CPU: what it answers after each load is compared with transformers, never with a status code."""

import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
from typing import ClassVar

import pytest
import tiny_model
from engine_process import ROOT, EngineProcess, python_of
from hook_contract import HookContract
from real_bed import CLOSE, LIMIT, Clients, RealBed, RealJob, applied_next, asked, awaited, seed_of, told
from targets import target_of

from explorer_hooks.base import Running
from explorer_hooks.errors import EngineDeadError, LoadFailedError
from explorer_hooks.hooks.vllm import VllmHook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = [
    "--served-model-name", "policy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
    "--max-num-seqs", "16", "--block-size", "32", "--host", "127.0.0.1", "--port", "{port}",
]  # fmt: skip


def vllm(python, model, log, *flags, **env):
    # The command `vllm` looks for a package of this name, and the CPU build has another.
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return EngineProcess([python, *module, *FLAGS, *flags], {**ENV, **env}, log)


class VllmRealBed(RealBed):
    hook_type = VllmHook
    cannot: ClassVar = {
        "fail_commit": "nothing makes real vLLM fail there at will",
        "gone": "a start takes a minute: test_a_restarted_engine_comes_to_the_newest_version has it",
        "restart": "a start takes a minute: test_a_restarted_engine_comes_to_the_newest_version has it",
    }

    def __enter__(self):
        address = self.process.address
        told(address, "/pause?mode=abort", {})
        kwargs = {"weights_path": self.start_directory}
        told(address, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        told(address, "/reset_prefix_cache", {})
        told(address, "/update_weight_version", {"new_version": "default"})
        told(address, "/resume", {})
        return self

    def answer(self, prompt, count=8):
        choice = self.completed(prompt, count, logprobs=1, return_token_ids=True)
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def completed(self, prompt, count, model="policy", **more):
        body = {"model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0}
        return told(self.process.address, "/v1/completions", {**body, **more})["choices"][0]

    def stream(self, prompt, count, model="policy", begun=None):
        """Ask for an answer and read it token by token; return how many came."""
        body = {"model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=LIMIT)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            received, last = 0, ""
            while line := response.readline():
                received += line.startswith(b"data: {")
                last = line.decode() if line.startswith(b"data: {") else last
                if begun is not None and received == 3:
                    begun.set()
            return json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"]
        finally:
            connection.close()

    def is_paused(self):
        return asked(self.process.address, "GET", "/is_paused")[1]["is_paused"]

    def label(self):
        return asked(self.process.address, "GET", "/weight_info")[1]["weight_version"]

    def fail_load(self, target):
        """Take the directory away: of all failures the one that real vLLM comes back from."""
        import shutil

        shutil.rmtree(target.path)

    def pause(self):
        told(self.process.address, "/pause?mode=keep", {})


@pytest.fixture(scope="module")
def python():
    return python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")


@pytest.fixture(scope="module")
def start_directory(tmp_path_factory):
    return tiny_model.write_model(str(tmp_path_factory.mktemp("start")))


@pytest.fixture(scope="module")
def engine(python, start_directory, tmp_path_factory):
    engine = vllm(python, start_directory, tmp_path_factory.mktemp("vllm") / "log")
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
def bed(engine, tmp_path, start_directory):
    with VllmRealBed(engine, tmp_path, start_directory) as bed:
        yield bed


@pytest.fixture
def job(tmp_path):
    job = RealJob(tmp_path / "job")
    yield job
    job.close()


class TestContract(HookContract):
    @pytest.fixture
    def bed(self, engine, tmp_path, start_directory):
        bed = VllmRealBed(engine, tmp_path, start_directory)
        bed.timeout = 20.0
        with bed:
            yield bed


def test_twenty_versions_while_clients_stream(bed, job, record_line):
    timings, distances = [], []
    clients = Clients(bed.stream)
    with job.follower(bed.open()) as follower:
        for step in range(1, 21):
            job.publish(step)
            timings.append(applied_next(follower, (1, step)).timings)
            seed = seed_of((1, step))
            assert bed.label() == f"1.{step}"
            assert follower.applied == (1, step)
            # The first prompt is the same for every version: stale blocks of the prefix cache would show.
            distances.append(bed.distance(seed))
            distances.append(bed.distance(seed, [step + 20] * 70))
        answered = clients.finish()
    assert max(distances) < CLOSE
    assert answered >= 8
    load = [1e3 * one["load"] for one in timings]
    record_line(
        f"vLLM: 20 versions under 8 streams, {answered} requests all complete, log-probs within "
        f"{max(distances):.1e} nats; pause to resume ms median {statistics.median(load):.0f} max {max(load):.0f}"
    )
    record_line(f"vLLM: seconds of the last load: {json.dumps(dict(timings[-1]))}")
    record_line(f"vLLM: started in {bed.process.started_in:.0f} s")


def test_a_stale_cache_would_have_been_seen(bed):
    """The check is worth something: without a reset the same prompt is answered with the old keys and values."""
    target = bed.target((1, 10))
    assert bed.runs(None)
    kwargs = {"weights_path": target.path}
    told(bed.process.address, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
    assert not bed.runs(target)
    told(bed.process.address, "/reset_prefix_cache", {})
    assert bed.runs(target)


def cut_off(job, step):
    path = job.shard(step, 1)
    os.truncate(path, os.path.getsize(path) - 100)


def taken_away(job, step):
    os.remove(job.shard(step, 1))


@pytest.mark.parametrize("damage", [cut_off, taken_away])
def test_a_damaged_shard_is_refused_before_the_engine_is_touched(bed, job, damage):
    job.publish(1)
    with job.follower(bed.open(), retries=0) as follower:
        applied_next(follower, (1, 1))
        pauses = bed.process.heard("POST /pause")
        job.publish(2)
        damage(job, 2)
        outcome = follower.turn(LIMIT)
        assert (outcome.kind, outcome.pair) == ("refused", (1, 2))
        assert bed.process.heard("POST /pause") == pauses
        assert bed.distance(seed_of((1, 1))) < CLOSE
        job.publish(3)
        applied_next(follower, (1, 3))
        assert bed.distance(seed_of((1, 3))) < CLOSE


def wrong_shape(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:100].contiguous()


def without_a_tensor(tensors):
    del tensors["model.layers.1.mlp.down_proj.weight"]


@pytest.mark.parametrize("change", [wrong_shape, without_a_tensor])
@pytest.mark.parametrize("first", [True, False])
def test_a_version_of_another_model_is_refused_before_the_engine_is_touched(bed, job, change, first):
    with job.follower(bed.open(), retries=0) as follower:
        if not first:
            job.publish(1)
            applied_next(follower, (1, 1))
        pauses = bed.process.heard("POST /pause")
        job.publish(2, change=change)
        outcome = follower.turn(LIMIT)
        assert (outcome.kind, outcome.pair) == ("refused", (1, 2))
        assert bed.process.heard("POST /pause") == pauses
        assert bed.distance(0 if first else seed_of((1, 1))) < CLOSE


def test_a_follower_killed_between_pause_and_resume_is_succeeded_by_one_that_brings_the_engine_back(bed, job):
    answered, begun = [], threading.Event()
    client = threading.Thread(target=lambda: answered.append(bed.stream([7] * 20, 400, begun=begun)))
    job.publish(1)
    client.start()
    assert begun.wait(LIMIT)
    program = f"{os.path.dirname(__file__)}/dying_follower.py"
    env = {**os.environ, "PYTHONPATH": ROOT}
    died = subprocess.run(
        [sys.executable, program, job.root, "vllm", bed.process.address], env=env, timeout=300, check=False
    )
    assert died.returncode == -9
    assert bed.is_paused()
    job.publish(2)
    with job.follower(bed.open()) as follower:
        applied_next(follower, (1, 2))
        assert not bed.is_paused()
        assert bed.distance(seed_of((1, 2))) < CLOSE
    client.join(LIMIT)
    assert answered == [400]


def test_a_restarted_engine_comes_to_the_newest_version_before_it_takes_work(bed, job, tmp_path, record_line):
    """The engine is brought to its end by a shape that no follower would have let through to it."""
    ready = tmp_path / "ready"
    job.publish(1)
    with job.follower(bed.open(), ready_file=str(ready)) as follower:
        applied_next(follower, (1, 1))
        assert ready.read_text().split() == ["1.1"]
        hook = bed.open()
        good = target_of(f"{job.job.step(1)}/actor", (1, 1))
        wrong = target_of(tiny_model.write_shards(str(tmp_path / "wrong"), 5, 2, wrong_shape), (1, 9))
        with pytest.raises(LoadFailedError):
            hook.load(wrong)
        with pytest.raises(EngineDeadError) as error:
            hook.abort(good)
        assert "restart" in error.value.hint
        assert hook.current_version() == Running("1.1", paused=True)
        record_line(f"vLLM: a wrong shape: {str(error.value)[:200]}")
        bed.process.kill()
        outcome = follower.turn(5.0)
        assert outcome.kind == "unreachable"
        assert not ready.exists()
        assert not follower.may_work()
        job.publish(2)
        bed.process.start()
        awaited(lambda: follower.turn(1.0).kind == "applied" or follower.applied == (1, 2))
        assert bed.label() == "1.2"
        assert bed.distance(seed_of((1, 2))) < CLOSE
        assert ready.read_text().split() == ["1.2"]
        assert follower.may_work()
