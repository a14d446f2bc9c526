"""Which errors are of one file or directory, and what is told of them."""

import errno
import os

import pytest

from syncd.protocol.entry_problem import move_problem, read_problem


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EROFS, errno.ETIMEDOUT, errno.ENOENT, errno.ENOTCONN],
)
def test_errors_of_the_whole_file_system_are_not_entry_problems(number):
    error = OSError(number, os.strerror(number), "/job/global_step_1")
    assert read_problem(error, "/job") is None
    assert move_problem(error, "/job") is None


def test_an_entry_problem_names_path_owner_mode_and_a_command(tmp_path):
    made = tmp_path / "it is 1"
    made.mkdir(mode=0o750)
    entry_problem = read_problem(PermissionError(errno.EACCES, "Permission denied", str(made)), "/elsewhere")
    assert entry_problem.path == str(made)
    assert f"uid {os.getuid()}" in entry_problem.owner
    assert entry_problem.owner.endswith("mode 0750")
    assert entry_problem.hint == f"sudo chmod -R a+rX '{made}'"
    assert str(entry_problem).startswith(f"{made}: Permission denied for uid {os.geteuid()} (directory of ")


def test_an_entry_problem_at_a_missing_path_has_no_owner():
    entry_problem = move_problem(OSError(errno.EBUSY, "Device or resource busy"), "/nowhere/1")
    assert (entry_problem.path, entry_problem.owner) == ("/nowhere/1", "")
    assert entry_problem.hint == "findmnt /nowhere/1; sudo umount /nowhere/1"
