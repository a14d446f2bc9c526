"""What tests of the broadcast begin from."""

import pytest
from support.broadcasts import ENVIRONMENT, Processes
from support.job_fixtures import explorer, trainer, world
from support.nursery import Nursery

__all__ = ["explorer", "nursery", "processes", "trainer", "world"]


@pytest.fixture(scope="session")
def nursery():
    made = Nursery(ENVIRONMENT)
    yield made
    made.close()


@pytest.fixture
def processes(tmp_path, nursery):
    """Processes over a job that a daemon leads already."""
    made = Processes(tmp_path / "job", nursery)
    made.daemon()
    yield made
    made.shut()
