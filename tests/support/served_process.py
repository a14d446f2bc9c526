"""`explorer` as a process, which is started again as often as it is killed."""

import signal
import time
import urllib.error
import urllib.request

from support import forked
from support.gateway_bed import GatewayDriver

MINUTES = 200.0
"""A bound that only a failing test reaches; on a busy machine importing transformers alone takes a minute."""


EXPLORER = ("-c", "from explorer_hooks.cli.main import main; main()")
"""The program `explorer`, as this interpreter runs it."""


class ServedProcess:
    """A verb of `explorer` under the name e0."""

    def __init__(self, file, verb="serve"):
        self.file, self.verb, self.directory = file, verb, file.parent / "state"
        self._starts = 0
        self.start()

    @property
    def url(self):
        """Return where `explorer serve` answers, as the file says."""
        return f"http://{self.file.read_text().split('listen = ')[1].strip()[1:-1]}"

    def start(self):
        self._starts += 1
        log = f"{self.file}.{self._starts}.log"
        self.process = forked.start(log, {}, *EXPLORER, self.verb, str(self.file), "--name", "e0")

    @property
    def said(self):
        """Return the lines that it has printed since it started."""
        return self.process.said().splitlines(keepends=True)

    def await_answer(self):
        patiently(lambda: urllib.request.urlopen(f"{self.url}/health", timeout=5).close())
        return GatewayDriver(self.url, (self.directory / "token").read_text())

    def wait(self):
        return self.process.wait(MINUTES)

    def kill(self):
        self.process.kill()
        assert self.wait() == -signal.SIGKILL

    def end(self):
        self.process.end()


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
