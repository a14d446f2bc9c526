"""Functions of users in processes: what they fork, write where they should not, and leave running."""

import json
import random
import textwrap
import threading

import pytest
from support.served_process import MINUTES
from support.synchronizers import eventually

from explorer_hooks.run.function_processes import FunctionProcesses

AGENT = """
import json, os, signal, stat, subprocess, sys, time

def pipes():
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        if number > 2 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            yield number

def write(data):
    for number in pipes():
        try:
            os.write(number, data)
        except OSError:
            pass

def said(number, reward):
    return json.dumps({"id": number, "scores": [{"reward": reward, "info": {}}]}).encode() + b"\\n"

def run(task):
    kind, reward = task["kind"], task["reward"]
    if kind == "forks":
        os.fork()
    elif kind == "forks and waits":
        if os.fork() == 0:
            time.sleep(0.3)
    elif kind == "forks and raises":
        if os.fork() == 0:
            raise RuntimeError("in the child")
    elif kind == "forks and exits":
        if os.fork() == 0:
            sys.exit(0)
    elif kind == "answers for the next":
        for number in range(200):
            write(said(number, -1.0))
    elif kind == "half a line":
        write(b'{"id": ')
    elif kind == "a huge line":
        for _ in range(1 << 10):
            write(b"x" * (1 << 16))
    elif kind == "no answer":
        write(b"[1]\\nnull\\n{}\\n\\xff\\xfe\\n")
    elif kind == "no score":
        for number in range(200):
            write(json.dumps({"id": number, "scores": "many"}).encode() + b"\\n")
    elif kind == "closes":
        os.closerange(3, 64)
    elif kind == "pickles":
        import pickle
        class Planted:
            def __reduce__(self):
                return (open, (task["planted"], "w"))
        data = pickle.dumps(Planted())
        write(len(data).to_bytes(4, "big") + data)
    elif kind == "leaves a writer":
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.2)
            for number in range(200):
                write(said(number, -1.0))
            time.sleep(1)
            os._exit(0)
    return reward

def stops_tools(task):
    ends = []
    for number in (signal.SIGTERM, signal.SIGINT):
        tool = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(task["pause"])
        tool.send_signal(number)
        try:
            ends.append(-tool.wait(20))
        except subprocess.TimeoutExpired:
            tool.kill()
            ends.append(0)
    child = os.fork()
    if not child:
        time.sleep(600)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return {"reward": 1.0, "ends": ends, "forked": os.waitstatus_to_exitcode(status)}

def hangs(task):
    tool = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(task["note"], "w") as file:
        file.write(f"{tool.pid} {os.getpid()}")
    time.sleep(600)

def ignores(task):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hangs(task)

def slow(task):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    return 1.0

def reads(task):
    tool = subprocess.run(["cat"], stdout=subprocess.PIPE, timeout=20)
    return {"reward": 1.0, "read": len(tool.stdout) + len(sys.stdin.read())}

def has_children(task):
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(abs, [-3])[0]
"""


@pytest.fixture
def functions(tmp_path):
    """Return a function that opens processes of a function above; all are closed in the end."""
    (tmp_path / "own_agent.py").write_text(textwrap.dedent(AGENT))
    opened = []

    def one(name="run", timeout=MINUTES, workers=1):
        opened.append(FunctionProcesses(f"own_agent:{name}", timeout, workers, [str(tmp_path)]))
        return opened[-1]

    yield one
    for each in opened:
        each.close()


FORKS = ("forks", "forks and waits", "forks and raises", "forks and exits")
WRITES = (
    *("answers for the next", "half a line", "a huge line", "no answer", "no score", "closes", "pickles"),
    "leaves a writer",
)


@pytest.mark.fault("a function agent that forks and returns twice shifts rewards to later rollouts")
@pytest.mark.parametrize("kind", FORKS)
def test_a_function_that_forks_and_returns_twice_keeps_its_reward_and_shifts_no_other(functions, kind):
    called, chosen = functions(), random.Random(kind)
    for number in range(12):
        task = {"kind": chosen.choice(["plain", kind]), "reward": float(number)}
        (score,) = called.call({"task": task})
        assert score.reward == number, (number, task, score)


@pytest.mark.fault("a function agent that forks and returns twice shifts rewards to later rollouts")
@pytest.mark.parametrize("kind", WRITES)
def test_what_a_function_writes_for_other_calls_never_becomes_their_reward(functions, tmp_path, kind):
    """The call that writes may fail, and the next one of its process; no call has another's reward."""
    called, planted = functions(timeout=10.0), tmp_path / "planted"
    rewards = []
    for number in range(6):
        writes = number % 3 == 1
        task = {"kind": kind if writes else "plain", "reward": float(number), "planted": str(planted)}
        (score,) = called.call({"task": task})
        assert score.reward in ([None, number, -1.0] if writes else [None, number]), (number, score)
        assert (score.reward is None) == bool(score.problem)
        rewards.append(score.reward)
    assert not planted.exists(), "what a process sends is not unpickled"
    assert rewards[0] == 0.0
    assert [one for one in rewards[3:] if one is not None], "the process was replaced"


def test_tools_of_a_function_end_by_the_signals_that_end_every_program(functions):
    """What the process does not take note of itself, it must not pass on."""
    (score,) = functions("stops_tools").call({"task": {"pause": 0.2}})
    assert score.info == {"ends": [15, 2], "forked": -15}, score


@pytest.mark.parametrize("name", ["hangs", "ignores"])
def test_a_function_that_takes_too_long_leaves_nothing_running(functions, tmp_path, name):
    note = tmp_path / "note"
    (score,) = functions(name, timeout=2.0).call({"task": {"note": str(note)}})
    assert score.problem == "it took more than 2 s"
    for pid in note.read_text().split():
        eventually(lambda pid=pid: not is_running(int(pid)))


def test_a_scorer_that_is_closed_leaves_nothing_running(functions, tmp_path):
    note, called = tmp_path / "note", functions("hangs")
    thread = threading.Thread(target=called.call, args=({"task": {"note": str(note)}},), daemon=True)
    thread.start()
    eventually(lambda: note.exists() and " " in note.read_text())
    called.close()
    thread.join(MINUTES)
    assert not thread.is_alive()
    for pid in note.read_text().split():
        eventually(lambda pid=pid: not is_running(int(pid)))


def test_a_function_is_not_ended_by_a_signal_that_a_service_manager_sends_to_all_processes(functions):
    """The explorer ends it; else a stop would be taken for a failed attempt."""
    called = functions("slow")
    found = []
    thread = threading.Thread(target=lambda: found.extend(called.call({"task": {}})))
    thread.start()
    thread.join(MINUTES)
    assert found[0].reward == 1.0, found


def test_tools_of_a_function_read_nothing_of_what_it_is_asked(functions):
    called = functions("reads")
    assert [called.call({"task": {"n": n}})[0].info for n in range(2)] == [{"read": 0}] * 2


def test_a_function_may_have_processes_of_its_own(functions):
    assert functions("has_children").call({"task": {}})[0].reward == 3.0


def test_what_a_function_is_given_and_returns_is_the_same_on_both_sides(functions, tmp_path):
    (tmp_path / "own_agent.py").write_text("def run(task):\n    return {'reward': 0.1, 'was': task}\n")
    task = {"text": "\ud800 \u2028 \n\r ä" * (1 << 16), "nan": 0.1 + 0.2, "none": None, "deep": [[{"a": []}]]}
    (score,) = functions().call({"task": task})
    assert (score.reward, score.info) == (0.1, {"was": task})
    assert json.dumps(score.info)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
