"""Which errors are of one file or directory, and what is told of them."""

import errno
import os

import pytest

from syncd.protocol.obstacle import obstacle_to_moving, obstacle_to_reading


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS, errno.ETIMEDOUT, errno.ENOENT, errno.ENOTCONN],
)
def test_errors_of_the_whole_file_system_are_not_obstacles(number):
    error = OSError(number, os.strerror(number), "/job/global_step_1")
    assert obstacle_to_reading(error, "/job") is None
    assert obstacle_to_moving(error, "/job") is None


def test_an_obstacle_names_path_owner_mode_and_a_command(tmp_path):
    made = tmp_path / "it is 1"
    made.mkdir(mode=0o750)
    obstacle = obstacle_to_reading(
        PermissionError(errno.EACCES, "Permission denied", str(made)), "/elsewhere"
    )
    assert obstacle.path == str(made)
    assert f"uid {os.getuid()}" in obstacle.owner
    assert obstacle.owner.endswith("mode 0750")
    assert obstacle.hint == f"sudo chmod -R a+rX '{made}'"
    assert str(obstacle).startswith(f"{made}: Permission denied for uid {os.geteuid()} (directory of ")


def test_an_obstacle_at_a_missing_path_has_no_owner():
    obstacle = obstacle_to_moving(OSError(errno.EBUSY, "Device or resource busy"), "/nowhere/1")
    assert (obstacle.path, obstacle.owner) == ("/nowhere/1", "")
    assert obstacle.hint == "findmnt /nowhere/1; sudo umount /nowhere/1"
