"""What tests of the broadcast begin from."""

import pytest
from support.broadcasts import Processes
from support.job_fixtures import explorer, trainer, world

__all__ = ["explorer", "processes", "trainer", "world"]


@pytest.fixture
def processes(tmp_path):
    """Processes over a job that a daemon leads already."""
    made = Processes(tmp_path / "job")
    made.daemon()
    yield made
    made.shut()
