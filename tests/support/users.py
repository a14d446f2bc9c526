"""Other users than root, for tests that root runs."""

import contextlib
import os

DAEMON, OTHER = 54001, 54003


@contextlib.contextmanager
def as_user(uid):
    """Act as a user, without root's right to read and change everything."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
