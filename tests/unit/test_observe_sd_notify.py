"""What systemd hears."""

import os
import socket
import threading
import time
import uuid
from types import SimpleNamespace

import pytest

from syncd.observe import sd_notify
from syncd.observe.sd_notify import Notifier, watchdog_interval


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """Return a listening socket and the NOTIFY_SOCKET that names it."""
    name = f"@syncd-{uuid.uuid4().hex}" if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        listener.settimeout(0.05)
        yield listener, name


def heard(listener):
    messages = []
    while True:
        try:
            messages.append(dict(line.split("=", 1) for line in listener.recv(4096).decode().splitlines()))
        except TimeoutError:
            return messages


def test_systemd_is_notified_from_ready_to_stopping(manager):
    listener, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready("starting")
    notifier.alive("step 3\npublished")
    notifier.alive("step 3\npublished")
    notifier.status("in trouble")
    earliest = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    notifier.ready("again")
    notifier.stopping()
    messages = heard(listener)
    latest = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    reloading = messages.pop(3)
    assert reloading["RELOADING"] == "1"
    assert earliest <= int(reloading["MONOTONIC_USEC"]) <= latest
    assert messages == [
        {"READY": "1", "STATUS": "starting"},
        {"STATUS": "step 3 published"},
        {"STATUS": "in trouble"},
        {"READY": "1", "STATUS": "again"},
        {"STOPPING": "1", "STATUS": "stopping"},
    ]


def test_watchdog_signals_are_sent_in_time_and_not_more_often(manager, monkeypatch):
    listener, name = manager
    now = [1000.0]
    monkeypatch.setattr(sd_notify, "time", SimpleNamespace(monotonic=lambda: now[0]))
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": str(os.getpid())})
    for _ in range(110):
        notifier.alive("s")
        now[0] += 0.002
    beats = [message for message in heard(listener) if "WATCHDOG" in message]
    assert len(beats) == 5


def test_a_status_message_is_not_a_watchdog_signal(manager):
    listener, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000"})
    notifier.status("in trouble")
    assert heard(listener) == [{"STATUS": "in trouble"}]


def test_a_status_with_a_path_that_is_no_utf_8_is_sent(manager):
    listener, name = manager
    Notifier({"NOTIFY_SOCKET": name}).alive("stuck: stat /j\udcff")
    assert heard(listener) == [{"STATUS": "stuck: stat /j\\udcff"}]


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all", "@nobody-listens"])
def test_an_unreachable_notify_socket_is_ignored(address):
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000"})
    notifier.ready("x")
    notifier.alive("y")
    notifier.stopping()


def test_a_manager_that_does_not_read_does_not_block(manager):
    _, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    telling = threading.Thread(
        target=lambda: [notifier.status(f"status {n}") for n in range(2000)], daemon=True
    )
    telling.start()
    telling.join(60)
    assert not telling.is_alive()


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
    ],
)
def test_the_watchdog_interval_is_read_from_the_environment(environment, seconds):
    assert watchdog_interval(environment) == seconds
