"""`explorer run` with servers as a member of broadcasts: trainer, explorers and engines are processes."""

import signal

import pytest
from support.broadcasts import HERE, LONG, left_over
from support.servers import Server
from test_broadcast_members import STEPS, applied, begun, heard, write_scene

from syncd.protocol.version import pair_of

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")


@pytest.fixture(scope="module")
def begin_from(tmp_path_factory):
    return begun(tmp_path_factory.mktemp("start"))


@pytest.fixture
def engine(begin_from, tmp_path):
    """Return what starts the engine of the job."""
    started = []

    def start(kind):
        started.append(Server(kind, f"{begin_from}/model", tmp_path / "engine.log"))
        return started[0]

    yield start
    for one in started:
        one.process.kill()


def begin(processes, begin_from, server, style):
    file = write_scene(processes, begin_from, style)
    program = f"{HERE}/programs/server_member.py"
    processes.start("e0", program, file, processes.job, "e0", server.kind, server.port)
    processes.start("trainer", f"{HERE}/programs/teach.py", file, processes.job, 1)


def check(processes):
    """All have ended on the same weights, by the version's own name, and experiences name what made them."""
    for name in ("trainer", "e0"):
        processes.ended(name)
    trained, found = processes.result("trainer"), processes.result("e0")
    assert found["digest"] == trained["digest"], processes.log("e0")
    assert pair_of(found["label"]) == (1, STEPS)
    assert (found["paused"], found["groups"], found["open"], found["sockets"]) == (False, 0, False, [])
    assert found["why"].startswith(("the trainer is gone", "the job is finished"))
    assert applied(processes, "e0") == (1, STEPS)
    assert left_over(processes.job) == []
    for one in trained["found"]:
        assert one["generation"] == 1
        assert one["own"] < 1e-3, one
    return trained, found


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_runs_each_version_before_its_files_are_published(processes, begin_from, engine, kind):
    begin(processes, begin_from, engine(kind), "fixed")
    trained, found = check(processes)
    assert [sent for _, sent in trained["ends"]] == [True] * STEPS
    assert heard(processes, "e0", "broadcast_received") == ["1.1", "1.2", "1.3"]
    assert heard(processes, "e0", "version_applied") == [], "no file was loaded"
    assert found["updates"] >= STEPS
    assert found["ways"] == ["memory"], "it is on this host"


def test_a_server_receives_broadcasts_while_it_generates(processes, begin_from, engine):
    """Rollouts that a version came into are of none: they are vouched for by all versions that they name."""
    server = engine("sglang")
    begin(processes, begin_from, server, "fully_async")
    for name in ("trainer", "e0"):
        processes.ended(name)
    assert heard(processes, "e0", "broadcast_received")
    assert server.state()["digest"] == processes.result("trainer")["digest"]
    assert pair_of(server.state()["label"]) == (1, STEPS)


@pytest.mark.fault("an exception between pause and resume leaves an engine paused")
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_broadcast_refused_by_the_server_comes_by_files_and_the_next_succeeds(
    processes, begin_from, engine, kind
):
    server = engine(kind)
    server.break_at("update", "refuse", 1)
    begin(processes, begin_from, server, "fixed")
    check(processes)
    assert heard(processes, "e0", "broadcast_receive_failed") == ["1.2"]
    assert heard(processes, "e0", "version_applied") == ["1.2"]
    assert heard(processes, "e0", "broadcast_received") == ["1.1", "1.3"]


def test_a_failed_first_broadcast_is_replaced_by_files(processes, begin_from, engine):
    server = engine("sglang")
    server.break_at("update", "refuse", 0)
    begin(processes, begin_from, server, "fixed")
    check(processes)
    assert heard(processes, "e0", "version_applied")[0] == "1.1"


def test_a_server_killed_during_a_broadcast_loads_files_after_its_restart(processes, begin_from, engine):
    server = engine("sglang")
    server.break_at("update", "SIGKILL", 1)
    begin(processes, begin_from, server, "fixed")
    assert server.process.wait(LONG) == -signal.SIGKILL
    processes.until(lambda: heard(processes, "e0", "broadcast_receive_failed"))
    server.start()
    check(processes)
    assert heard(processes, "e0", "broadcast_receive_failed") == ["1.2"]
    assert "1.2" in heard(processes, "e0", "version_applied")


def test_a_server_killed_during_the_last_broadcast_loads_it_after_restart(processes, begin_from, engine):
    server = engine("sglang")
    server.break_at("update", "SIGKILL", STEPS - 1)
    begin(processes, begin_from, server, "fixed")
    assert server.process.wait(LONG) == -signal.SIGKILL
    processes.ended("trainer")
    server.start()
    check(processes)
    assert heard(processes, "e0", "version_applied") == [f"1.{STEPS}"]
