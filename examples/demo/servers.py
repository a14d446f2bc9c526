"""Real vLLM servers on this machine's CPU, one for each explorer of `make demo-vllm`."""

import contextlib
import http.client
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from processes import ROOT, FailedError, Processes

STARTING = 900.0
"""Seconds that all servers together may take to start; 30 to 90 each on an idle machine."""

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints that a follower needs
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def serving(
    processes: Processes, model: Path, names: Iterable[str], options: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Start a server for each name, one after the other, and yield name and address.

    Args:
        processes: Starts them.
        model: The model's directory.
        names: Names of explorers.
        options: Further options of each server.

    Raises:
        FailedError: There is no vLLM, or it did not start.
    """
    python = os.environ.get("SYNCD_VLLM_PYTHON", f"{ROOT}/.venv-vllm/bin/python")
    if not os.access(python, os.X_OK):
        raise FailedError(f"there is no {python}: run `make demo-vllm`, or set SYNCD_VLLM_PYTHON")
    for name in names:
        port = _free_port()
        server = f"vllm-{name}"
        processes.start(
            server, [*_command(python, model, port), *options], {**_ENVIRONMENT, "PYTHONPATH": ""}
        )
        processes.until(lambda port=port: _answers(port), STARTING, f"{server} to start")
        yield name, f"http://127.0.0.1:{port}"


def _command(python: str, model: Path, port: int) -> list[str]:
    options = {
        "model": str(model),
        "served-model-name": "policy",
        "dtype": "float32",
        "max-num-seqs": "64",
        "block-size": "32",
        "host": "127.0.0.1",
        "port": str(port),
    }
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: int = listener.getsockname()[1]
        return found


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    return False
