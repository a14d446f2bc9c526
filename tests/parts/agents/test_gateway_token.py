"""The gateway's token: what another user could have put there is no token."""

import os
import resource
import stat

import pytest

pytest.importorskip("starlette", reason="the gateway needs starlette")

from explorer_hooks.parts.agents.http_thread import own_token
from syncd.errors import ConfigError, StorageError

NOBODY = 65534


@pytest.fixture
def place(tmp_path):
    directory = tmp_path / "gateway"
    directory.mkdir(0o700)
    return directory


def test_a_token_is_made_once_and_readable_by_its_user_alone(place):
    token = own_token(str(place))
    assert token == own_token(str(place))
    assert len(token) >= 32
    assert stat.S_IMODE((place / "token").stat().st_mode) == 0o600


@pytest.mark.parametrize(("name", "mode"), [("token", 0o640), ("token", 0o602), ("", 0o777), ("", 0o770)])
def test_a_token_that_others_can_read_or_replace_is_refused(place, name, mode):
    own_token(str(place))
    (place / name).chmod(mode)
    with pytest.raises(ConfigError, match="the gateway's token"):
        own_token(str(place))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user: needs root")
@pytest.mark.parametrize("name", ["token", ""])
def test_a_token_of_another_user_is_refused(place, name):
    own_token(str(place))
    os.chown(place / name, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        own_token(str(place))


def test_a_disk_that_is_full_at_the_first_start_leaves_no_token(place):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(StorageError):
            own_token(str(place))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(own_token(str(place))) >= 32
    assert [one.name for one in place.iterdir()] == ["token"]
