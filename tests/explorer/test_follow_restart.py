"""reload=restart: the follower owns its server, a real process, and starts it on each version."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from support import fake_answers, paths
from support.fake_engines import read_shard
from support.followers import Scene
from support.jobs import shard_bytes
from support.ports import free_port

from explorer_hooks.finding import open_hook
from explorer_hooks.hook import Running
from explorer_hooks.hooks import restarting, server_process
from explorer_hooks.hooks.server_process import ServerProcess
from syncd.errors import ConfigError
from syncd.protocol.engine_state import EngineState, engine_report_of
from syncd.protocol.probe import Probe, write_base_probe
from syncd.protocol.writer import StepWriter

pytestmark = pytest.mark.slow

PROGRAM = f"{paths.ROOT}/tests/programs/restarted_server.py"
ROWS = ((1, 2, 3, 4, 5), (6, 7, 8))
SHARD = "model-00001-of-00001.safetensors"
LONG = 30.0


def content_of(step):
    return shard_bytes({"layer.1.weight": (4, 8)}, step)


def probe_of(path):
    weights = {name: data for name, (_, data, _) in read_shard(path).items()}
    return Probe(
        ROWS, tuple(tuple(fake_answers.log_probs(weights, list(row))) for row in ROWS), "float32", "float32"
    )


def awaited(condition):
    until = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


class LateClock:
    """The hook's clock: a server that hangs is given up at once, one that answers gets the whole `start_timeout`."""

    def __init__(self, place):
        self.late, self._hung, self.sleep = 0.0, place / "hung", time.sleep

    def monotonic(self):
        if self._hung.exists():  # the server that was started last shows that it hangs
            self._hung.unlink()
            self.late += LONG + 1
        return time.monotonic() + self.late


def is_alive(process):
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Bed:
    """A job, and a server that its follower starts."""

    def __init__(self, place, **settings):
        self.place, self.port = place, free_port()
        self.scene = Scene(place / "job")
        self.start = place / "start"
        self.start.mkdir()
        (self.start / SHARD).write_bytes(content_of(0))
        (self.start / "config.json").write_text("{}")
        write_base_probe(self.scene.job, probe_of(self.start / SHARD), str(self.start))
        self.settings = {"start_timeout": "30", "stop_timeout": "5", **settings}
        self.follower = None

    @property
    def argv(self):
        return (sys.executable, PROGRAM, "{model}", "{port}", str(self.place))

    def hook(self):
        return open_hook(
            f"vllm=http://127.0.0.1:{self.port}",
            argv=self.argv,
            settings={
                "reload": "restart",
                "start_model": str(self.start),
                "server_log": f"{self.place}/log",
                **self.settings,
            },
            timeout=5.0,
        )

    def follow(self, **options):
        # Its start model is none that transformers reads; test_exam_adapters.py has one.
        self.follower = self.scene.follow(hook=self.hook(), retries=0, exam="off", **options)
        self.await_start_model()
        return self.follower

    def await_start_model(self):
        awaited(lambda: self.follower.turn(0.1) and self.report().state is EngineState.WAITING)

    def publish(self, step, *, config=True):
        writer = StepWriter(self.scene.job, step, 1, f"a{step}")
        writer.begin()
        shard = writer.write(f"actor/{SHARD}", content_of(step), tensors=1)
        more = [writer.write("actor/config.json", b"{}")] if config else []
        (self.place / "shard").write_bytes(content_of(step))
        writer.receipt(1, [shard], more, probe=probe_of(self.place / "shard"))
        writer.seal()
        writer.announce()
        self.scene.tick()

    def faults(self, **found):
        (self.place / "faults.json").write_text(json.dumps(found))

    def starts(self):
        """Return for each start the process, its child and the model."""
        lines = (self.place / "starts").read_text().splitlines()
        return [(int(one), int(other), model) for one, other, model in map(str.split, lines)]

    def report(self):
        return engine_report_of(self.scene.presence().info)

    def close(self):
        self.scene.close()


@pytest.fixture
def bed(tmp_path):
    made = Bed(tmp_path)
    yield made
    made.close()
    assert not any(is_alive(process) for start in made.starts() for process in start[:2])


def test_the_server_is_started_on_each_version_which_it_proves(bed):
    follower = bed.follow()
    assert "engine_calibrated" in bed.scene.names()
    assert "reload_tested" not in bed.scene.names()
    for step in (1, 2):
        bed.publish(step)
        assert follower.turn(LONG).kind == "applied"
        assert bed.report().state is EngineState.PROVEN
        assert bed.report().proof.mean < 1e-6
        assert follower.running() == Running(bed.scene.label(step))
    models = [model for _, _, model in bed.starts()]
    assert models == [str(bed.start), *(bed.scene.payload(step) for step in (1, 2))]
    assert not any(is_alive(process) for start in bed.starts()[:-1] for process in start[:2])
    assert all(map(is_alive, bed.starts()[-1][:2]))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dies", "ended with 1"),
        ("hangs", "did not answer for 30 s"),
        ("answers wrongly", "answers as other weights"),
        ("stubborn", ""),
    ],
)
def test_a_start_that_fails_goes_back_to_the_last_good_version(tmp_path, monkeypatch, fault, reason):
    monkeypatch.setattr(restarting, "time", LateClock(tmp_path))
    bed = Bed(tmp_path, stop_timeout="0.5")
    with contextlib.closing(bed):
        follower = bed.follow()
        bed.publish(1)
        assert follower.turn(LONG).kind == "applied"
        bed.faults(**{os.path.basename(os.path.dirname(bed.scene.payload(2))): fault})
        bed.publish(2)
        outcome = follower.turn(LONG)
        assert outcome.kind == ("failed" if reason else "applied")
        assert reason in outcome.reason
        assert follower.applied == (1, 1 if reason else 2)
        assert bed.report().ready
        bed.publish(3)
        assert follower.turn(LONG).pair == (1, 3)
        assert bed.report().state is EngineState.PROVEN
    assert not any(is_alive(process) for start in bed.starts() for process in start[:2])


