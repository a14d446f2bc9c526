"""moto as S3 in a process of its own, in its own environment: `make test-mirror` installs it."""

import contextlib
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT
from support.ports import free_port

SERVER = Path(os.environ.get("SYNCD_MOTO_SERVER", f"{ROOT}/.venv-moto/bin/moto_server"))
BUCKET = "weights"


def is_up(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running_s3(port: int = 0, log: str = os.devnull) -> Iterator[str]:
    """Yield the address of an S3 that has one bucket, and nothing in it.

    Args:
        log: The file that gets a line for each request.
    """
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    with open(log, "ab") as requests:
        server = subprocess.Popen([str(SERVER), "-p", str(port)], stdout=requests, stderr=requests)
    try:
        ends = time.monotonic() + 120
        while not is_up(url):
            assert time.monotonic() < ends
            assert server.poll() is None
            time.sleep(0.1)
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        yield url
    finally:
        server.kill()
        server.wait()


def refuse_keys(url: str, *, refused: bool) -> None:
    """Have it refuse every key from now on, or none."""
    body = b"0" if refused else b"1000000000"
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(f"{url}/moto-api/reset-auth", data=body, headers=headers)
    urllib.request.urlopen(request, timeout=10).close()


def environment_of(url: str) -> dict[str, str]:
    """Return what a process needs to reach it."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
