"""Jobs and worlds that several files of tests begin from."""

import pytest

from support.browser import started_browser
from support.processes import busy_job, must, write_steps
from support.synchronizers import Loop, Threads, World


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """A job with step 1 announced."""
    job = str(tmp_path_factory.mktemp("one"))
    must(write_steps(job, 1, 1))
    return job


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A job with a bit of everything."""
    job = str(tmp_path_factory.mktemp("busy") / "job")
    busy_job(job)
    return job


@pytest.fixture(params=[Threads, Loop])
def world(request, tmp_path):
    """A job, its daemon, and synchronizers over threads and over asyncio."""
    made = World(tmp_path, request.param())
    yield made
    made.shut()


@pytest.fixture
def trainer(world):
    return world.open("trainer")


@pytest.fixture
def explorer(world):
    return world.open("explorer", "e0")


# Playwright runs an event loop in this thread until it ends, and with one asyncio.run() of other tests fails.
@pytest.fixture(scope="module")
def browser():
    """Return one browser for the tests of a file."""
    with started_browser() as started:
        yield started
