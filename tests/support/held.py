"""The threads and open files of this process.

A count is no test of a leak: what an earlier test of this process left may end in between. A test compares sets.
"""

import os
import threading


def held() -> set[object]:
    """Each thread that runs, and each descriptor with what it is open on."""
    return {*threading.enumerate(), *_descriptors()}


def _descriptors() -> set[tuple[str, str]]:
    names = os.listdir("/proc/self/fd")
    return {(name, link) for name in names if (link := _link(name))}


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # that of the listing itself
        return ""
