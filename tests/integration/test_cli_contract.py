"""What is documented is what happens: exit codes, and the fields of every JSON document."""

import contextlib
import os
import re
import threading
import time

import pytest
from support.cli import VERBS, spawn
from support.documents import checked
from support.jobs import explorer, shard_bytes, write_step
from support.paths import ROOT

from syncd import console, errors
from syncd.errors import SyncdError
from syncd.protocol.engine_state import EngineReport, EngineState, GivenUp, Proof
from syncd.protocol.layout import Job
from syncd.protocol.local_disk import SystemClock
from syncd.protocol.presence import Presence, Publisher
from syncd.protocol.request import Request, write_request
from syncd.protocol.takeover import Candidate
from syncd.protocol.writer import StepWriter

pytest.importorskip("pydantic", reason="documents are checked by pydantic")
DOCS = ROOT / "docs"
CONVENTIONS = {0, console.INTERRUPTED, console.CLOSED_PIPE}
ELSEWHERE = {1, 69, 130, 141}
"""Reached in test_cli_main.py by a bug, Ctrl-C and a closed pipe, in test_follow_processes.py by a dead engine."""


@pytest.fixture
def job(tmp_path):
    """Return a job with everything in it that a document can show."""
    job, clock = Job.at(tmp_path), SystemClock()
    for step in (1, 2):
        write_step(job, step, full=step == 1)
    writer = StepWriter(job, 3, 2, "a")
    writer.begin()
    writer.receipt(1, [writer.write("actor/model-00001-of-00002.safetensors", b"x" * 10)])
    explorer(job, clock, "e0", applied=(1, 1), loading=(1, 2), leases=(1,))
    trainer = Publisher(job.disk, clock, job.trainers, Presence("t0", incarnation="i"))
    trainer.prepare()
    trainer.update(step=3)
    with open(f"{job.explorers}/torn.json", "w") as file:
        file.write("{")
    return job


@pytest.fixture
def published(shell, job):
    assert shell("watch", job.root, "--once", "--no-prune", "--log-level", "error").code == 0
    return job


# --- exit codes ---------------------------------------------------------------------------------------------


