"""Findings, and how a probe is run."""

import errno
import os
import threading
import time
from collections.abc import Callable

import pytest

from syncd.errors import TimedOutError
from syncd.parts.doctor.probe import (
    FileSystemProbe,
    Finding,
    ProbeTarget,
    Verdict,
    bounded,
    errno_name,
    milliseconds,
    ok,
    percentile,
    probe,
    scratch_directory,
    warn,
    worst,
)
from syncd.parts.doctor.report import probe_all


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((), "ok"),
        (("skip",), "ok"),
        (("ok", "skip"), "ok"),
        (("ok", "warn"), "warn"),
        (("warn", "fail", "ok"), "fail"),
    ],
)
def test_the_overall_verdict_is_the_worst_one(verdicts: tuple[Verdict, ...], expected: str) -> None:
    assert worst(Finding("name", verdict, "") for verdict in verdicts) == expected


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (29.84, "29.8 s"),
        (1.0, "1.0 s"),
        (0.12, "120 ms"),
        (0.0034, "3.4 ms"),
        (0.00021, "0.21 ms"),
        (0.0, "0 ms"),
    ],
)
def test_durations_are_formatted_with_a_suitable_unit(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (51.0, 100.0, 100.0)
    assert (percentile([3.0], 99), percentile([], 50)) == (3.0, 0.0)


@pytest.mark.parametrize(("essential", "verdict"), [(True, "fail"), (False, "warn")])
def test_an_unexpected_error_is_a_finding_with_advice(
    tmp_path: object, essential: bool, verdict: str
) -> None:
    def full(_: ProbeTarget) -> Finding:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    found = FileSystemProbe("full", essential, full)(ProbeTarget("/job", str(tmp_path)))
    assert (found.verdict, found.detail) == (verdict, "EDQUOT: Disk quota exceeded")
    assert "quota -s" in found.advice


def test_each_probe_runs_in_its_own_directory(tmp_path: object) -> None:
    @probe("look")
    def look(place: ProbeTarget) -> Finding:
        return ok(os.path.relpath(place.scratch, str(tmp_path)), {"entries": len(os.listdir(place.scratch))})

    assert look(ProbeTarget("/job", str(tmp_path))) == Finding("look", "ok", "look", "", {"entries": 0})


def test_os_errors_are_shown_by_their_errno_name() -> None:
    assert errno_name(OSError(errno.ENOSPC, "")) == "ENOSPC"
    assert errno_name(OSError("odd")) == "OSError"


def test_after_a_stuck_essential_probe_the_rest_is_skipped(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr("syncd.parts.doctor.report.STUCK", 0.05)
    small = FileSystemProbe("small", False, lambda _: ok(str(release.wait(10))))
    stuck = FileSystemProbe("stuck", True, lambda _: ok(str(release.wait(10))))
    asked = FileSystemProbe("asked", True, lambda _: warn("must not be asked"))
    found = list(probe_all((small, stuck, asked), ProbeTarget("/job", str(tmp_path), seconds=0.05)))
    release.set()
    assert [(finding.name, finding.verdict) for finding in found] == [
        ("small", "warn"), ("stuck", "fail"), ("asked", "skip"),
    ]  # fmt: skip


def test_bounded_returns_raises_or_times_out() -> None:
    assert bounded(lambda: None, 5) is None
    with pytest.raises(PermissionError):
        bounded(_raiser(PermissionError()), 5)
    with pytest.raises(TimedOutError):
        bounded(lambda: time.sleep(0.5), 0.01)


def _raiser(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_the_scratch_directory_is_removed_after_an_error(
    tmp_path: object, error: type[BaseException]
) -> None:
    def interrupted() -> None:
        with scratch_directory(str(tmp_path)) as scratch:
            os.makedirs(f"{scratch}/a/b")
            raise error

    with pytest.raises(error):
        interrupted()
    assert os.listdir(str(tmp_path)) == []


def test_the_scratch_directory_is_removed_while_a_probe_still_writes(tmp_path: object) -> None:
    over = threading.Event()

    def write(scratch: str) -> None:
        for number in range(10_000):
            if over.is_set():
                return
            try:
                open(f"{scratch}/{number}", "x").close()
            except FileNotFoundError:
                return

    with scratch_directory(str(tmp_path)) as scratch:
        writer = threading.Thread(target=write, args=(scratch,))
        writer.start()
    over.set()
    writer.join()
    assert os.listdir(str(tmp_path)) == []
