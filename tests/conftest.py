"""Fixtures, records and the Hypothesis profile that all tests share."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile

import pytest
from beds import probe

with contextlib.suppress(ImportError):  # the tests on a GPU run where it is not installed
    from hypothesis import HealthCheck, settings

    # No deadline and no health check that a loaded machine breaks. In CI the examples follow from the test alone;
    # elsewhere they are drawn, and a failure prints the blob that reproduces it.
    settings.register_profile(
        "syncd",
        deadline=None,
        derandomize=bool(os.environ.get("CI")),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("syncd")

pytest_plugins = ["support.engine_fixtures"]  # one launch of ranks for engines of core and parts

_RECORDS: list[str] = []
_MEASURED, _PROCESSOR = "measured", "processor"
_SECONDS: dict[str, float] = {}
_DURATIONS = os.environ.pop("SYNCD_DURATIONS", None)
"""The file that gets a line for each test as it ends, so that a run that is cut off has left them too: its seconds,
and the seconds of a processor that it and the processes that have ended by then took.

What tests start does not inherit it: a hook's programs see each variable that begins with SYNCD_.
"""


def _processor():
    """Return the seconds of a processor that this process and the ended ones that it started have taken."""
    forked = sys.modules.get("support.forked")
    return sum(os.times()[:4]) + (sum(forked.TAKEN) if forked else 0.0)


_BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[_BEGAN] = _processor()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append((_PROCESSOR, _processor() - item.stash.get(_BEGAN, _processor())))
    return report


@pytest.fixture
def record_line(request):
    """Add a line to what is printed when the session ends: numbers that a reader of the log must find."""
    # A report's properties reach the process that prints, whichever one ran the test.
    return lambda line: request.node.user_properties.append((_MEASURED, line))


@pytest.fixture
def shell(capsys):
    """Return what runs command lines of syncd in this process."""
    from support.cli import Shell  # a plain install may lack what it needs

    return Shell(capsys)


def pytest_configure():
    """Undo what a shell or nohup does to what it starts: tests send SIGINT and SIGHUP to processes they start."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_runtest_logreport(report):
    _SECONDS[report.nodeid] = _SECONDS.get(report.nodeid, 0.0) + report.duration
    if report.when == "teardown":
        _RECORDS.extend(line for name, line in report.user_properties if name == _MEASURED)
        if _DURATIONS is not None:
            taken = dict(report.user_properties).get(_PROCESSOR, 0.0)
            with open(_DURATIONS, "a", encoding="utf-8") as file:
                file.write(f"{_SECONDS.pop(report.nodeid):8.2f} {taken:8.2f} {report.nodeid}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from support.workers import Scheduling  # pytest-xdist may be absent

    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a worker where to write the groups of the tests that it collects."""
    from support.workers import FILE, GROUPS

    if GROUPS not in node.config.stash:
        node.config.stash[GROUPS] = os.path.join(tempfile.mkdtemp(prefix="syncd-tests-"), "groups.json")
        node.config.add_cleanup(lambda: shutil.rmtree(os.path.dirname(node.config.stash[GROUPS])))
    node.workerinput[FILE] = node.config.stash[GROUPS]


def pytest_collection_modifyitems(config, items):
    """Leave out what only a long target runs; start what takes longest first where workers share the tests."""
    left_out = [item for item in items if not _is_wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_wanted(item)]
    if hasattr(config, "workerinput"):
        from support.workers import FILE, write_groups

        items.sort(
            key=lambda item: (item.get_closest_marker("sweep") or item.get_closest_marker("slow")) is None
        )
        write_groups(config.workerinput[FILE], items)


def _is_wanted(item):
    """Return whether the environment asks for a test: most are always wanted."""
    marker = item.get_closest_marker("only_with")
    return marker is None or all(os.environ.get(name) == value for name, value in marker.kwargs.items())


@pytest.fixture(autouse=True)
def _log_of_its_own():
    """Leave no test's log set-up, and no closed stream of its, to the next one."""
    yield
    if "structlog" in sys.modules:
        sys.modules["structlog"].reset_defaults()
        sys.modules["structlog"].contextvars.clear_contextvars()


def pytest_terminal_summary(terminalreporter):
    if _RECORDS:
        terminalreporter.section("measured")
        for line in _RECORDS:
            terminalreporter.write_line(line)


def _need(reason: str | None) -> None:
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def shm():
    """Return a directory that is kept in memory."""
    if not os.path.isdir("/dev/shm") or not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm that can be written")
    made = tempfile.mkdtemp(prefix="syncd-test-", dir="/dev/shm")
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def strace_injection():
    _need(probe.strace_injection())


@pytest.fixture(scope="session")
def nfs_bed():
    """Return the path of the command that boots the NFS bed."""
    _need(probe.nfs())
    return f"{probe.BEDS}/nfs-bed"


@pytest.fixture(params=["ext4", "xfs"])
def loop_kind(request):
    """Return a kind of file system that can be made, mounted and cut off here."""
    _need(probe.loop_mount(request.param))
    return request.param


@pytest.fixture(scope="session")
def fuse():
    _need(probe.fuse())
