"""Six followers and a daemon, each a process; two engines are a real vLLM: waves, a bad version, kill -9 of each."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import small_qwen
from support.engine_process import python_of
from support.proven import probe_of, write_version
from support.rolling_fleet import (
    LOAD,
    NAMES,
    TABLE,
    FleetOfProcesses,
    follow,
    follow_vllm,
    lead,
    process,
    read_log,
)
from support.vllm_process import vllm

from syncd.protocol.layout import Job
from syncd.protocol.probe import write_base_probe
from syncd.protocol.rolling import read_wave
from syncd.protocol.version import read_version

PYTHON = python_of("SYNCD_VLLM_PYTHON", ".venv-vllm/bin/python")
REAL = ("e0", "e1")
"""First by name, so canaries are chosen of these, which prove what they run; the stand-ins cannot."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class FleetWithVllm(FleetOfProcesses):
    limit = 600.0

    def __init__(self, root):
        start = small_qwen.write_model(str(root / "start"))
        self.engines = {name: vllm(PYTHON, start, root / f"{name}.log") for name in REAL}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda engine: engine.start(), self.engines.values()))
        (root / "job").mkdir()
        write_base_probe(Job.at(str(root / "job")), probe_of(small_qwen.model_of(0)), start)
        super().__init__(root)

    def follower(self, name):
        if name in REAL:
            return process(follow_vllm, self.root, name, self.log, self.engines[name].address)
        return process(follow, self.root, name, self.log, LOAD, self.stage, "")

    def publish(self, *, garbled=False):
        """Write a step; of a garbled one a tensor is not the one that its probe was made with."""
        self.step += 1
        model = small_qwen.model_of(self.step)
        write_version(self.job, self.step, model, probe_of(model), _garble if garbled else None)
        return self.step

    def close(self):
        super().close()
        for engine in self.engines.values():
            engine.kill()


def _garble(state):
    name = "model.layers.1.mlp.down_proj.weight"
    state[name] = state[name].flip(0).contiguous()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    made = FleetWithVllm(tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


def test_a_vllm_proves_a_version_before_the_others_load_it(fleet):
    fleet.until(lambda: set(fleet.running()) == set(NAMES), "all are there")
    for _ in range(2):
        step = fleet.publish()
        fleet.reaches((1, step))
        loads = [line for line in read_log(fleet.log) if (line["label"] or "").startswith(f"1.{step}.")]
        assert loads[0]["engine"] in REAL, loads
        assert [line["what"] for line in loads[:2]] == ["pause", "serve"], loads
    assert fleet.most_paused() <= TABLE["max_paused"]


def test_a_garbled_tensor_reaches_one_engine_of_six_and_that_vllm_goes_back(fleet):
    good, bad = fleet.step, fleet.publish(garbled=True)
    fleet.until(lambda: read_wave(fleet.job).phase == "stopped", "a canary stops it")
    fleet.until(lambda: read_version(fleet.job).quarantine, "it is in quarantine")
    time.sleep(2.0)
    assert len(fleet.loaders(bad)) == 1
    assert fleet.loaders(bad) < set(REAL)
    fleet.reaches((1, good))


def test_a_wave_goes_on_when_followers_a_vllm_and_the_daemon_are_killed(fleet):
    step = fleet.publish()
    fleet.until(
        lambda: _proven_by(fleet, step), "a canary has proven it: killed before, its engine gives it up"
    )
    canary, *_ = _proven_by(fleet, step)
    fleet.kill_daemon()
    fleet.daemon = process(lead, fleet.root, TABLE)
    fleet.kill(*set(REAL) - {canary})
    fleet.kill("e5")
    fleet.engines[canary].kill()
    fleet.killed.append((canary, time.monotonic()))
    fleet.engines[canary].start()
    fleet.reaches((1, step))
    assert fleet.most_paused() <= TABLE["max_paused"]


def _proven_by(fleet, step):
    """Return the real engines that serve a step, in the order in which they began."""
    served = [line for line in read_log(fleet.log) if line["what"] == "serve" and line["engine"] in REAL]
    return [line["engine"] for line in served if line["label"].startswith(f"1.{step}.")]
