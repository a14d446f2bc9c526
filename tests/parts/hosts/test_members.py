"""The list of hosts and the token: written by the leader, read by all, and of no harm when they are damaged."""

import errno
import os
from dataclasses import replace

import pytest
from support.jobs import explorer, start

from syncd.config import load
from syncd.errors import ConfigError
from syncd.parts.hosts.duty import PART
from syncd.parts.hosts.members import (
    MEMBERS,
    TOKEN,
    is_address,
    members_of,
    new_token,
    read_members,
    read_token,
)
from syncd.parts.hosts.reader import split_address
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import LocalDisk
from syncd.protocol.presence import Presence


@pytest.fixture
def led(tmp_path):
    job = Job.at(tmp_path)
    daemon, _, clock = start(job)
    daemon.tick(woken=True)
    return job, daemon, clock, PART.open(job, clock, daemon.leader, None)


def tick(daemon, clock, duty):
    clock.sleep(6)
    daemon.tick()
    return duty.act(daemon.snapshot, None)


def test_the_leader_lists_the_hosts_that_give_pieces_and_makes_the_token_once(led):
    job, daemon, clock, duty = led
    explorer(job, clock, "e0", info={"peer": "10.0.0.2:7410"})
    explorer(job, clock, "e1", info={"peer": "10.0.0.1:7410"})
    explorer(job, clock, "e2", info={"peer": "10.0.0.1:7410"})  # the same host
    explorer(job, clock, "e3")
    tick(daemon, clock, duty)
    assert read_members(job) == ["10.0.0.1:7410", "10.0.0.2:7410"]
    token = read_token(job)
    assert len(token) == 64
    explorer(job, clock, "e4", info={"peer": "10.0.0.3:7410"})
    tick(daemon, clock, duty)
    assert len(read_members(job)) == 3
    assert read_token(job) == token


class StaleDisk(LocalDisk):
    """Cannot read the token while it is stale."""

    is_stale = False

    def read(self, path, *limit):
        if self.is_stale and path.endswith(TOKEN):
            raise OSError(errno.EIO, "Input/output error")
        return super().read(path, *limit)


def test_a_token_that_cannot_be_read_for_a_while_stays_the_token(led):
    job, daemon, clock, _ = led
    disk = StaleDisk()
    duty = PART.open(replace(job, disk=disk), clock, daemon.leader, None)
    explorer(job, clock, "e0", info={"peer": "10.0.0.2:7410"})
    tick(daemon, clock, duty)
    token = read_token(job)
    explorer(job, clock, "e1", info={"peer": "10.0.0.1:7410"})
    disk.is_stale = True
    tick(daemon, clock, duty)
    assert read_token(job) == token
    disk.is_stale = False
    tick(daemon, clock, duty)
    assert read_token(job) == token
    assert len(read_members(job)) == 2


@pytest.mark.parametrize("damage", [b"", b"half"])
def test_the_leader_replaces_a_token_that_is_missing_or_damaged(led, damage):
    job, daemon, clock, duty = led
    for number, name in enumerate(("e0", "e1")):
        explorer(job, clock, name, info={"peer": f"10.0.0.{number}:7410"})
        if damage and number:
            job.disk.replace(f"{job.state}/{TOKEN}", damage)
        elif number:
            os.unlink(f"{job.state}/{TOKEN}")
        tick(daemon, clock, duty)
        assert read_token(job) is not None


def test_without_hosts_that_give_pieces_nothing_is_written(led):
    job, daemon, clock, duty = led
    explorer(job, clock, "e0")
    tick(daemon, clock, duty)
    assert read_members(job) == []
    assert read_token(job) is None


def test_a_leader_that_has_been_replaced_writes_no_list(led):
    job, daemon, clock, duty = led
    explorer(job, clock, "e0", info={"peer": "10.0.0.2:7410"})
    daemon.close()
    duty.act(daemon.snapshot, None)
    assert read_members(job) == []


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"protocol": 1, "members": 3}', b'{"protocol": 1, "members": ["../x", "a:1"]}']
)
def test_a_damaged_list_names_no_host_that_is_none(tmp_path, text):
    job = Job.at(tmp_path)
    job.disk.make_directory(job.state)
    job.disk.replace(f"{job.state}/{MEMBERS}", text)
    assert read_members(job) in ([], ["a:1"])


def test_a_token_is_read_whole_or_not_at_all(tmp_path):
    job = Job.at(tmp_path)
    job.disk.make_directory(job.state)
    job.disk.replace(f"{job.state}/{TOKEN}", new_token()[:-9])
    assert read_token(job) is None
    job.disk.replace(f"{job.state}/{TOKEN}", token := new_token())
    assert read_token(job) == token.decode().strip()


@pytest.mark.parametrize("value", [None, 3, "", "host", "host:port", "http://h:1/", "h:1\n", ["h:1"]])
def test_what_is_no_address_is_in_no_list(value):
    assert not is_address(value)
    assert members_of([Presence("e0", info={"peer": value})]) == []


def test_an_address_without_a_host_is_that_of_this_host(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert split_address(":7410") == ("node7", 7410)
    assert split_address("[::1]:7410") == ("::1", 7410)


def test_the_daemon_has_no_table_for_hosts():
    with pytest.raises(ConfigError, match="unknown key 'hosts'"):
        load(None, {"hosts": {"port": 1}})


def test_the_daemon_lists_followers_with_peers_and_they_read_together(fleet):
    fleet.whole(1)
    hosts = fleet.add(2)
    fleet.daemon._scanner._modules._read_at = float("-inf")  # presences are read every few seconds
    fleet.daemon.tick()
    assert read_members(fleet.job) == sorted(host.reader.address for host in hosts)
    fleet.fetch_all()
    assert {host.held.shown_source for host in hosts} == {"peers"}
