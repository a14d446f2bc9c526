"""Transient errors of a network file system are met by further attempts that are apart in time."""

import errno

import pytest

from syncd.protocol import local_disk


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that were made, without their time."""
    made = []
    monkeypatch.setattr(local_disk.time, "sleep", made.append)
    return made


def failing(times, number):
    """Return an operation that fails some times."""
    left = [OSError(number, "made to fail")] * times

    def operation():
        if left:
            raise left.pop()
        return "done"

    return operation


def test_a_stale_handle_is_met_by_attempts_that_wait_longer_and_longer(pauses):
    assert local_disk.again(failing(5, errno.ESTALE)) == "done"
    assert pauses == sorted(pauses)
    assert pauses[-1] > 0


def test_an_error_that_stays_is_raised_in_the_end(pauses):
    with pytest.raises(OSError, match="made to fail"):
        local_disk.again(failing(99, errno.ESTALE))
    assert len(pauses) < 10


def test_an_error_that_is_not_transient_is_raised_at_once(pauses):
    with pytest.raises(OSError, match="made to fail"):
        local_disk.again(failing(1, errno.EIO))
    assert pauses == []
