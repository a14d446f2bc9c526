"""Requests: asked, read in order, taken away."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory import memory_job

from syncd.protocol.documents import encode
from syncd.protocol.request import KINDS, Request, read_requests, remove_request, request_path, write_request

IDENTITIES = st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True)
REQUESTS = st.builds(
    Request,
    st.sampled_from(KINDS),
    st.integers(0, 10**15),
    IDENTITIES,
    st.text(),
    st.floats(0, 2e9),
    st.text(),
)


@given(st.lists(REQUESTS, unique_by=lambda request: request.identity, max_size=4))
def test_requests_are_read_in_the_order_of_asking(requests):
    job = memory_job()
    for request in requests:
        write_request(job, request)
    expected = sorted(requests, key=lambda request: (request.asked_at, request.identity))
    assert read_requests(job) == tuple(expected)


def test_every_request_has_a_unique_identity():
    assert Request("vacate", 1).identity != Request("vacate", 1).identity


def test_removing_a_request_is_idempotent():
    job = memory_job()
    request = Request("rollback", 7)
    write_request(job, request)
    remove_request(job, request.identity)
    remove_request(job, request.identity)
    assert read_requests(job) == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "delete"},
        {"kind": None},
        {"identity": "other"},
        {"step": -1},
        {"reason": 1},
        {"asked_at": None},
    ],
)
def test_invalid_requests_are_ignored(changes):
    job = memory_job()
    write_request(job, Request("vacate", 7, "good"))
    bad = {**asdict(Request("vacate", 7, "bad")), **changes}
    job.disk.files[request_path(job, "bad")] = encode(bad)
    job.disk.files[f"{job.requests}/notes.txt"] = job.disk.files[f"{job.requests}/..json"] = b"{}"
    assert [request.identity for request in read_requests(job)] == ["good"]


def test_a_request_without_digest_and_reason_is_read():
    job = memory_job()
    write_request(job, Request("vacate", 7, "r"))
    path = request_path(job, "r")
    document = json.loads(job.disk.files[path])
    del document["digest"], document["reason"]
    job.disk.files[path] = encode(document)
    assert read_requests(job) == (Request("vacate", 7, "r"),)
