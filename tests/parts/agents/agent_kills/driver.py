"""A driver of `explorer serve`: it starts an agent for each rollout, and begins another attempt if one dies."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.gateway_bed import GatewayDriver

ATTEMPTS = 4
PATIENCE = 120.0
AGENT = [sys.executable, "-I", "-S", str(Path(__file__).with_name("agent.py"))]


class PatientDriver:
    """Plays groups, whatever happens to the gateway meanwhile.

    Args:
        url: The gateway.
        token: A file with its token.
        size: Rollouts of a group.
    """

    def __init__(self, url, token, size):
        self._url, self._token, self._size = url, token, size

    def play_all(self, tasks, workers):
        """Play all tasks, so many rollouts at a time."""
        places = [
            (f"g{number}", task, rollout)
            for number, task in enumerate(tasks)
            for rollout in range(self._size)
        ]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda place: self._play(*place), places))

    def _play(self, group, task, rollout):
        for attempt in range(ATTEMPTS):
            place = {"group": group, "task": task["id"], "rollout": rollout, "attempt": attempt}
            status, told = self._post("/sessions", place)
            if status == 409:  # another rollout had the group dropped
                return
            done = subprocess.run(
                AGENT,
                env={
                    **os.environ,
                    "OPENAI_BASE_URL": told["base_url"],
                    "OPENAI_API_KEY": told["api_key"],
                    "SYNCD_TASK": json.dumps(task),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            if done.returncode == 0:
                said = json.loads(done.stdout.splitlines()[-1])
                body = {"reward": said["reward"], "info": {"session": said["session"]}}
                self._post(f"/s/{told['session']}/reward", body)
                return
        self._post(f"/groups/{group}/drop", {})

    def _post(self, path, body):
        """Return status and document of the gateway's answer; wait until it has one."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                found = GatewayDriver(self._url, Path(self._token).read_text()).post(path, body)
            except (OSError, ValueError, http.client.HTTPException):
                found = 0, {}
            if found[0] not in (0, 429, 503):
                assert found[0] in (200, 409), found
                return found
            time.sleep(0.05)
        raise TimeoutError(f"{path}: no answer for {PATIENCE:g} s")


def end_on_failure(thread_error):
    """Have a thread's error end the process: nobody would see it otherwise."""
    sys.__excepthook__(*thread_error[:3])
    os._exit(1)


threading.excepthook = end_on_failure
