"""`explorer` as a process, which is started again as often as it is killed."""

import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from support.cli import environment
from support.gateway_bed import GatewayDriver

MINUTES = 200.0
"""A bound that only a failing test reaches; on a busy machine importing transformers alone takes a minute."""


class ServedProcess:
    """A verb of `explorer` under the name e0."""

    def __init__(self, file, verb="serve"):
        self.file, self.verb, self.directory = file, verb, file.parent / "state"
        self.start()

    @property
    def url(self):
        """Return where `explorer serve` answers, as the file says."""
        return f"http://{self.file.read_text().split('listen = ')[1].strip()[1:-1]}"

    def start(self):
        program = "from explorer_hooks.cli.main import main; main()"
        command = [sys.executable, "-c", program, self.verb, str(self.file), "--name", "e0"]
        self.process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        self.said = []
        self.reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self.reader.start()

    def _read(self, stream):
        with stream:
            self.said.extend(stream)

    def await_answer(self):
        patiently(lambda: urllib.request.urlopen(f"{self.url}/health", timeout=5).close())
        return GatewayDriver(self.url, (self.directory / "token").read_text())

    def wait(self):
        code = self.process.wait(MINUTES)
        self.reader.join(MINUTES)
        return code

    def kill(self):
        self.process.kill()
        assert self.wait() == -signal.SIGKILL

    def end(self):
        self.process.kill()
        self.wait()


def patiently(call):
    """Return what a call returns once somebody listens; an answer that is an error will do for being there."""
    end = time.monotonic() + MINUTES
    while True:
        try:
            return call()
        except urllib.error.HTTPError:
            return None
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