def test_without_a_good_version_it_goes_back_to_the_start_model(bed):
    follower = bed.follow()
    bed.faults(actor="dies")
    bed.publish(1)
    assert follower.turn(LONG).kind == "failed"
    assert follower.applied is None
    assert bed.starts()[-1][2] == str(bed.start)
    bed.faults()
    bed.publish(2)
    assert follower.turn(LONG).kind == "applied"


def test_a_server_that_is_killed_is_started_again_and_gets_the_newest_version(bed):
    follower = bed.follow()
    bed.publish(1)
    assert follower.turn(LONG).kind == "applied"
    os.kill(bed.starts()[-1][0], signal.SIGKILL)
    awaited(lambda: follower.turn(0.2).kind == "applied")
    assert [model for _, _, model in bed.starts()][-2:] == [str(bed.start), bed.scene.payload(1)]
    assert bed.report().state is EngineState.PROVEN
    assert (
        bed.scene.names().count("engine_connection_failed") == 2
    )  # at its first start, and when it was killed


def test_a_server_that_hangs_is_started_again(tmp_path, monkeypatch):
    clock = LateClock(tmp_path)
    monkeypatch.setattr(restarting, "time", clock)
    bed = Bed(tmp_path, stop_timeout="0.5", ask_timeout="0.5")
    with contextlib.closing(bed):
        follower = bed.follow()
        os.kill(bed.starts()[-1][0], signal.SIGSTOP)
        clock.late = LONG + 1
        awaited(lambda: follower.turn(0.1) and len(bed.starts()) == 2)
        bed.await_start_model()
    assert not any(is_alive(process) for start in bed.starts() for process in start[:2])


def test_a_port_in_use_is_no_engine(tmp_path):
    bed = Bed(tmp_path)
    with contextlib.closing(bed), socket.create_server(("127.0.0.1", bed.port)):
        follower = bed.scene.follow(hook=bed.hook())
        assert follower.turn(0.5).kind == "unreachable"
        assert bed.report().state is EngineState.UNREACHABLE
        assert "is in use by another process" in bed.report().reason
        assert not (tmp_path / "starts").exists()


def test_a_version_without_a_configuration_is_refused_and_the_server_left_alone(bed):
    follower = bed.follow()
    bed.publish(1, config=False)
    outcome = follower.turn(LONG)
    assert outcome.kind == "refused"
    assert "without its model's configuration" in outcome.reason
    assert len(bed.starts()) == 1


def test_the_server_ends_with_a_follower_that_is_killed(tmp_path):
    bed = Bed(tmp_path)
    settings = {"reload": "restart", "start_model": bed.start, **bed.settings}
    options = [word for pair in settings.items() for word in ("--hook-option", "{}={}".format(*pair))]
    address = f"vllm=http://127.0.0.1:{bed.port}"
    command = [sys.executable, "-m", "syncd", "follow", bed.scene.root, "--hook", address, *options, "--"]
    with contextlib.closing(bed), open(tmp_path / "follow.log", "wb") as log:
        process = subprocess.Popen([*command, *bed.argv], stderr=log, cwd=paths.ROOT)
        awaited(lambda: (tmp_path / "starts").exists() and bed.starts())
        process.kill()
        process.wait(LONG)
        awaited(lambda: not any(map(is_alive, bed.starts()[0][:2])))


@pytest.mark.parametrize(
    ("address", "argv", "settings", "message"),
    [
        ("http://127.0.0.1:1", (), {"reload": "restart", "start_model": "/m"}, "needs a command"),
        (
            "http://127.0.0.1:1",
            ("env", "vllm"),
            {"reload": "restart", "start_model": "/m"},
            "needs a command",
        ),
        ("http://127.0.0.1:1", ("env", "{model}"), {"reload": "restart"}, "needs start_model"),
        (
            "http://127.0.0.1:1",
            ("no-such", "{model}"),
            {"reload": "restart", "start_model": "/m"},
            "no program",
        ),
        (
            "http://10.0.0.1:1",
            ("env", "{model}"),
            {"reload": "restart", "start_model": "/m"},
            "cannot be started",
        ),
        ("http://127.0.0.1:1", ("env", "{model}"), {}, "starts no server"),
        ("http://127.0.0.1:1", (), {"stop_timeout": "3"}, "starts no server"),
        ("http://127.0.0.1:1", (), {"reload": "again"}, "reload=again"),
    ],
)
def test_what_does_not_fit_is_refused(address, argv, settings, message):
    for hook in ("vllm", "sglang"):
        with pytest.raises(ConfigError, match=message) as caught:
            open_hook(f"{hook}={address}", argv=argv, settings=settings)
        assert caught.value.hint


def test_a_server_that_does_not_end_is_not_forgotten(monkeypatch):
    monkeypatch.setattr(server_process, "KILLED", 0.1)
    server = ServerProcess(0.1)
    server.start(["sleep", "60"])
    guard = server._guard.pid
    os.kill(guard, signal.SIGSTOP)  # what a server that a dead mount blocks does to it
    assert [server.stop(), server.stop(), server.is_running] == [False, False, True]
    os.kill(guard, signal.SIGCONT)
    monkeypatch.setattr(server_process, "KILLED", LONG)
    assert server.stop()
    assert not server.is_running