def documented_codes():
    table = (DOCS / "commands.md").read_text().split("## Exit codes")[1].split("\n## ")[0]
    return {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", table, re.MULTILINE)}


def tree(kind=SyncdError):
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


def ours():
    return list(dict.fromkeys(kind for kind in tree() if kind.__module__.startswith("syncd.")))


def test_documented_exit_codes_are_those_of_the_error_classes():
    assert set(documented_codes()) == {kind.exit_code for kind in ours()} | CONVENTIONS


def test_documented_exit_codes_match_the_docstring_of_errors():
    rows = re.findall(r"^(\d+) +(\S.*)$", errors.__doc__ or "", re.MULTILINE)
    documented = documented_codes()
    for code, text in rows:
        assert documented[int(code)].startswith(text), code
    assert {int(code) for code, _ in rows} == set(documented) - {console.INTERRUPTED, console.CLOSED_PIPE}


def test_no_two_error_classes_name_one_code():
    codes = [kind.code for kind in ours() if "code" in vars(kind)]
    assert len(set(codes)) == len(codes)


def damage(job):
    os.truncate(f"{job.step(2)}/actor/model-00001-of-00001.safetensors", 3)


def lead(job):
    candidate = Candidate(job, SystemClock())
    assert candidate.holder() is None
    term = candidate.claim()

    def beat():
        with contextlib.suppress(OSError, SyncdError):  # the job has gone with its test
            while True:
                term.beat(None)
                time.sleep(0.2)

    threading.Thread(target=beat, daemon=True).start()


def too_late(job):
    # The daemon, which is not there to be asked, has taken the request away: it refused.
    lead(job)
    threading.Timer(
        0.3, lambda: [os.unlink(f"{job.requests}/{name}") for name in os.listdir(job.requests)]
    ).start()


def everybody_writes(job):
    os.chmod(job.state, 0o777)


def misconfigured(job):
    with open(f"{job.root}/config.toml", "w") as file:
        file.write("[daemon]\nkeep_last = 0\n")


def nothing(_):
    return None


@pytest.mark.parametrize(
    ("code", "prepare", "args"),
    [
        (0, nothing, ["status", "{job}"]),
        (2, nothing, ["status", "{job}", "--nonsense"]),
        (2, nothing, ["verify", "{job}", "99"]),
        (2, nothing, ["publish", "{job}", "1", "{job}/nothing-there"]),
        (3, nothing, ["status", "{job}/none", "--check"]),
        (1, lead, ["status", "{job}", "--check", "--warn-age", "0"]),
        (2, nothing, ["status", "{job}", "--check", "--max-age", "0"]),
        (3, nothing, ["verify", "{job}", "3"]),
        (4, nothing, ["wait", "{job}", "--newer-than", "9.9", "--timeout", "0"]),
        (5, lead, ["watch", "{job}", "--once"]),
        (5, lead, ["prune", "{job}"]),
        (65, damage, ["verify", "{job}"]),
        (74, nothing, ["status", "{job}/none"]),
        (75, too_late, ["rollback", "{job}", "1", "--timeout", "20"]),
        (77, everybody_writes, ["doctor", "{job}", "--security"]),
        (2, nothing, ["watch", "{job}", "--once", "--keep-last", "0"]),
        (78, misconfigured, ["watch", "{job}", "--once"]),
        (78, nothing, ["ls", "{job}", "--config", "{job}/none.toml"]),
    ],
)
def test_each_documented_exit_code_is_reached(published, shell, code, prepare, args):
    prepare(published)
    done = shell(*(argument.format(job=published.root) for argument in args))
    assert done.code == code, done.err
    assert code in documented_codes()


def test_every_documented_exit_code_is_reached_by_some_test():
    marks = test_each_documented_exit_code_is_reached.pytestmark
    reached = {row[0] for mark in marks if mark.name == "parametrize" for row in mark.args[1]}
    assert reached | ELSEWHERE == set(documented_codes())


def test_the_daemon_exits_with_0_after_sigterm(published):
    with spawn("watch", published.root, "--log-format", "json") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if '"leadership_acquired"' in line:
                break
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


# --- JSON ---------------------------------------------------------------------------------------------------


def section(name):
    return (DOCS / "json.md").read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_status_json_is_as_documented(shell, published):
    write_request(published, Request("vacate", 1, reason="again"))
    document = checked("status", shell("status", published.root, "--json").document)
    for name in ("filling", "explorers", "trainers", "requests", "problems", "problem_groups"):
        assert document[name], f"nothing of {name} was checked"
    assert document["version"]["step"] == 2


def test_the_state_of_an_engine_is_as_documented(shell, published):
    proof, one = Proof("1.2", 0.1, 0.2, 0.3, None, 60, 1.0), GivenUp(3, "", "why", refused=False)
    report = EngineReport(EngineState.PROVEN, proof=proof, given_up=(one,))
    explorer(published, SystemClock(), "e9", info=report.document())
    document = checked("status", shell("status", published.root, "--json").document)
    engine = document["explorers"][-1]["engine"]
    assert (engine["proof"]["version"], engine["given_up"][0]["step"]) == ("1.2", 3)
    states = next(row for row in section("status").splitlines() if row.startswith("| `state` | `waiting`"))
    assert {state.value for state in EngineState} == set(re.findall(r"\w+", states.split("|")[2]))


def test_problem_names_are_documented(shell, published):
    damage(published)
    for state in EngineState:
        if state.is_trouble:
            explorer(published, SystemClock(), state.value, info=EngineReport(state).document())
    document = shell("status", published.root, "--json").document
    text = section("status").split("`problems[].name`")[1]
    stable = set(re.findall(r"`(\w+)`", text))
    named = {item["name"] for item in document["problems"]}
    assert {"published_step", "damaged_step", "daemon", "explorer/torn"} <= named
    assert named - {"explorer/torn"} <= stable


def test_ls_json_is_as_documented(shell, published):
    assert checked("ls", shell("ls", published.root, "--json").document)["steps"]


def export(directory):
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(shard_bytes({"w": (2, 2)}))
    return directory


@pytest.mark.parametrize("verb", ["verify", "wait", "publish", "pin", "unpin", "prune", "rollback"])
def test_json_of_other_verbs_is_as_documented(shell, published, verb, tmp_path_factory):
    more = {
        "publish": [9, export(tmp_path_factory.mktemp("source") / "export")],
        "prune": ["--dry-run"],
        "rollback": [1],
        "pin": [1],
        "unpin": [1],
    }.get(verb, [])
    done = shell(verb, published.root, *more, "--json")
    assert done.code == 0, done.err
    assert checked(verb, done.document)


def test_doctor_json_is_as_documented(shell, tmp_path):
    document = checked("doctor", shell("doctor", tmp_path, "--seconds", "0.1", "--json").document)
    assert document["findings"]
    (tmp_path / "config.toml").touch()
    tmp_path.chmod(0o777)
    document = checked("doctor --security", shell("doctor", tmp_path, "--security", "--json").document)
    assert document["findings"]


def test_every_verb_with_json_output_is_documented(shell):
    headings = set(re.findall(r"^## (\w+)$", (DOCS / "json.md").read_text(), re.MULTILINE))
    assert headings == {verb for verb in VERBS if "--json" in shell(verb, "--help").out}
