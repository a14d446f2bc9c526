"""torchrun's elastic restarts: when a node is lost, the other one goes on from the last full checkpoint.

`make test-faults` runs it. In `make test`, test_resharding.py has ranks that come and go.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from support.checker import sealed
from support.job_file import tiny_job, write_job
from support.ports import free_port
from support.trainers import ENVIRONMENT, write_experiences

pytestmark = [pytest.mark.group("kills"), pytest.mark.slow, pytest.mark.timeout(900)]

_LONG = 600.0
STEPS = 40


class Node:
    """One of at most two nodes: torchrun's agent and its rank.

    Args:
        place: Where its log is.
        name: Its name; the node `first` has the store where nodes meet, and must not be lost.
        port: The port of that store.
        config: The job's file.
    """

    def __init__(self, place, name, port, config):
        self.path = place / f"{name}.log"
        settings = f"is_host={int(name == 'first')},last_call_timeout=15,keep_alive_interval=1"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
            "--max-restarts", "2", "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-id", "job",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", settings, "-m", "trainer", "train", config,
        ]  # fmt: skip
        with open(self.path, "wb") as log:
            self.agent = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log)

    @property
    def log(self):
        return self.path.read_text(errors="replace")

    def lose(self):
        """Kill all that runs on the node."""
        children = subprocess.run(
            ["pgrep", "-P", str(self.agent.pid)], capture_output=True, text=True, check=False
        )
        for pid in (self.agent.pid, *map(int, children.stdout.split())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agent.wait(_LONG)


def world_size(job, step):
    """Return the number of ranks that saved a full checkpoint, None if there is none."""
    try:
        with open(f"{job}/global_step_{step}/training/trainer.json", encoding="ascii") as file:
            return json.load(file)["world_size"]
    except FileNotFoundError:
        return None


@pytest.mark.skipif(
    int(os.environ.get("SYNCD_KILLS", "2")) < 50, reason="half a minute of processor time: make test-faults"
)
def test_a_run_goes_on_with_fewer_ranks_when_torchrun_loses_a_node(tmp_path):
    job = tmp_path / "job"
    job.mkdir()
    write_experiences(job, STEPS + 4)
    config = tmp_path / "job.toml"
    own = {"engine": {"options": {"pause": 0.3}}, "sync": {"save_timeout": 30.0}}
    write_job(config, tiny_job(job, trainer={"total_steps": STEPS, "save_interval": 3}, **own))
    port = free_port()
    nodes = [Node(tmp_path, name, port, config) for name in ("first", "second")]
    try:
        end = time.monotonic() + _LONG
        while not os.path.exists(job / "global_step_6" / ".full_checkpoint"):
            assert time.monotonic() < end, nodes[0].log
            assert nodes[0].agent.poll() is None, nodes[0].log
            time.sleep(0.05)
        nodes[1].lose()
        assert nodes[0].agent.wait(_LONG) == 0, nodes[0].log
    finally:
        for node in nodes:
            node.lose()
    assert world_size(job, 6) == 2
    assert world_size(job, STEPS) == 1
    resumed = [json.loads(line) for line in nodes[0].log.splitlines() if '"training_resumed"' in line]
    assert [line["step"] % 3 for line in resumed] == [0]
    assert resumed[0]["step"] >= 6
    assert max(sealed(str(job))) == STEPS
