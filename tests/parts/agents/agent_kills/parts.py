"""The processes of a run: forked from this one, which has imported what they need, so that they start at once."""

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
import urllib.request

import torch
from agent_kills.driver import AGENT, PatientDriver
from agent_kills.engine import NumberedEngine
from safetensors.torch import save_file
from support.chat_model import END, make_tokenizer
from support.job_file import job_of, write_job
from support.synchronizers import Threads, World

from explorer_hooks.cli.main import run as command_line
from explorer_hooks.parts.agents import journal
from syncd.synchronizer import Synchronizer

SIZE = 4
WORKERS = 8
GROWN = 1 << 18
"""Bytes by which a journal grows until it is rewritten, so that it often is."""


def write_model(directory):
    """Write a model directory that has a tokenizer, and the two parameters of the fake engine."""
    os.mkdir(directory)
    make_tokenizer().save_pretrained(directory)
    save_file(weights(0), f"{directory}/model.safetensors")
    for name, said in (("config", {"model_type": "qwen2"}), ("generation_config", {"eos_token_id": [END]})):
        with open(f"{directory}/{name}.json", "w") as file:
            json.dump(said, file)


def weights(step):
    """Return the parameters of a step."""
    return {name: torch.full((4,), float(step)) for name in ("model.a", "model.b")}


class Forked:
    """A process that runs a function; it is started again as often as it is killed.

    Args:
        main: The function; what it returns is the exit code.
        log: Where its output goes.
    """

    def __init__(self, main, log):
        self._main, self._log, self.code = main, log, None
        self.start()

    def start(self):
        self.code, self.pid = None, os.fork()
        if self.pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = self._run()
            os._exit(code)

    def _run(self):
        output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        try:
            return self._main() or 0
        except BaseException:
            traceback.print_exc()
            raise

    def has_ended(self):
        """Return whether it has ended; then `code` says how."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def end(self, number=signal.SIGKILL):
        """Send a signal, and wait."""
        if not self.has_ended():
            os.kill(self.pid, number)
        while not self.has_ended():
            time.sleep(0.002)
        return self.code

    def children(self):
        """Return the processes that it has started."""
        found = []
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{self.pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        return found


class Parts:
    """A job with a daemon and a trainer, an engine, an explorer, and a driver if the explorer only serves.

    Args:
        place: A directory.
        mode: `run` or `serve`.
        groups: Groups that are played.
        seed: Of the engine's answers.
        port: A free port for the engine, and the next one for the gateway.
    """

    def __init__(self, place, mode, groups, seed, port):
        self.place, self.mode, self.seed, self.port = place, mode, seed, port
        self._groups = 2 if mode == "run" else 1
        self.tasks = [
            {"prompt": f"task {number}", "answer": "", "id": f"t{number}"} for number in range(groups)
        ]
        os.environ["SAID"] = os.path.join(place, "said")
        for name in ("job", "said"):
            os.mkdir(os.path.join(place, name))
        self._write_files()
        self.world = Forked(self._run_world, self._path("world.log"))
        self.engine = Forked(self._run_engine, self._path("engine.log"))
        self.explorer = Forked(self._run_explorer, self._path("explorer.log"))
        self.driver = Forked(self._run_driver, self._path("driver.log")) if mode == "serve" else None

    def _path(self, name):
        return os.path.join(self.place, name)

    @property
    def journal(self):
        return self._path("state/journal.jsonl")

    def written(self):
        """Return how many rollouts are in batches."""
        with contextlib.suppress(FileNotFoundError):
            return SIZE * self._groups * len(os.listdir(self._path("job/experiences/e0")))
        return 0

    @property
    def gateway(self):
        return f"http://127.0.0.1:{self.port + 1}"

    @property
    def player(self):
        """Return the process whose children are the agents."""
        return self.driver or self.explorer

    def finish(self):
        """Let an explorer that only serves write what is whole, as long as it gets on, and tell it to stop."""
        end, least = time.monotonic() + 60, len(self.tasks)
        while self.driver is not None and (left := self._open_groups()) and time.monotonic() < end:
            if left < least:
                end, least = time.monotonic() + 60, left
            time.sleep(0.05)
        if self.driver is not None:
            self.explorer.end(signal.SIGTERM)

    def _open_groups(self):
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.gateway}/health", timeout=5) as reply,
        ):
            return json.load(reply)["groups"]
        return 1

    def end(self):
        """End what still runs."""
        for part in (self.driver, self.explorer, self.engine, self.world):
            if part is not None:
                part.end()

    def _run_world(self):
        """Run the daemon, and publish a version each second, until this process is killed."""
        world = World(self._path("job"), Threads())
        world.run()
        with Synchronizer.open(world.root, "trainer", timeout=60) as trainer:
            for step in range(1, 1 << 30):
                trainer.set_model_state_dict(weights(step), step)
                select.select([], [], [], 1.0)

    def _run_engine(self):
        NumberedEngine.started_from, NumberedEngine.port = self._path("model"), self.port
        NumberedEngine(self._path("answers.jsonl"), self.seed)
        signal.pause()

    def _run_explorer(self):
        os.environ.pop("PATIENCE", None)
        journal._GROWN = GROWN
        return command_line([self.mode, self._path("job.toml"), "--name", "e0"])

    def _run_driver(self):
        os.environ["PATIENCE"] = "100"
        PatientDriver(self.gateway, self._path("state/token"), SIZE).play_all(self.tasks, WORKERS)

    def _write_files(self):
        with open(self._path("tasks.jsonl"), "w") as file:
            file.writelines(json.dumps(task) + "\n" for task in self.tasks)
        explorer = {
            "tasks": "tasks.jsonl",
            "epochs": 1,
            "ahead": 1_000_000,
            "engine": {"kind": "vllm", "address": f"http://127.0.0.1:{self.port}"},
            "sampling": {"max_tokens": 256, "max_prompt_tokens": 8192},
            "gateway": {"directory": "state", "listen": f"127.0.0.1:{self.port + 1}"},
        }
        if self.mode == "run":
            told = {"reward_range": [0, 99], "pass_env": ["SAID"]}
            explorer["agent"] = told | {"command": " ".join(AGENT), "concurrency": WORKERS, "retries": 3}
        data = {"groups": self._groups, "group_size": SIZE}
        write_job(self._path("job.toml"), job_of(data=data, sync={"timeout": 600}, explorer=explorer))
