"""Real SGLang on the CPU, by the contract of hooks and by what transformers says that it must answer."""

import http.client
import json
import shutil
import statistics
import threading
from typing import ClassVar

import pytest
import small_qwen
from engine_process import EngineProcess, python_of
from hook_contract import HookContract
from real_bed import (
    CLOSE,
    LIMIT,
    Clients,
    RealBed,
    RealJob,
    applied_next,
    asked,
    awaited,
    cut_off,
    killed_before_resume,
    seed_of,
    taken_away,
    told,
)

from explorer_hooks.hooks.sglang import SGLangHook

PYTHON = python_of("SYNCD_SGLANG_PYTHON", ".venv-sglang/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENV = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
FLAGS = [
    "--served-model-name", "policy", "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--disable-overlap-schedule", "--mem-fraction-static", "0.3",
    "--max-total-tokens", "8192", "--skip-server-warmup", "--host", "127.0.0.1", "--port", "{port}",
]  # fmt: skip


class SglangRealBed(RealBed):
    hook_type = SGLangHook
    cannot: ClassVar = {
        "label before commit": "SGLang takes weights and version in one request",
        "fail_commit": "nothing makes real SGLang fail there at will",
        "gone": "a start takes a minute: test_a_restarted_engine_comes_to_the_newest_version has it",
        "restart": "a start takes a minute: test_a_restarted_engine_comes_to_the_newest_version has it",
    }

    def __enter__(self):
        told(self.process.address, "/pause_generation", {"mode": "abort"})
        body = {"model_path": self.start_directory, "weight_version": "default", "flush_cache": True}
        told(self.process.address, "/update_weights_from_disk", body)
        told(self.process.address, "/continue_generation", {})
        return self

    def answer(self, prompt, count=8):
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
            "return_logprob": True,
        }
        found = told(self.process.address, "/generate", body)["meta_info"]["output_token_logprobs"]
        return [one[1] for one in found], [one[0] for one in found]

    def stream(self, prompt, count, begun=None):
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 1, "max_new_tokens": count, "ignore_eos": True},
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=LIMIT)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/generate", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            received, last = 0, ""
            while line := response.readline():
                if line.startswith(b"data: {"):
                    received, last = received + 1, line.decode()
                if begun is not None and received == 3:
                    begun.set()
            return json.loads(last.removeprefix("data: "))["meta_info"]["completion_tokens"]
        finally:
            connection.close()

    def is_paused(self):
        return asked(self.process.address, "GET", "/ready")[0] == 503

    def label(self):
        return asked(self.process.address, "GET", "/model_info")[1]["weight_version"]

    def fail_load(self, target):
        """Take the directory away: of all failures the one that does not end real SGLang."""
        shutil.rmtree(target.path)

    def pause(self):
        told(self.process.address, "/pause_generation", {"mode": "retract"})


@pytest.fixture(scope="module")
def python():
    return PYTHON


@pytest.fixture(scope="module")
def start_directory(tmp_path_factory):
    return small_qwen.write_model(str(tmp_path_factory.mktemp("start")))


@pytest.fixture(scope="module")
def engine(python, start_directory, tmp_path_factory):
    argv = [python, "-m", "sglang.launch_server", "--model-path", start_directory, *FLAGS]
    engine = EngineProcess(argv, ENV, tmp_path_factory.mktemp("sglang") / "log", "/model_info")
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture
def bed(engine, tmp_path, start_directory):
    with SglangRealBed(engine, tmp_path, start_directory) as bed:
        yield bed


@pytest.fixture
def job(tmp_path):
    job = RealJob(tmp_path / "job")
    yield job
    job.close()


class TestContract(HookContract):
    @pytest.fixture
    def bed(self, engine, tmp_path, start_directory):
        bed = SglangRealBed(engine, tmp_path, start_directory)
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
            assert bed.label() == f"1.{step}"
            distances.append(bed.distance(seed_of((1, step))))
            distances.append(bed.distance(seed_of((1, step)), [step + 20] * 70))
        answered = clients.finish()
    assert max(distances) < CLOSE
    assert answered >= 8
    load = [1e3 * one["load"] for one in timings]
    record_line(
        f"SGLang: 20 versions under 8 streams, {answered} requests all complete, log-probs within "
        f"{max(distances):.1e} nats; pause to resume ms median {statistics.median(load):.0f} max {max(load):.0f}"
    )
    record_line(f"SGLang: seconds of the last load: {json.dumps(dict(timings[-1]))}")
    record_line(f"SGLang: started in {bed.process.started_in:.0f} s")


def wrong_shape(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:100].contiguous()


@pytest.mark.parametrize("first", [True, False])
def test_a_version_of_another_model_is_refused_before_the_engine_is_touched(bed, job, first):
    with job.follower(bed.open(), retries=0) as follower:
        if not first:
            job.publish(1)
            applied_next(follower, (1, 1))
        pauses = bed.process.heard("POST /pause_generation")
        job.publish(2, change=wrong_shape)
        assert follower.turn(LIMIT).kind == "refused"
        assert bed.process.heard("POST /pause_generation") == pauses
        assert bed.distance(0 if first else seed_of((1, 1))) < CLOSE


@pytest.mark.parametrize("damage", [cut_off, taken_away])
def test_a_damaged_shard_is_refused_before_the_engine_is_touched(bed, job, damage):
    job.publish(1)
    with job.follower(bed.open(), retries=0) as follower:
        applied_next(follower, (1, 1))
        pauses = bed.process.heard("POST /pause_generation")
        job.publish(2)
        damage(job, 2)
        outcome = follower.turn(LIMIT)
        assert (outcome.kind, outcome.pair) == ("refused", (1, 2))
        assert bed.process.heard("POST /pause_generation") == pauses
        assert bed.distance(seed_of((1, 1))) < CLOSE


def test_a_follower_killed_between_pause_and_resume_is_succeeded_by_one_that_brings_the_engine_back(bed, job):
    answered, begun = [], threading.Event()
    client = threading.Thread(target=lambda: answered.append(bed.stream([7] * 20, 400, begun=begun)))
    job.publish(1)
    client.start()
    assert begun.wait(LIMIT)
    assert killed_before_resume(job, "sglang", bed.process.address) == -9
    assert bed.is_paused()
    job.publish(2)
    with job.follower(bed.open()) as follower:
        applied_next(follower, (1, 2))
        assert not bed.is_paused()
        assert bed.distance(seed_of((1, 2))) < CLOSE
    client.join(LIMIT)
    assert answered == [400]


def test_a_restarted_engine_comes_to_the_newest_version(bed, job, tmp_path):
    ready = tmp_path / "ready"
    job.publish(1)
    with job.follower(bed.open(), ready_file=str(ready)) as follower:
        applied_next(follower, (1, 1))
        bed.process.kill()
        assert follower.turn(5.0).kind == "unreachable"
        assert not ready.exists()
        job.publish(2)
        bed.process.start()
        awaited(lambda: follower.turn(1.0).kind == "applied" or follower.applied == (1, 2))
        assert bed.label() == "1.2"
        assert bed.distance(seed_of((1, 2))) < CLOSE
        assert follower.may_work()
