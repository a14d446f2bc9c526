"""How hooks read the checksums that vLLM and SGLang give of their parameters.

vLLM 0.32.0 answers `/weight_checker` with the SHA-256 of each parameter, SGLang 0.5.23 `/weights_checker` with a hash
of each parameter and buffer; both of every worker of every data-parallel replica. The engine answers no request
meanwhile.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from explorer_hooks.hook import Checksums
from explorer_hooks.http_client import HttpClient
from explorer_hooks.strict_json import member, typed
from syncd.errors import ConfigError, LoadFailedError

VLLM, SGLANG = "/weight_checker", "/weights_checker"

_ASKED = {"action": "checksum"}
_OF_NOTHING = hashlib.sha256().hexdigest()
"""What vLLM gives for a parameter that its kernels have packed into another form: it is empty."""

_Found = Iterator[tuple[str, str, str]]
"""Replica, parameter with its worker, checksum."""


def vllm_checksums(server: HttpClient) -> Checksums | None:
    return _checksums(server, VLLM, _by_vllm)


def sglang_checksums(server: HttpClient) -> Checksums | None:
    return _checksums(server, SGLANG, _by_sglang)


def _checksums(server: HttpClient, path: str, read: Any) -> Checksums | None:
    try:
        reply = server.post_raw(path, _ASKED)
        checksums: dict[str, dict[str, str]] = {}
        for replica, parameter, checksum in read({} if reply.is_error else reply.json):
            if checksums.setdefault(replica, {}).setdefault(parameter, checksum) != checksum:
                return None  # two workers of one name: which of them a checksum is of is not known
    except (ConfigError, LoadFailedError, ValueError):
        return None
    return checksums or None


def _by_vllm(answer: object) -> _Found:
    """Read `{"checksums": {"dp0:pp0:pcp0:tp0:NAME": SHA-256}}`."""
    for key, checksum in member(answer, "checksums", dict).items():
        replica, _, parameter = key.partition(":")
        yield replica, parameter, "" if checksum == _OF_NOTHING else typed(checksum, str)


def _by_sglang(answer: object) -> _Found:
    """Read `{"ranks": [{"checksums": {NAME: HASH}, "parallelism_info": [{"dp_rank": 0, ...}]}]}`."""
    for at, worker in enumerate(member(answer, "ranks", list)):
        (parallelism, *_) = member(worker, "parallelism_info", list)
        replica = f"dp{member(parallelism, 'dp_rank', int)}"
        for name, checksum in member(worker, "checksums", dict).items():
            yield replica, f"worker{at}:{name}", typed(checksum, str)
