"""The option and the key: off unless asked for, and refused where they cannot work."""

import pytest

from explorer_hooks.follower.policy import FollowOptions
from syncd.errors import ConfigError
from syncd.jobfile.explorer_sections import FollowSection
from syncd.transports.files.piece_reader import ORIGIN, open_reader


def test_hosts_are_off_unless_asked_for():
    assert FollowOptions().peers is None
    assert FollowSection().peers == ""


def test_peers_without_a_stage_are_refused():
    with pytest.raises(ConfigError) as error:
        FollowOptions(peers="10.0.0.7:7410")
    assert error.value.hint.startswith("--stage /dev/shm/syncd --peers HOST:PORT")


def test_a_reader_that_is_not_installed_is_refused():
    with pytest.raises(ConfigError) as error:
        open_reader("rdma=mlx5_0", lambda address: ORIGIN)
    assert "--peers HOST:PORT" in error.value.hint


def test_the_presence_and_the_status_say_where_bytes_came_from(fleet):
    fleet.whole(1)
    hosts = fleet.add(2)
    fleet.list()
    fleet.fetch_all()
    for host in hosts:
        info = host.client.own(None, "test").info
        assert info["peer"] == host.reader.address
        assert info["read"]["origin"] > 0
        assert info["read"]["peers"] > 0
