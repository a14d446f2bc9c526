"""The two ends of a mirror, in memory."""

import os

import pytest
from support.mirrors import Trainer

from syncd.protocol.layout import Job


@pytest.fixture
def place(shm):
    for name in ("job", "far"):
        os.mkdir(f"{shm}/{name}")
    return shm


@pytest.fixture
def trainer(place):
    return Trainer(Job.at(f"{place}/job"))


@pytest.fixture
def far(place):
    return Job.at(f"{place}/far")
