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


def test_a_stale_handle_is_retried_with_growing_pauses(pauses):
    assert local_disk.again(failing(5, errno.ESTALE)) == "done"
    assert pauses == sorted(pauses)
    assert pauses[-1] > 0


def test_a_lasting_stale_handle_is_raised_after_bounded_retries(pauses):
    with pytest.raises(OSError, match="made to fail"):
        local_disk.again(failing(99, errno.ESTALE))
    assert len(pauses) < 10


def test_other_errors_are_raised_without_a_retry(pauses):
    with pytest.raises(OSError, match="made to fail"):
        local_disk.again(failing(1, errno.EIO))
    assert pauses == []
